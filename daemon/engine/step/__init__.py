"""The parts of one step: prompts, packed prompts, decode."""
