"""Queries and what happens to them: admission, rows, parks, sessions, their end."""
