"""Published ways of scheduling on batond's engine: real decisions and tokens, time by arithmetic."""
