"""Logs, metrics and the words exchanged with systemd."""
