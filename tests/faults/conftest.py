"""Real daemons on engines that compute nothing, a real Redis, and the proxy between them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batond.bench.faults.crew import Crew, OwnRedis
from batond.bench.faults.proxy import RedisProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder that starts a server."""
    for item in items:
        if item.path.parent == Path(__file__).parent and {"crew", "make_crew", "store"} & set(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker(pytest.mark.redis)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the ends of the daemons' logs beside a failure."""
    report = yield
    if report.failed and "crew" in getattr(item, "funcargs", {}):
        for place, daemon in enumerate(item.funcargs["crew"].daemons):
            report.sections.append((f"log of daemon {place}", daemon.log_tail()))
    return report


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one: Unix sockets lie in it, and pytest's own folders can be too deep for them."""
    with tempfile.TemporaryDirectory(prefix="bd-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def make_crew() -> Iterator[Callable[..., Crew]]:
    """Starts crews; they end with the module."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Crew:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="bd-"))
            return stack.enter_context(Crew(Path(name), **options))

        yield make


@pytest.fixture(scope="module")
def crew(make_crew: Callable[..., Crew]) -> Crew:
    """A Redis, its proxy, and one daemon behind it; a module's tests share it, since starts take a second."""
    one = make_crew(step_s=0.004)
    one.add(proxied=True)
    return one


@pytest.fixture
def store(folder: Path) -> Iterator[tuple[OwnRedis, RedisProxy]]:
    """A Redis and its proxy, without daemons."""
    server = OwnRedis(folder)
    server.start()
    try:
        with RedisProxy(server.socket_path, folder / "p.sock") as proxy:
            yield server, proxy
    finally:
        server.kill()
