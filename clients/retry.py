"""When a call is tried again, and after how long. Pure: no clock, no sleep."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.clients.errors import ExhaustedError, UnavailableError

if TYPE_CHECKING:
    from batond.clients.errors import BatondClientError

_MOST_DOUBLINGS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How patient a client is.

    Attributes:
        attempts: Most attempts of a call that answers once, the first included.
        stream_attempts: Most attempts in a row to get a broken stream going again. More than `attempts`: a
            daemon that was restarted loads its model first, and the work done is worth waiting for.
        base_s: Longest wait before the second attempt; doubles with every further one.
        cap_s: Longest wait between two attempts.
        wait_for_quota: Wait where a quota or the queue is full and the daemon says when to try again; if not,
            the caller is told at once.
    """

    attempts: int = 5
    stream_attempts: int = 20
    base_s: float = 0.1
    cap_s: float = 5.0
    wait_for_quota: bool = True


class Backoff:
    """Counts the attempts of one call and says how long to wait before the next.

    Waits are drawn evenly from the upper half of an exponentially growing span, so that clients that lost the
    same daemon don't come back at the same moment.
    """

    def __init__(self, attempts: int, policy: RetryPolicy, source: random.Random | None = None) -> None:
        self._attempts = attempts
        self._policy = policy
        # Spreads clients over time; nothing secret depends on it.
        self._random = source or random.Random()  # noqa: S311
        self._made = 1

    def reset(self) -> None:
        """Starts to count anew: the call made progress."""
        self._made = 1

    def jitter_s(self, span_s: float) -> float:
        """Draws a wait from the whole span: clients that lost the same daemon spread."""
        return self._random.uniform(0.0, span_s)

    def delay_s(self, error: BatondClientError) -> float | None:
        """Says how long to wait before the next attempt; None if there should be none.

        The daemon's own wish (google.rpc.RetryInfo) goes before the drawn wait. An exhausted quota is retried
        only if the daemon says when: without that word it may be a limit that no waiting lifts.
        """
        retryable = isinstance(error, UnavailableError) or (
            isinstance(error, ExhaustedError)
            and error.retry_after_s is not None
            and self._policy.wait_for_quota
        )
        if not retryable or self._made >= self._attempts:
            return None
        doublings = min(self._made - 1, _MOST_DOUBLINGS)  # A float has no more than a thousand.
        span_s = min(self._policy.cap_s, self._policy.base_s * 2.0**doublings)
        self._made += 1
        drawn_s = self._random.uniform(span_s / 2, span_s)
        return drawn_s if error.retry_after_s is None else max(drawn_s, error.retry_after_s)
