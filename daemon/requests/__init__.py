"""What may be asked: sampling parameters and structured output, checked before a job is accepted."""
