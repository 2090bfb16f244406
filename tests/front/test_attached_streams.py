"""What the end of an attached stream means for its job."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.errors import UnavailableError
from batond.daemon.front.hub import Hub
from batond.daemon.front.jobs import JobServicer
from batond.daemon.front.status import to_status
from batond.v1 import jobs_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

RECORD = SimpleNamespace(tenant="t", job_id="j", state=SimpleNamespace(final=True))


class BrokenFollower:
    """A stream that ends by an error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def follow(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise self._error
        yield


class Store:
    """Notes what is cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[str, str]] = []

    async def cancel(self, tenant: str, job_id: str) -> Any:
        self.cancelled.append((tenant, job_id))
        return RECORD


class OpenCalls:
    """Lets everybody in and everything out."""

    def __init__(self, *, expels: bool = False) -> None:
        self._expels = expels

    async def stream(self, _: str, __: Any, handle: Callable[[Any], Awaitable[None]]) -> None:
        await handle(SimpleNamespace(name="t"))

    def expelled(self, _: Any) -> bool:
        return self._expels


def servicer_of(store: Any, follower: Any, *, expels: bool = False, draining: bool = False) -> JobServicer:
    """A servicer of these two; nothing else of it is asked for more than whether the daemon drains."""
    calls: Any = OpenCalls(expels=expels)
    loose: Any = SimpleNamespace(draining=draining)
    return JobServicer(
        calls=calls,
        store=store,
        follower=follower,
        hub=Hub(),
        dispatcher=loose,
        neighbours=loose,
        reader=loose,
        classes=loose,
        metrics=loose,
        result_ttl_s=1,
        max_message_bytes=1,
    )


@pytest.mark.parametrize(
    ("error", "expels", "cancelled"),
    [
        (UnavailableError("Redis is away"), False, []),
        (asyncio.CancelledError(), True, []),
        (asyncio.CancelledError(), False, [("t", "j")]),
    ],
    ids=["our fault", "the tenant was disabled", "the client left"],
)
async def test_only_a_client_that_leaves_ends_its_job(
    error: BaseException, expels: object, cancelled: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: closing an attached stream cancels; a moment without Redis does not."""
    store: Any = Store()
    servicer = servicer_of(store, BrokenFollower(error), expels=bool(expels))

    async def accepted(*_: Any) -> tuple[Any, bool, Any]:
        return RECORD, True, None

    monkeypatch.setattr(servicer, "_submit", accepted)
    with pytest.raises(type(error)):
        await servicer.GenerateStream(
            jobs_pb2.GenerateStreamRequest(), SimpleNamespace(time_remaining=lambda: None)
        )
    await servicer.finish_tidying()
    assert store.cancelled == cancelled


async def test_a_daemon_that_drains_sends_its_callers_elsewhere() -> None:
    """V2: it says that it is shutting down, where to go, and when to come back."""
    servicer = servicer_of(SimpleNamespace(), SimpleNamespace(), draining=True)
    with pytest.raises(UnavailableError, match=r"shutting down.*another daemon.*again later") as caught:
        await servicer.GenerateStream(
            jobs_pb2.GenerateStreamRequest(), SimpleNamespace(time_remaining=lambda: None)
        )
    assert caught.value.reason == "DRAINING"
    trailers = dict(to_status(caught.value).trailing_metadata or ())
    assert b"google.rpc.RetryInfo" in trailers["grpc-status-details-bin"]
