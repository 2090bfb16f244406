"""How much is tried: little in each run of the tests, all of it with BATOND_SOAK=1 (`make soak`)."""

from __future__ import annotations

import os
from typing import Final, TypeVar

T = TypeVar("T")
SOAK_VARIABLE: Final = "BATOND_SOAK"
SOAK: Final = os.environ.get(SOAK_VARIABLE, "") not in {"", "0"}


def full_or(reduced: T, full: T) -> T:
    """The full count in a soak, else the reduced one."""
    return full if SOAK else reduced
