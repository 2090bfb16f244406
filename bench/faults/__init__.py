"""What faults are made with: a proxy before Redis, a crew of daemons to kill, a clock to turn.

The tests of `tests/faults` and the soak `python -m batond.bench chaos` are driven with it.
"""
