"""Replays traces through the real planner, policies and queue order, in virtual time."""
