"""Several real daemons on one Redis, as processes, whose engines compute nothing (bench/fake_daemon.py)."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE
from batond.bench.local_daemon import OPERATOR, LocalDaemon
from batond.clients import AsyncClient, Client
from batond.daemon.queue import EmbeddedRedis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TENANT = "red"
TOKENS = {TENANT: "red-token-of-the-fleet", OPERATOR: "operator-token-of-the-fleet"}
LEASE_S = 10.0  # Long enough for a busy machine.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder want a Redis server."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.redis)


class Fleet:
    """Daemons that share a Redis.

    Attributes:
        daemons: In the order of their start.
        url: Of the Redis.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self.url = url
        self.daemons: list[LocalDaemon] = []

    def start(
        self, *models: str, step_s: float = 0.02, rows: int = 4, lease_s: float = LEASE_S
    ) -> list[LocalDaemon]:
        """Starts a daemon for each model named, and returns those once all are ready."""
        started = []
        for model in models:
            number = len(self.daemons)
            folder = self._folder / str(number)
            folder.mkdir()
            daemon = LocalDaemon(
                folder,
                [TENANT],
                model={"path": str(folder), "name": model},
                engine={"rows": rows},
                sections={
                    "server": {"advertise": f"gpu{number}.example:7431"},
                    "queue": {"url": self.url, "lease_s": lease_s},
                    "service": {"drain_timeout_s": 0.2},
                },
                environment={STEP_VARIABLE: str(step_s)},
                tokens=TOKENS,
                program=PROGRAM,
            )
            self.daemons.append(daemon)
            started.append(daemon)
        for daemon in started:
            daemon.wait_ready()
        return started

    def addresses(self, *daemons: LocalDaemon) -> list[str]:
        """Where these daemons are, or all."""
        return [f"unix:{daemon.socket}" for daemon in daemons or self.daemons]

    def client(self, *daemons: LocalDaemon, tenant: str = TENANT, **options: Any) -> Client:
        """A client that knows these daemons, or all."""
        return Client(self.addresses(*daemons), token=TOKENS[tenant], **options)

    def async_client(self, *daemons: LocalDaemon) -> AsyncClient:
        """The same for asyncio."""
        return AsyncClient(self.addresses(*daemons), token=TOKENS[TENANT])


@pytest.fixture
def make_fleet() -> Iterator[Callable[[], Fleet]]:
    """Makes fleets, each with a Redis of its own; all ends with the test."""
    with ExitStack() as stack:

        def make() -> Fleet:
            # Unix socket paths are short: pytest's own folders can be too deep for them.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bf-")))
            redis = EmbeddedRedis(folder / "redis")
            redis.start()
            stack.callback(redis.stop)
            fleet = Fleet(folder, redis.url)
            stack.callback(lambda: [daemon.stop() for daemon in fleet.daemons])
            return fleet

        yield make


@pytest.fixture
def fleet(make_fleet: Callable[[], Fleet]) -> Fleet:
    """A fleet without daemons yet."""
    return make_fleet()
