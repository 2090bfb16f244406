"""Redis is slow, deaf, cut off, hung or killed under running jobs: nothing is lost, nothing comes twice."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import pytest

from batond.bench.faults.counts import SOAK, full_or
from batond.bench.faults.crew import until
from batond.bench.faults.proxy import Moment, cut, delay, drop
from batond.bench.faults.work import Job, Watcher, insist
from batond.clients import JobState, ServerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.faults.crew import Crew, Daemon
    from batond.bench.faults.proxy import Action

BEFORE, AFTER = Moment.BEFORE, Moment.AFTER
TENANT: Final = "red"
LONG_S: Final = full_or(2.5, 20.0)
_numbers = itertools.count()

#: Of each run of tests: those that Redis has done and nobody has heard of.
CALLS: Final = ("submit", "claim", "commit_step", "renew", "reap", "cancel", "HGETALL", "XRANGE")
FEW: Final = (
    *((name, AFTER, cut) for name in ("submit", "claim", "commit_step", "cancel")),
    ("commit_step", BEFORE, cut),
    ("commit_step", BEFORE, delay(0.3)),
)
ALL: Final = tuple(
    (name, moment, action)
    for name, moment, action in itertools.product(CALLS, (BEFORE, AFTER), (cut, drop, delay(0.3)))
)


@pytest.fixture(scope="module")
def crew(make_crew: Callable[..., Crew]) -> Crew:
    """One daemon behind a proxy; Redis is away for longer than its leases."""
    one = make_crew(step_s=0.004, lease_s=1.2)
    one.add(proxied=True)
    return one


def new_job(max_tokens: int, sla_class: str = "standard") -> Job:
    """A job of its own name."""
    number = next(_numbers)
    return Job(f"r{number}", TENANT, (number % 900 + 1, 2), max_tokens, number, sla_class)


def finish(daemon: Daemon, *jobs: Job) -> None:
    """Wait for jobs and compare them with undisturbed runs."""
    for job in jobs:
        info = insist(daemon, TENANT, lambda client, job=job: client.wait(job.job_id))
        assert job.wrong(info) == ""


def name_of(value: object) -> str:
    """Part of a test's name."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("name", "moment", "action"), ALL if SOAK else FEW, ids=name_of)
def test_a_call_that_is_cut_or_lost_is_made_again_and_does_no_harm(
    crew: Crew, name: str, moment: Moment, action: Action
) -> None:
    """D4, D6: three times in a row; also when Redis had done it already."""
    daemon = crew.daemons[0]
    rules = [crew.proxy.on(name, moment, action, nth=nth) for nth in (1, 2, 3)]
    job, doomed = new_job(600 if name == "renew" else 60), new_job(4000, "batch")
    watcher = Watcher(job)
    with ThreadPoolExecutor(1) as pool:
        insist(daemon, TENANT, job.submit)
        insist(daemon, TENANT, doomed.submit)
        watching = pool.submit(watcher.watch, daemon)
        insist(daemon, TENANT, lambda client: client.cancel(doomed.job_id))
        finish(daemon, job)
        watching.result(30.0)
    while not watcher.finished:
        watcher.watch(daemon)
    assert watcher.wrong() == ""
    info = insist(daemon, TENANT, lambda client: client.wait(doomed.job_id))
    assert info.state is JobState.CANCELLED
    assert rules[0].met.wait(10.0 + LONG_S)
    crew.proxy.lift()


def output_tokens(daemon: Daemon, job: Job) -> int:
    """Tokens in the engine, committed or not, as an operator sees them."""
    with daemon.operator() as client:
        snapshot = next(iter(client.watch_batch()))
    return max((row.output_tokens for row in snapshot.rows if job.job_id in row.job_id), default=0)


def state_of(daemon: Daemon) -> ServerState:
    """How it says it stands."""
    with daemon.operator() as client:
        return client.server_info().state


@pytest.fixture
def away(crew: Crew) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Ways in which Redis goes, and comes back."""
    return {
        "refuses": (crew.proxy.refuse, crew.proxy.accept),
        "hangs": (crew.redis.pause, crew.redis.resume),
        "is killed": (crew.redis.kill, crew.redis.start),
    }


@pytest.mark.parametrize("how", ["refuses", "hangs", "is killed"] if SOAK else ["refuses", "is killed"])
def test_generation_goes_on_without_redis_and_is_saved_afterwards(
    crew: Crew, away: dict[str, tuple[Callable[[], None], Callable[[], None]]], how: str
) -> None:
    """D4: health says degraded, tokens are made, none is lost or delivered twice, nobody else runs it."""
    daemon = crew.daemons[0]
    job, watcher = new_job(int(LONG_S / 0.004) + 500), None
    go, come = away[how]
    insist(daemon, TENANT, job.submit)
    watcher = Watcher(job)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watcher.watch, daemon)
        until(lambda: watcher.token_ids, "a token")
        go()
        began_s, made = time.monotonic(), output_tokens(daemon, job)
        until(lambda: state_of(daemon) is ServerState.DEGRADED, "degraded")
        until(lambda: output_tokens(daemon, job) > made + 20, "more tokens")
        until(lambda: time.monotonic() - began_s > LONG_S, "the time without Redis")
        come()
        until(lambda: state_of(daemon) is ServerState.READY, "ready")
        finish(daemon, job)
        watching.result(30.0)
    while not watcher.finished:
        watcher.watch(daemon)
    assert watcher.wrong() == ""
    with crew.redis.client() as client:
        assert client.hget(crew.keys.job(f"{TENANT}/{job.job_id}"), "epoch") == b"1"


def test_what_hangs_for_less_than_a_lease_disturbs_nobody(crew: Crew) -> None:
    """D4: no new claim, no error of any caller."""
    daemon, job = crew.daemons[0], new_job(100)
    insist(daemon, TENANT, job.submit)
    crew.proxy.stall()
    with daemon.client(TENANT) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, job.job_id)
        pool.submit(time.sleep, 0.0)
        crew.proxy.go_on()
        assert job.wrong(waiting.result(30.0)) == ""


def test_a_kill_of_redis_between_jobs_forgets_none(crew: Crew) -> None:
    """D3, D4: accepted is on disk (appendfsync always); killed with jobs in line, it has them all."""
    daemon = crew.daemons[0]
    jobs = [new_job(30, "batch") for _ in range(full_or(12, 200))]
    for job in jobs:
        insist(daemon, TENANT, job.submit)
    crew.redis.kill()
    crew.redis.start()
    finish(daemon, *jobs)
