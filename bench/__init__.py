"""Measurements: workloads, comparison modes and the demonstration."""
