"""A daemon tells of itself, and says who serves the models it does not."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.config import ServerSettings
from batond.daemon.errors import NotFoundError, UnavailableError
from batond.daemon.front import convert, neighbours
from batond.daemon.front.neighbours import Neighbours, advertised
from batond.daemon.front.status import to_status
from batond.daemon.queue.registry import DaemonRecord
from batond.v1 import admin_pb2

if TYPE_CHECKING:
    from batond.daemon.wire.messages import Ready


class Registry:
    """Keeps what is told; away as long as the test says so."""

    def __init__(self, *daemons: DaemonRecord) -> None:
        self.told: list[DaemonRecord] = []
        self.left: list[str] = []
        self.known = list(daemons)
        self.asked = 0
        self.away = False
        self.news = asyncio.Event()

    async def tell(self, record: DaemonRecord) -> None:
        self.news.set()
        if self.away:
            raise UnavailableError("away")
        self.told.append(record)

    async def leave(self, daemon_id: str) -> None:
        if self.away:
            raise UnavailableError("away")
        self.left.append(daemon_id)

    async def daemons(self) -> list[DaemonRecord]:
        self.asked += 1
        if self.away:
            raise UnavailableError("away")
        return self.known

    async def now_ms(self) -> int:
        return 77


def make(registry: Registry, ready: Ready) -> tuple[Neighbours, Any]:
    state: Any = SimpleNamespace(ready=ready, server_state=admin_pb2.SERVER_STATE_READY)
    loose: Any = registry
    return Neighbours(loose, "me", state, address="gpu0:7431", running_jobs=lambda: 2), state


async def test_a_daemon_tells_of_itself_when_it_changes_and_after_redis_was_away(
    ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    own, state = make(registry, ready)
    task = asyncio.create_task(own.run())
    async with asyncio.timeout(10):
        await registry.news.wait()
        registry.news.clear()
        state.server_state = admin_pb2.SERVER_STATE_DRAINING
        own.changed()
        await registry.news.wait()
        assert [one.state for one in registry.told] == ["ready", "draining"]
        assert registry.told[0] == DaemonRecord(
            id="me",
            model="m",
            address="gpu0:7431",
            state="ready",
            rows=4,
            running_jobs=2,
            version=registry.told[0].version,
            started_ms=77,
        )
        monkeypatch.setattr(neighbours, "TELL_EVERY_S", 0.001)
        registry.away = True
        own.changed()
        for _ in range(3):
            registry.news.clear()
            await registry.news.wait()
        registry.away = False
        registry.news.clear()
        await registry.news.wait()
    assert len(registry.told) > 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await own.leave()
    assert registry.left == ["me"]
    registry.away = True
    await own.leave()


async def test_who_serves_another_model_is_said_in_the_error(ready: Ready) -> None:
    known = [
        DaemonRecord(id="1", model="big", address="gpu1:7431", state="draining"),
        DaemonRecord(id="2", model="big", address="gpu2:7431", state="ready", rows=4, running_jobs=4),
        DaemonRecord(id="3", model="big", address="gpu3:7431", state="ready", rows=4, running_jobs=1),
        DaemonRecord(id="4", model="big"),
        DaemonRecord(id="5", model="m", address="gpu0:7431"),
    ]
    registry = Registry(*known)
    own, _ = make(registry, ready)
    asked = NotFoundError("not here", reason="MODEL_NOT_SERVED", model="big", served="m")
    told = await own.not_served(asked)
    assert told.details == {
        "model": "big",
        "served": "m",
        "models": "big,m",
        "addresses": "gpu3:7431,gpu2:7431,gpu1:7431",
    }
    assert told.reason == "MODEL_NOT_SERVED"
    assert "gpu3:7431" in told.message
    unknown = await own.not_served(NotFoundError("no", reason="MODEL_NOT_SERVED", model="none"))
    assert unknown.details["addresses"] == ""
    assert "no daemon" in unknown.message
    assert registry.asked == 1, "a flood of wrong requests asks once a second"


async def test_a_hint_is_no_longer_than_an_error_may_be(ready: Ready) -> None:
    known = [DaemonRecord(id=str(n), model="big", address=f"gpu{n}.example:7431") for n in range(50)]
    own, _ = make(Registry(*known), ready)
    told = await own.not_served(NotFoundError("no", reason="MODEL_NOT_SERVED", model="big"))
    addresses = told.details["addresses"].split(",")
    assert 3 < len(addresses) < 50
    assert {*addresses} <= {one.address for one in known}
    assert to_status(told) is not None


async def test_without_redis_the_error_is_the_plain_one(ready: Ready) -> None:
    registry = Registry()
    registry.away = True
    own, _ = make(registry, ready)
    asked = NotFoundError("no", reason="MODEL_NOT_SERVED", model="big")
    assert await own.not_served(asked) is asked


@pytest.mark.parametrize(
    ("listen", "advertise", "wanted"),
    [
        (["127.0.0.1:7431", "unix:/run/b.sock"], "", ""),
        (["127.0.0.1:7431", "gpu0.example:7432"], "", "gpu0.example:7432"),
        (["0.0.0.0:7431"], "", f"{socket.gethostname()}:7431"),
        (["[::]:7431"], "", f"{socket.gethostname()}:7431"),
        (["0.0.0.0:7431"], "lb.example:443", "lb.example:443"),
    ],
)
def test_the_address_that_is_told(listen: list[str], advertise: str, wanted: str) -> None:
    assert advertised(ServerSettings(listen=listen, advertise=advertise)) == wanted


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="host:port"):
        ServerSettings(advertise="gpu0")


def test_a_state_of_a_newer_release_is_unspecified() -> None:
    shown = convert.daemon(DaemonRecord(id="z", model="m", state="dreaming", started_ms=1500))
    assert (shown.state, shown.start_time.ToMilliseconds()) == (admin_pb2.SERVER_STATE_UNSPECIFIED, 1500)
