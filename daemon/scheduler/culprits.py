"""Who is to blame that memory ran out: a query that takes too much, or somebody outside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

#: Failures alone, and the time from the first to the last of them, before a query ends while nothing at all
#: goes well: a neighbour that takes memory for a while makes it wait, not fail.
MOST_TRIES: Final = 4
PATIENCE_S: Final = 30.0
#: A pause is twice the one before, until something goes well.
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0


@dataclass(slots=True)
class _Trial:
    """Failures of a query that has come no further.

    Attributes:
        progress: How far it had come.
        since_s: When it failed first.
        times: How often it has.
        others_went_on: Another query has got a token since the first.
    """

    progress: int
    since_s: float
    times: int = 0
    others_went_on: bool = False

    def exhausted(self, now_s: float) -> bool:
        return self.times >= MOST_TRIES and now_s - self.since_s >= PATIENCE_S


class Culprits:
    """Judges queries that find no memory. Pure: told of failures and successes, and of the time.

        fails alone ── pause ── another succeeds ── fails alone again: the culprit
        fails alone ── pause ── another fails alone too ── longer pause ── ...: somebody outside

    Attributes:
        resume_s: Nothing is tried before.
    """

    def __init__(self) -> None:
        self.resume_s = -math.inf
        self._pause_s = FIRST_PAUSE_S
        self._alone: dict[str, _Trial] = {}
        self._among: dict[str, _Trial] = {}

    def failed_alone(self, query_id: str, progress: int, now_s: float) -> bool:
        """A query has found no memory though nothing was left to give back; returns whether it must end.

        Args:
            query_id: Which.
            progress: How far it has come; once it is further, it is judged anew.
            now_s: Monotonic clock.
        """
        trial = _note(self._alone, query_id, progress, now_s)
        return trial.exhausted(now_s) or (trial.times > 1 and trial.others_went_on)

    def failed_among(self, query_id: str, progress: int, now_s: float) -> float:
        """A prompt has found no memory beside rows that it may not take; returns seconds to its next try."""
        trial = _note(self._among, query_id, progress, now_s)
        return min(FIRST_PAUSE_S * (1 << min(trial.times, 8)), LONGEST_PAUSE_S)

    def overdue(self, query_id: str, now_s: float) -> bool:
        """Whether a prompt was put off beside others for so long that its equals must make room."""
        trial = self._among.get(query_id)
        return trial is not None and trial.exhausted(now_s)

    def pause(self, now_s: float) -> None:
        """Let nothing be tried for a while, longer each time until something succeeds."""
        self.resume_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def succeeded(self, query_ids: Collection[str]) -> None:
        """These queries have got a token: for all that takes there was memory."""
        if not query_ids:
            return
        self._pause_s = FIRST_PAUSE_S
        for query_id, trial in self._alone.items():
            trial.others_went_on = trial.others_went_on or any(other != query_id for other in query_ids)

    def keep(self, query_ids: Collection[str]) -> None:
        """Forget all others: they have ended."""
        for trials in (self._alone, self._among):
            for query_id in [query_id for query_id in trials if query_id not in query_ids]:
                del trials[query_id]


def _note(trials: dict[str, _Trial], query_id: str, progress: int, now_s: float) -> _Trial:
    """Count a failure."""
    trial = trials.get(query_id)
    if trial is None or progress > trial.progress:
        trial = trials[query_id] = _Trial(progress, now_s)
    trial.times += 1
    return trial
