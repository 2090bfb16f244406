"""What a policy offers beside the three methods it must have."""

from __future__ import annotations


def speaks_for(policy: object, hint: str, method: str) -> bool:
    """Whether a policy has a hint that was made for the method it has.

    A class that replaces `method` and inherits `hint` does not: the hint tells of what the method did before.
    """
    for names in (getattr(policy, "__dict__", {}), *map(vars, type(policy).__mro__)):
        if hint in names:
            return True
        if method in names:
            return False
    return False
