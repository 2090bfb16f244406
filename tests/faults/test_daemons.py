"""Several daemons share a queue, and one of them dies, stands still, or comes back too late."""

from __future__ import annotations

import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import pytest

from batond.bench.faults.counts import full_or
from batond.bench.faults.crew import MODEL, Crew, until
from batond.bench.faults.work import Job, Watcher, insist
from batond.clients import ServerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.faults.crew import Daemon

TENANT: Final = "red"
LEASE_S: Final = full_or(1.5, 2.0)
#: Beyond the lease, how long a takeover may take: the reaper looks each second; more on busy machines.
GRACE_S: Final = 1.0 + 4.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def pair(make_crew: Callable[..., Crew]) -> Crew:
    """Two daemons, each with room for all jobs of a test."""
    crew = make_crew(step_s=0.01, lease_s=LEASE_S)
    for _ in range(2):
        crew.add(wait=False)
    for daemon in crew.daemons:
        daemon.wait_ready()
    return crew


@pytest.fixture(autouse=True)
def _all_alive(pair: Crew) -> None:
    for daemon in pair.daemons:
        daemon.revive()


def new_job(max_tokens: int) -> Job:
    """A job of its own name."""
    number = next(_numbers)
    return Job(f"d{number}", TENANT, (number % 900 + 1,), max_tokens, number, "standard")


def record(crew: Crew, job: Job) -> dict[bytes, bytes]:
    """What Redis knows of a job."""
    with crew.redis.client() as client:
        found: dict[bytes, bytes] = client.hgetall(crew.keys.job(f"{TENANT}/{job.job_id}"))
        return found


def holder(crew: Crew, job: Job) -> tuple[Daemon, Daemon]:
    """Who runs a job, once somebody does, and the other daemon."""
    pid = until(lambda: record(crew, job).get(b"owner", b"").decode().split(":")[1:2], "an owner")[0]
    one, other = crew.daemons
    return (one, other) if one.process.pid == int(pid) else (other, one)


def epoch(crew: Crew, job: Job) -> int:
    """How often it was claimed."""
    return int(record(crew, job).get(b"epoch", b"0"))


def tokens_of(crew: Crew, job: Job) -> int:
    """How many are committed."""
    return int(record(crew, job).get(b"output_tokens", b"0"))


def finish(daemon: Daemon, job: Job) -> None:
    """Wait for a job and compare it with an undisturbed run."""
    assert job.wrong(insist(daemon, TENANT, lambda client: client.wait(job.job_id))) == ""


def test_each_job_is_executed_once(make_crew: Callable[..., Crew]) -> None:
    """D1: nobody dies, so that each claim is a job's only one."""
    daemons, count = full_or((3, 300), (8, 10_000))
    crew = make_crew(step_s=0.001, rows=4, lease_s=10.0)
    for _ in range(daemons):
        crew.add(wait=False)
    jobs = [new_job(2) for _ in range(count)]
    for daemon in crew.daemons:
        daemon.wait_ready()
    with ThreadPoolExecutor(daemons) as pool:
        list(pool.map(lambda place: submit_all(crew, jobs, place), range(daemons)))
    with crew.redis.client() as client:
        totals = crew.keys.base + ":totals"
        until(lambda: int(client.hget(totals, "succeeded") or 0) == count, "all jobs", 600.0)
        assert int(client.hget(totals, "claimed")) == count
    with crew.daemons[0].client(TENANT) as reader:
        assert [job.wrong(reader.get(job.job_id)) for job in jobs] == [""] * count


def submit_all(crew: Crew, jobs: list[Job], place: int) -> None:
    """One daemon's part of the jobs."""
    with crew.daemons[place].client(TENANT) as client:
        for job in jobs[place :: len(crew.daemons)]:
            job.submit(client)


@pytest.mark.parametrize("victim", ["daemon", "engine"])
def test_a_kill_in_the_middle_of_a_job_loses_and_doubles_no_token(pair: Crew, victim: str) -> None:
    """D3: another daemon, or another engine, goes on; whoever watches there gets each index once."""
    job = new_job(200)
    insist(pair.daemons[0], TENANT, job.submit)
    dies, lives = holder(pair, job)
    until(lambda: tokens_of(pair, job) > 20, "tokens")
    watcher = Watcher(job)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watcher.watch, lives)
        until(lambda: watcher.token_ids, "a watcher on the other daemon")
        killed_s = time.monotonic()
        if victim == "daemon":
            dies.kill()
            until(lambda: epoch(pair, job) == 2, "another claim")
            assert time.monotonic() - killed_s < LEASE_S + GRACE_S
        else:
            assert dies.kill_engine()
        finish(lives, job)
        watching.result(30.0)
    assert watcher.wrong() == ""
    assert epoch(pair, job) >= (2 if victim == "daemon" else 1)


