"""Scheduling policies: one small pure object a file, registered by entry point."""
