"""Other engines beside batond's own, on the same shapes and requests, each in a process of its own."""
