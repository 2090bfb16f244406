"""How much may be used at once, learned from what failed: lowered at once, raised slowly."""

from __future__ import annotations

from typing import Final

#: Steps that must go well before a cap is raised.
CALM_STEPS: Final = 32
#: However often raising it has failed.
MOST_CALM_STEPS: Final = 1024


class LearnedCap:
    """A bound that follows failures, so that the same wall isn't run into in every step.

        failed at 8 ── 7 ── calm steps ── 8 ── failed ── 7 ── twice as many ── 8 ── ... ── forgotten

    Args:
        growth: What a raise multiplies it by; it is raised by one at least.
    """

    def __init__(self, growth: float) -> None:
        self._growth = growth
        self._most: int | None = None
        self._patience_steps = CALM_STEPS
        self._calm_steps = 0

    @property
    def most(self) -> int | None:
        """What may be used; None is no bound."""
        return self._most

    def bound(self, wanted: int) -> int:
        """The part of what is wanted that may be used."""
        return wanted if self._most is None else min(wanted, self._most)

    def lower(self, to: int) -> None:
        """More than `to` has failed. One is always left."""
        if self._most is not None:  # Since the last failure it was raised too soon, or not lowered enough.
            self._patience_steps = min(2 * self._patience_steps, MOST_CALM_STEPS)
        self._most = max(1, to if self._most is None else min(to, self._most))
        self._calm_steps = 0

    def note_calm(self, full: int) -> None:
        """A step has gone well.

        Args:
            full: What would be used without the cap; once that is allowed again, the cap is forgotten.
        """
        if self._most is None:
            return
        self._calm_steps += 1
        if self._calm_steps < self._patience_steps:
            return
        self._calm_steps = 0
        self._most = max(self._most + 1, int(self._most * self._growth))
        if self._most >= full:
            self._most = None
            self._patience_steps = CALM_STEPS
