"""`python -m batond.bench trace`: real traces on a real daemon, over gRPC, open loop."""
