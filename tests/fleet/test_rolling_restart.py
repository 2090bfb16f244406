"""Daemons are restarted one after the other under load: no token is lost or doubled, no stream fails."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from batond.bench.fake_engine import fake_text, fake_tokens
from batond.clients import Chunk, Finished
from batond.clients.model import JobState
from batond.daemon.queue import JobStore, open_async
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from batond.clients import AsyncClient, AsyncJobStream
    from batond.clients.model import JobInfo

STREAMS = 18
ROWS = 12  # Of the three daemons.
TOKENS = 150
TIMEOUT_S = 120.0


def prompt(number: int) -> list[int]:
    return [number + 1, 7, 7]


async def read(stream: AsyncJobStream, busy: asyncio.Queue[int] | None) -> JobInfo:
    """Reads a stream to its end: each index once and in order, whatever daemons did meanwhile."""
    tokens: list[int] = []
    text = ""
    async with stream:
        async for event in stream:
            if isinstance(event, Chunk):
                assert event.first_token_index == len(tokens)
                if busy is not None and not tokens:
                    busy.put_nowait(1)
                tokens += event.token_ids
                text += event.text
            elif isinstance(event, Finished):
                job = event.job
    assert tokens == list(job.output_token_ids)
    assert text == job.text
    return job


async def follow(client: AsyncClient, number: int, busy: asyncio.Queue[int] | None = None) -> JobInfo:
    """One of three ways to have a job: a stream of its own, a detached one, a submission that is watched."""
    options: dict[str, Any] = {"token_ids": prompt(number), "max_tokens": TOKENS, "seed": number}
    options |= {"ignore_eos": True, "job_id": f"j{number}"}
    if number % 3 == 2:
        await client.submit(**options)
        return await read(client.watch(f"j{number}"), busy)
    return await read(client.generate(detached=number % 3 == 1, **options), busy)


async def restart_all(fleet: Any) -> None:
    """As an operator does it: the next one only when this one is ready again."""
    for daemon in fleet.daemons:
        assert await asyncio.to_thread(daemon.stop) == 0, "V2: a drain ends well"
        await asyncio.to_thread(daemon.restart)


@pytest.mark.slow
async def test_a_rolling_restart_costs_no_token_and_no_error(fleet: Any) -> None:
    """V2, D3: with streams of every kind on every daemon, by clients that know all addresses."""
    fleet.start("m", "m", "m", lease_s=15.0)
    numbers, jobs, over = itertools.count(), {}, asyncio.Event()
    busy: asyncio.Queue[int] = asyncio.Queue()

    async def keep_busy(client: AsyncClient) -> None:
        while not over.is_set():
            number = next(numbers)
            jobs[number] = await follow(client, number, busy)

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        clients = [fleet.async_client() for _ in range(6)]
        work = [tasks.create_task(keep_busy(clients[place % len(clients)])) for place in range(STREAMS)]
        for _ in range(ROWS):  # All rows are at work.
            await busy.get()
        await restart_all(fleet)
        over.set()
        await asyncio.wait(work)
        for client in clients:
            await client.close()
    assert len(jobs) >= STREAMS
    for number, job in jobs.items():
        wanted = fake_tokens(prompt(number), number, TOKENS)
        assert job.state is JobState.SUCCEEDED
        assert list(job.output_token_ids) == wanted
        assert job.text == fake_text(wanted)
    async with open_async(fleet.url) as client:
        totals = (await JobStore(client, "m", SlaClasses().names).counts()).totals
    assert totals["handed_back"] >= 3, "each daemon had to leave jobs to the others"
    assert (totals["submitted"], totals["succeeded"], totals.get("reaped", 0)) == (len(jobs), len(jobs), 0)
    await leaves_nothing(fleet.url)


async def leaves_nothing(url: str) -> None:
    """No job waits, nobody holds one: only results are left."""
    async with open_async(url) as client:
        kinds = {key.decode().split(":")[2] for key in await client.keys() if key.startswith(b"batond:{m}")}
    # `owner` would be a daemon that holds a job, `leases` a job that is held, `queue` one that waits.
    assert not kinds & {"owner", "leases", "queue", "line", "turn", "holds", "due", "dead"}


@pytest.mark.slow
async def test_a_daemon_that_is_killed_loses_no_stream(fleet: Any) -> None:
    """D3: the client goes on at another address, from its next token, once the lease is over."""
    victim, _ = fleet.start("m", "m", lease_s=2.0)
    async with asyncio.timeout(TIMEOUT_S), fleet.async_client() as client:
        client._fleet._rota._current = 0  # All begin at the daemon that dies; half of the jobs run there.
        streams = [asyncio.create_task(follow(client, number)) for number in range(8)]
        await client.submit(token_ids=[9], max_tokens=TOKENS, ignore_eos=True, job_id="last")
        async for event in client.watch("last", TOKENS // 2):
            if isinstance(event, Chunk):
                break
        victim.process.kill()
        jobs = await asyncio.gather(*streams)
    for number, job in enumerate(jobs):
        assert list(job.output_token_ids) == fake_tokens(prompt(number), number, TOKENS)
