"""Real Sentinels and a real Cluster on loopback, shared by the tests here; who kills, mends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batond.bench.local_redis import Cluster, Sentinels
from batond.daemon.config_queue import QueueSettings
from batond.daemon.queue.target import RedisTarget, target_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Queue


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here starts real servers."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.redis)


@pytest.fixture(scope="session")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    """A primary, two replicas and three Sentinels."""
    made = Sentinels(tmp_path_factory.mktemp("sentinels"))
    yield made
    made.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three primaries with a replica each."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()


@pytest.fixture(params=["sentinel", "cluster"])
def place(request: pytest.FixtureRequest) -> Sentinels | Cluster:
    """Each of the two in turn."""
    made: Sentinels | Cluster = request.getfixturevalue(
        "sentinels" if request.param == "sentinel" else "cluster"
    )
    return made


@pytest.fixture
def target(place: Sentinels | Cluster) -> RedisTarget:
    """As the daemon is configured for it; of the Cluster two nodes are named."""
    return target_to(place)


@pytest.fixture
def mended(place: Sentinels | Cluster) -> Iterator[Sentinels | Cluster]:
    """The same for tests that kill: whole again after them."""
    yield place
    place.mend()


@pytest.fixture
def queue(target: RedisTarget, open_queue: Callable[..., Queue]) -> Queue:
    """Gives an empty queue of a model of its own."""
    return open_queue(target)


@pytest.fixture
def make_target() -> Callable[..., RedisTarget]:
    """Configures a daemon for servers, with further keys of `[queue]`."""
    return target_to


def target_to(place: Sentinels | Cluster, **keys: object) -> RedisTarget:
    """See `make_target`."""
    found = (
        {"mode": "sentinel", "nodes": place.nodes, "sentinel_service": place.service}
        if isinstance(place, Sentinels)
        else {"mode": "cluster", "nodes": place.nodes[:2]}
    )
    return target_of(QueueSettings(**(found | keys)))
