"""Moves KV slices between device and host RAM. Knows bytes, owners and checksums; knows no model."""
