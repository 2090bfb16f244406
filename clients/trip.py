"""Which address a call goes to, and where it goes next when that fails. Pure: no channel, no sleep."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any, Final

from batond.clients.errors import ClientDeadlineError, NotFoundError, UnavailableError
from batond.clients.retry import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.clients.errors import BatondClientError
    from batond.clients.retry import RetryPolicy

NOT_SERVED: Final = "MODEL_NOT_SERVED"


class Rota:
    """The addresses of a client, by number, and what its calls have learned of them.

    Calls go to one address until that fails; where a client begins is drawn, so that clients spread over the
    daemons. Threads may share it.

    Args:
        count: How many addresses there are.
        first: The one to begin with; None draws it.
    """

    def __init__(self, count: int, first: int | None = None) -> None:
        self.count = count
        # Spreads clients over daemons; nothing secret depends on it.
        self._current = random.randrange(count) if first is None else first  # noqa: S311
        self._models: dict[str, int] = {}
        self._lock = threading.Lock()

    def place(self, model: str) -> int:
        """Where a call begins; `model` is what it asks for, if it names one."""
        with self._lock:
            return self._models.get(model, self._current)

    def add(self) -> int:
        """Counts one more address; gives its number."""
        with self._lock:
            self.count += 1
            return self.count - 1

    def failed(self, place: int, following: int) -> None:
        """Lets calls begin at `following` that would begin at `place`."""
        with self._lock:
            if self._current == place:
                self._current = following
            for model in [model for model, known in self._models.items() if known == place]:
                del self._models[model]

    def served(self, model: str, place: int) -> None:
        """Notes who serves a model that another address did not."""
        with self._lock:
            self._models[model] = place


class Trip:
    """The way of one call, or of following one job, over the addresses.

    An address that is away, or has not what is asked for, is left for the next; once all were tried, the call
    waits as the policy says and begins another round.

    Args:
        rota: The client's addresses.
        policy: How patient the client is.
        attempts: Most rounds; 1 neither repeats the call nor takes it to another address.
        model: What the call asks for, if it names one.
        hinted: Gives the numbers of the addresses that a daemon's hint names and the client trusts.

    Attributes:
        place: Number of the address of the next attempt.
        backoff: Counts rounds.
    """

    def __init__(
        self,
        rota: Rota,
        policy: RetryPolicy,
        attempts: int,
        *,
        model: str = "",
        hinted: Callable[[str], Sequence[int]] = lambda _: (),
    ) -> None:
        self._rota = rota
        self._model = model
        self._hinted = hinted
        self._wanders = attempts > 1
        self._spread_s = policy.base_s
        self.backoff = Backoff(attempts, policy)
        self.place = rota.place(model)
        self._tried: set[int] = set()
        self._hints: list[int] = []
        self._first: BatondClientError | None = None  # Of this round; one that waiting may mend goes before.
        self._found = False

    @property
    def untried(self) -> int:
        """How many addresses are left for this round, besides the present one."""
        return self._rota.count - len(self._tried | {self.place}) if self._wanders else 0

    def timeout_s(self, left_s: float) -> float:
        """How long the next attempt may take of the time left: some is kept for the addresses after it."""
        return max(0.0, left_s) / (1 + self.untried)

    def arrived(self) -> None:
        """Notes that the address answered."""
        if self._tried and self._model and isinstance(self._first, NotFoundError):
            self._rota.served(self._model, self.place)
        self._found = True
        self._begin()

    def after(self, error: BatondClientError) -> float:
        """Notes a failed attempt and gives the seconds to wait before the next one, at `place`.

        Raises:
            BatondClientError: What the call failed of: trying again can't help, or not any more.
        """
        # An address that does not answer in its part of the time counts as one that is away.
        away = isinstance(error, UnavailableError) or (
            isinstance(error, ClientDeadlineError) and self.untried > 0
        )
        if not self._wanders or not (away or isinstance(error, NotFoundError)):
            return self._wait(error)
        left = self.place
        self._tried.add(left)
        if error.reason == NOT_SERVED:
            self._hints = [*self._hinted(error.details.get("addresses", "")), *self._hints]
        if self._first is None or (away and self._may_wait_for_it(self._first)):
            self._first = error
        following = self._next(left)
        if away:
            self._rota.failed(left, following)
        if following in self._tried:
            first, delay_s = self._first, self._wait(self._first)
            self._begin()
            self.place = following if isinstance(first, UnavailableError) else left
            return delay_s
        self.place = following
        return self.backoff.jitter_s(self._spread_s)

    def _may_wait_for_it(self, error: BatondClientError) -> bool:
        """Whether who had not what is asked for may be the wrong one, and the right one is away."""
        return isinstance(error, NotFoundError) and (self._found or error.reason == NOT_SERVED)

    def _next(self, place: int) -> int:
        """The first hint that was not tried, else the next in the ring that was not, else the next."""
        ring = [(place + step) % self._rota.count for step in range(1, self._rota.count + 1)]
        return next((one for one in [*self._hints, *ring] if one not in self._tried), ring[0])

    def _begin(self) -> None:
        self._tried, self._hints, self._first = set(), [], None

    def _wait(self, error: BatondClientError) -> float:
        delay_s = self.backoff.delay_s(error)
        if delay_s is None:
            raise error
        return delay_s


def model_of(request: Any) -> str:
    """The model a request names; empty if it names none."""
    spec = getattr(request, "spec", None)
    return "" if spec is None else str(spec.model)
