"""Lua scripts: every state change of a job is one of these."""