def test_a_paused_daemon_finds_its_job_taken_and_its_writes_refused(pair: Crew) -> None:
    """D2: paused beyond its lease; when it wakes, another has gone on, and both agree on the end."""
    job = new_job(400)
    insist(pair.daemons[0], TENANT, job.submit)
    sleeper, other = holder(pair, job)
    until(lambda: tokens_of(pair, job) > 20, "tokens")
    sleeper.pause()
    try:
        until(lambda: epoch(pair, job) == 2 and tokens_of(pair, job) > 30, "another claim")
    finally:
        sleeper.resume()  # Its engine has gone on: what it made meanwhile comes to Redis now.
    finish(other, job)
    until(lambda: "commit_refused" in sleeper.log_tail() or "lease_lost" in sleeper.log_tail(), "a refusal")
    finish(sleeper, job)
    assert epoch(pair, job) == 2


def test_a_daemon_that_starts_lets_the_living_renew_first(make_crew: Callable[..., Crew]) -> None:
    """D2: Redis was away until now and leases ran out: who starts takes nothing from who is still there."""
    crew = make_crew(step_s=0.01, lease_s=10.0)
    keeper = crew.add()
    job = new_job(300)
    insist(keeper, TENANT, job.submit)
    until(lambda: tokens_of(crew, job) > 20, "tokens")
    keeper.pause()
    with crew.redis.client() as client:
        assert client.zadd(crew.keys.leases, {f"{TENANT}/{job.job_id}": 1}, xx=True) == 0
        crew.add()
        keeper.resume()
        until(lambda: (client.zscore(crew.keys.leases, f"{TENANT}/{job.job_id}") or 0) != 1, "a renewal")
    finish(keeper, job)
    assert epoch(crew, job) == 1


def test_an_engine_that_stands_still_keeps_its_jobs_as_long_as_its_daemon_lives(pair: Crew) -> None:
    """D12: for three leases; nobody takes the job, and the tokens go on where they stopped."""
    job = new_job(300)
    insist(pair.daemons[0], TENANT, job.submit)
    keeper, _ = holder(pair, job)
    until(lambda: tokens_of(pair, job) > 20, "tokens")
    keeper.signal_engine(signal.SIGSTOP)
    try:
        time.sleep(3 * LEASE_S)  # The behaviour itself: nothing happens in that time.
        assert epoch(pair, job) == 1
        assert record(pair, job)[b"state"] == b"running"
    finally:
        keeper.signal_engine(signal.SIGCONT)
    finish(keeper, job)
    assert epoch(pair, job) == 1


def test_a_frozen_engine_is_told_by_health(make_crew: Callable[..., Crew]) -> None:
    """D12, V3: silent for `frozen_after_s`: degraded, and no ping of the watchdog; woken, it serves again."""
    crew = make_crew(lease_s=LEASE_S)
    daemon = crew.add(sections={"service": {"frozen_after_s": 1.5}})
    daemon.signal_engine(signal.SIGSTOP)
    with daemon.operator() as client:
        until(lambda: client.server_info().state is ServerState.DEGRADED, "degraded")
        daemon.signal_engine(signal.SIGCONT)
        until(lambda: client.server_info().state is ServerState.READY, "ready")


@pytest.mark.parametrize("rubbish", [b"\x80\x04\x95garbage", b"not json", b"{}"])
def test_garbage_in_the_queue_harms_no_job_and_no_daemon(pair: Crew, rubbish: bytes) -> None:
    """D13: pushed by hand between good jobs; it becomes evidence, the good jobs run."""
    jobs = [new_job(10) for _ in range(4)]
    insist(pair.daemons[0], TENANT, jobs[0].submit)
    name = b"red/" + rubbish
    with pair.redis.client() as client:
        client.zadd(pair.keys.queue("standard"), {name: 1})
        client.hset(pair.keys.base + ":job:red/forged", mapping={"state": "queued", "spec": rubbish})
        client.zadd(pair.keys.queue("standard"), {"red/forged": 2})
    for job in jobs[1:]:
        insist(pair.daemons[1], TENANT, job.submit)
    for job in jobs:
        finish(pair.daemons[0], job)
    with pair.daemons[0].operator() as client:
        letters = until(lambda: [one for one in client.dead_jobs() if not one.job_id], "evidence")
        for letter in letters:
            client.drop_dead_job(letter.name)
    assert [daemon.process.poll() for daemon in pair.daemons] == [None, None]
    assert pair.keys.base == f"batond:{{{MODEL}}}"
