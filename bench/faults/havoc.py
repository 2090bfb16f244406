"""Kills, pauses and restarts at moments drawn from a seed; what died is started again, as by systemd."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import RedisError

from batond.daemon.errors import BatondError

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis

    from batond.bench.faults.crew import Crew, Daemon

TICK_S: Final = 0.05
RESTART_S: Final = 0.3  # What died is started again after so long.
#: What happens, and how often in proportion.
DEEDS: Final = {"daemon killed": 6, "engine killed": 6, "daemon paused": 3, "Redis killed": 3}


class Havoc(threading.Thread):
    """Does one deed after another until told to stop; then everything is made to run again.

    Args:
        crew: Whom it happens to.
        seed: The same seed gives the same deeds at the same times after the start.
        every_s: Mean time between two.

    Attributes:
        counts: Deeds done, by name.
        takeovers_s: How long each job of a killed or paused daemon stayed with it before it could run again.
    """

    def __init__(self, crew: Crew, *, seed: int, every_s: float) -> None:
        super().__init__(name="havoc", daemon=True)
        self._crew, self._every_s = crew, every_s
        self._random = random.Random(seed)  # noqa: S311 - for a schedule, not for secrets
        self._halt, self._done = threading.Event(), threading.Event()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()  # Two deeds at one time need no comparison of functions.
        self._dead_since_s: dict[int, float] = {}
        self._paused: set[int] = set()
        self._orphans: dict[str, tuple[str, float]] = {}  # Reference -> its owner, since when.
        self.counts: Counter[str] = Counter()
        self.takeovers_s: list[float] = []
        self.error: Exception | None = None

    def stop(self) -> None:
        """No more deeds; returns when all daemons and Redis run again."""
        self._halt.set()
        self._done.wait()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """See the class."""
        try:
            self._later(self._random.expovariate(1 / self._every_s), self._deed)
            while not self._halt.wait(TICK_S):
                while self._due and self._due[0][0] <= time.monotonic():
                    heapq.heappop(self._due)[2]()
                self.supervise()
            for _, _, deed in sorted(self._due):
                if deed != self._deed:  # What was paused goes on.
                    deed()
            self.supervise(after_s=0.0)
        except Exception as error:  # noqa: BLE001 - raised again by `stop`
            self.error = error
        finally:
            self._done.set()
        threading.Event().wait()  # A Redis ends with the thread that started it (EmbeddedRedis).

    def supervise(self, after_s: float = RESTART_S) -> None:
        """Start what is dead for so long, and look which jobs of the dead are free."""
        now_s = time.monotonic()
        for place, daemon in enumerate(self._crew.daemons):
            if daemon.process.poll() is None:
                self._dead_since_s.pop(place, None)
            elif now_s - self._dead_since_s.setdefault(place, now_s) >= after_s:
                daemon.start()
        with contextlib.suppress(RedisError), self._crew.redis.client() as client:
            for ref, (owner, since_s) in list(self._orphans.items()):
                if self._is_free(client, ref, owner):
                    self.takeovers_s.append(now_s - since_s)
                    del self._orphans[ref]

    def _deed(self) -> None:
        self._later(self._random.expovariate(1 / self._every_s), self._deed)
        # All is drawn whatever is found, so that the schedule does not depend on how the last deed went.
        (name,) = self._random.choices(list(DEEDS), list(DEEDS.values()))
        place, pause = self._random.randrange(len(self._crew.daemons)), self._random.uniform(1.2, 2.5)
        daemon = self._crew.daemons[place]
        able = daemon.process.poll() is None and place not in self._paused
        match name:
            case "daemon killed" if able:
                self._orphan(daemon)
                daemon.kill()
            case "engine killed" if able and daemon.kill_engine():
                pass
            case "daemon paused" if able:
                self._orphan(daemon)
                self._paused.add(place)
                daemon.pause()
                self._later(pause * self._crew.lease_s, lambda: self._resume(place))
            case "Redis killed":
                self._crew.redis.kill()
                self._restart_redis()
            case _:
                return
        self.counts[name] += 1

    def _restart_redis(self) -> None:
        for _ in range(3):
            with contextlib.suppress(BatondError):
                self._crew.redis.start()
                return
        self._crew.redis.start()

    def _resume(self, place: int) -> None:
        self._paused.discard(place)
        if self._crew.daemons[place].process.poll() is None:
            self._crew.daemons[place].resume()

    def _later(self, after_s: float, deed: Callable[[], object]) -> None:
        heapq.heappush(self._due, (time.monotonic() + after_s, next(self._order), deed))

    def _orphan(self, daemon: Daemon) -> None:
        """Note what a daemon holds before something happens to it."""
        keys = self._crew.keys
        with contextlib.suppress(RedisError), self._crew.redis.client() as client:
            for key in client.scan_iter(keys.owner(f"*:{daemon.process.pid}:*")):
                owner = key.decode().removeprefix(keys.owner(""))
                members: Any = client.smembers(key)
                for ref in members:
                    self._orphans[ref.decode()] = (owner, time.monotonic())

    def _is_free(self, client: redis.Redis, ref: str, owner: str) -> bool:
        """Whether the job is not the dead one's any more: it waits, has another owner, or has ended."""
        return bool(client.hget(self._crew.keys.job(ref), "owner") != owner.encode())
