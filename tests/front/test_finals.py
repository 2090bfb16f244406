"""C4: fifty watchers of one long job get its last message; it is made once, and holds nobody else up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from batond.daemon.errors import UnavailableError
from batond.daemon.front.finals import Finals
from batond.v1 import types_pb2

if TYPE_CHECKING:
    from batond.daemon.queue import JobRecord


def record(name: str, epoch: int = 1) -> JobRecord:
    return cast("JobRecord", SimpleNamespace(tenant="t", job_id=name, epoch=epoch))


class Shower:
    """Describes jobs when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = asyncio.Event()
        self.fails = False

    async def show(self, record: JobRecord) -> types_pb2.Job:
        self.asked.append(record.job_id)
        await self.go.wait()
        if self.fails:
            raise UnavailableError("Redis is away")
        return types_pb2.Job(job_id=record.job_id)


async def test_it_is_made_once_for_all_who_want_it_now() -> None:
    shower = Shower()
    finals = Finals(shower.show)
    wanted = [asyncio.ensure_future(finals.show(record("a"))) for _ in range(50)]
    other = asyncio.ensure_future(finals.show(record("b")))
    again = asyncio.ensure_future(finals.show(record("a", epoch=2)))
    shower.go.set()
    assert {job.job_id for job in await asyncio.gather(*wanted)} == {"a"}
    assert (await other).job_id == "b"
    await again
    assert shower.asked == ["a", "b", "a"]
    await finals.show(record("a"))
    assert shower.asked == ["a", "b", "a", "a"], "nothing is kept"


async def test_one_who_leaves_takes_it_from_nobody() -> None:
    shower = Shower()
    finals = Finals(shower.show)
    first, second = (asyncio.ensure_future(finals.show(record("a"))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    shower.go.set()
    assert (await second).job_id == "a"


async def test_what_goes_wrong_is_told_to_all_and_tried_anew() -> None:
    shower = Shower()
    finals = Finals(shower.show)
    shower.fails = True
    shower.go.set()
    told = await asyncio.gather(*(finals.show(record("a")) for _ in range(2)), return_exceptions=True)
    assert all(isinstance(one, UnavailableError) for one in told)
    shower.fails = False
    assert (await finals.show(record("a"))).job_id == "a"
