"""Kinds of a batch behind one protocol: ring of columns, padded cache, no cache."""
