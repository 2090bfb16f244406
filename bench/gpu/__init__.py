"""What a card does under the engine, against what the same card could do at best, in one run.

`python -m batond.bench gpu`; `run.py` says in which order. The engine's own classes compute everything.
"""
