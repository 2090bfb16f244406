"""A step that is not in the books of its batch yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pending:
    """A step that was prepared, and perhaps begun.

    Attributes:
        rows: Those it computes and that are still occupied.
        cursor: The column it writes.
        begun: It was launched.
    """

    rows: set[int]
    cursor: int
    begun: bool = False
