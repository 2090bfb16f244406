"""Typed messages between front and engine, and the socket they cross. No pickle."""
