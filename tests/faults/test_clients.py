"""Clients cancel, stop reading and go away at any time, on any daemon."""

from __future__ import annotations

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import grpc
import psutil
import pytest

from batond.bench.faults.counts import full_or
from batond.bench.faults.crew import TENANTS, Crew, until
from batond.bench.faults.work import Job, Watcher, draw_job
from batond.clients import JobState
from batond.v1 import jobs_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.faults.crew import Daemon
    from batond.clients import JobInfo

TENANT: Final = TENANTS[0]


@pytest.fixture(scope="module")
def pair(make_crew: Callable[..., Crew]) -> Crew:
    """Two daemons with few rows: jobs wait, run and are parked."""
    crew = make_crew(step_s=0.005, lease_s=10.0)
    for _ in range(2):
        crew.add(wait=False)
    for daemon in crew.daemons:
        daemon.wait_ready()
    return crew


def cancel_some(crew: Crew, seed: int, count: int) -> list[tuple[Job, bool, JobInfo]]:
    """Submit jobs, cancel half of them at random times at either daemon, and wait for all ends."""
    rng = random.Random(seed)
    jobs = [
        (draw_job(rng, f"c{seed}-{number}", TENANT, longest=60), rng.random() < 0.5)
        for number in range(count)
    ]
    with crew.daemons[seed % 2].client(TENANT) as one, crew.daemons[(seed + 1) % 2].client(TENANT) as other:
        pending: list[Job] = []
        for job, doomed in jobs:
            job.submit(one)
            if doomed:
                pending.insert(rng.randint(0, len(pending)), job)
            while pending and rng.random() < 0.4:
                other.cancel(pending.pop().job_id)
        for job in pending:
            other.cancel(job.job_id)
        return [(job, doomed, one.wait(job.job_id)) for job, doomed in jobs]


@pytest.mark.timeout(3600)
def test_cancelled_at_any_time_in_any_state(pair: Crew) -> None:
    """C1: each ends cancelled, or had ended before; no other job changes; rows and leases are free."""
    threads, count = 4, full_or(60, 5000)
    with ThreadPoolExecutor(threads) as pool:
        ends = [
            end
            for part in pool.map(lambda seed: cancel_some(pair, seed, count), range(threads))
            for end in part
        ]
    cancelled = 0
    for job, doomed, info in ends:
        if doomed and info.state is JobState.CANCELLED:
            cancelled += 1
            assert list(info.output_token_ids) == job.tokens[: info.output_tokens]
        else:
            assert job.wrong(info) == ""
    assert cancelled > 0
    with pair.redis.client() as client:
        assert client.zcard(pair.keys.leases) == 0
        assert not list(client.scan_iter(pair.keys.base + ":holds:*"))
    for daemon in pair.daemons:
        with daemon.operator() as operator:
            until(
                lambda operator=operator: (
                    not any(row.job_id for row in next(iter(operator.watch_batch())).rows)
                ),
                "free rows",
            )


def test_who_does_not_read_costs_nobody_anything(pair: Crew) -> None:
    """C4: 50 streams are opened and not read; memory stays, another stream flows, and a reader gets all."""
    daemon = pair.daemons[0]
    job = Job("slow", TENANT, (1, 2, 3), full_or(400, 20_000), 4, "interactive")
    metadata = (("authorization", f"Bearer {daemon.tokens[TENANT]}"),)
    with daemon.client(TENANT) as client:
        job.submit(client)
    front = psutil.Process(daemon.process.pid)
    before = front.memory_info().rss
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = jobs_pb2_grpc.JobServiceStub(channel)
        unread = [stub.WatchJob(Watcher(job).request(), metadata=metadata) for _ in range(50)]
        reader = Watcher(job)
        reader.watch(daemon, 600.0)
        assert reader.wrong() == ""
        # The last message, with all of the output, is made once for all of them, and not in each one's time.
        assert front.memory_info().rss < before + (64 << 20)
        late = Watcher(job)
        for event in unread[0]:
            late.see(event)
        assert late.wrong() == ""
        for call in unread:
            call.cancel()


def test_streams_that_are_closed_leave_nothing_behind(pair: Crew) -> None:
    """C5: each is cancelled by its client after three chunks; all jobs end, and all rows are free."""
    daemon, count = pair.daemons[1], full_or(30, 200)
    names = []
    with daemon.client(TENANT) as client:
        for number in range(count):
            with client.generate(token_ids=[number + 1], max_tokens=100_000, seed=number) as stream:
                while stream.next_token_index < 3:
                    next(stream)
                names.append(stream.job_id)
        states = {client.wait(name).state for name in names}
    assert states == {JobState.CANCELLED}
    with pair.redis.client() as client:
        until(lambda: client.zcard(pair.keys.leases) == 0, "no lease")


def test_a_stream_outlives_silence(pair: Crew) -> None:
    """C6: no token while the engine stands still; in a soak for longer than the clients' keepalive."""
    daemon = pair.daemons[0]
    job = Job("silent", TENANT, (7, 7), 300, 8, "interactive")
    with daemon.client(TENANT) as client:
        job.submit(client)
    runs = holder(pair, job)
    watcher = Watcher(job)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watcher.watch, daemon, 600.0)
        until(lambda: watcher.token_ids, "a token")
        runs.signal_engine(signal.SIGSTOP)
        time.sleep(full_or(1.0, 25.0))  # The behaviour itself: silence.
        runs.signal_engine(signal.SIGCONT)
        watching.result(60.0)
    assert watcher.wrong() == ""
    assert watcher.counts["calls"] == 1


def holder(crew: Crew, job: Job) -> Daemon:
    """Who runs a job."""
    with crew.redis.client() as client:
        key = crew.keys.job(f"{TENANT}/{job.job_id}")
        owner = until(lambda: client.hget(key, "owner"), "an owner").decode()
    return next(one for one in crew.daemons if str(one.process.pid) == owner.split(":")[1])
