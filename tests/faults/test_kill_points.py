"""D6: SIGKILL for a daemon, or its engine, between every two Redis calls; nothing is lost or doubled.

A life is a small workload. An undisturbed run of it tells which calls it makes; then it is lived again for
each of them, and at that very call the proxy kills: before it reaches Redis, or when Redis has done it and
nobody has heard. Before a call is also after the one before it.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

import pytest

from batond.bench.faults.clock import advance
from batond.bench.faults.counts import SOAK
from batond.bench.faults.crew import until
from batond.bench.faults.proxy import Moment, Outcome, first
from batond.bench.faults.work import Job, Watcher, draw_job, insist
from batond.clients import JobState
from batond.clients.errors import NotFoundError, WrongStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.bench.faults.crew import Crew, Daemon
    from batond.clients import Client

Life: TypeAlias = "Callable[[Crew, str], None]"
BEFORE, AFTER = Moment.BEFORE, Moment.AFTER
TENANT: Final = "red"
RESULT_TTL_MS: Final = 600_000
_numbers = itertools.count()


def serve(crew: Crew, tag: str) -> None:
    """Jobs are submitted, one is moved to another class, one is cancelled; the others finish."""
    daemon, rng = crew.daemons[0], random.Random(7)
    jobs = [draw_job(rng, f"{tag}-{place}", TENANT, longest=40) for place in range(3)]
    doomed = Job(f"{tag}-doomed", TENANT, (1, 2), 2000, 5, "batch")
    for job in (doomed, *jobs):
        insist(daemon, TENANT, job.submit)
    insist(daemon, TENANT, lambda client: move(client, jobs[0].job_id))
    insist(daemon, TENANT, lambda client: client.cancel(doomed.job_id))
    for job in jobs:
        info = insist(daemon, TENANT, lambda client, job=job: client.wait(job.job_id))
        assert job.wrong(info) == ""
        watcher = Watcher(job)
        while not watcher.finished:
            daemon.revive()
            watcher.watch(daemon)
        assert watcher.wrong() == ""
    info = insist(daemon, TENANT, lambda client: client.wait(doomed.job_id))
    assert info.state is JobState.CANCELLED
    assert list(info.output_token_ids) == doomed.tokens[: info.output_tokens]


def move(client: Client, job_id: str) -> None:
    """Another class for a job; one that has ended, or was moved before the daemon died, stays as it is."""
    try:
        client.update(job_id, sla_class="batch")
    except WrongStateError:
        return


def drain(crew: Crew, tag: str) -> None:
    """The daemon is told to stop in the middle of a job, hands it back, and goes on with it when started."""
    daemon = crew.daemons[0]
    job = Job(f"{tag}-long", TENANT, (3, 4), 120, 6, "standard")
    insist(daemon, TENANT, job.submit)
    until(lambda: insist(daemon, TENANT, lambda client: client.get(job.job_id)).output_tokens, "a token")
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.wait(30.0)
    info = insist(daemon, TENANT, lambda client: client.wait(job.job_id))
    assert job.wrong(info) == ""


def start(crew: Crew, tag: str) -> None:
    """The daemon is started while a job waits, and runs it."""
    daemon = crew.daemons[0]
    job = Job(f"{tag}-waits", TENANT, (5,), 10, 7, "standard")
    insist(daemon, TENANT, job.submit)
    daemon.kill()
    info = insist(daemon, TENANT, lambda client: client.wait(job.job_id))
    assert job.wrong(info) == ""


def inherit(crew: Crew, tag: str) -> None:
    """The daemon dies in the middle of a job, which is taken from it when its lease is over."""
    daemon = crew.daemons[0]
    job = Job(f"{tag}-orphan", TENANT, (6,), 100, 7, "standard")
    insist(daemon, TENANT, job.submit)
    until(lambda: insist(daemon, TENANT, lambda client: client.get(job.job_id)).output_tokens, "a token")
    daemon.kill()
    info = insist(daemon, TENANT, lambda client: client.wait(job.job_id))
    assert job.wrong(info) == ""


def bury(crew: Crew, tag: str) -> None:
    """A waiting job is spoilt by hand: it goes to the dead-letter list, can't be retried, and is dropped."""
    daemon = crew.daemons[0]
    fill = [Job(f"{tag}-{place}", TENANT, (place,), 4000, 8, "batch") for place in range(4)]
    spoilt = Job(f"{tag}-spoilt", TENANT, (9,), 5, 9, "batch")
    for job in (*fill, spoilt):
        insist(daemon, TENANT, job.submit)
    with crew.redis.client() as client:
        client.set(crew.keys.spec(f"{TENANT}/{spoilt.job_id}"), b"\x80\x04garbage", keepttl=True)
    for job in fill:
        insist(daemon, TENANT, lambda client, job=job: client.cancel(job.job_id))
    with crew.redis.client() as client:  # Its owner can't read it any more.
        until(lambda: daemon.revive() or client.zcard(crew.keys.dead), "a dead letter")
    (name,) = [one.name for one in insist(daemon, "operator", lambda client: list(client.dead_jobs()))]
    for ask in (lambda client: client.retry_dead_job(name), lambda client: client.drop_dead_job(name)):
        insist(daemon, "operator", lambda client, ask=ask: unless_gone(ask, client))
    assert insist(daemon, "operator", lambda client: list(client.dead_jobs())) == []


def unless_gone(ask: Callable[[Client], object], client: Client) -> None:
    """What was done before the daemon died can't be done again."""
    try:
        ask(client)
    except (NotFoundError, WrongStateError):
        return


#: Calls that change a job, by the life in which they are made.
WRITES: Final[dict[str, Life]] = {
    "submit": serve,
    "claim": serve,
    "commit_step": serve,
    "renew": serve,
    "reap": inherit,
    "cancel": serve,
    "update": serve,
    "hand_back": drain,
    "bury": bury,
    "dead_drop": bury,
    "EVAL": start,  # Tells the others of itself.
}
#: Calls that only read, or greet the server. `dead_retry` is missing: no life ends so that it can be retried.
READS: Final[dict[str, Life]] = {
    "HGETALL": serve,
    "HGET": serve,
    "GET": serve,
    "XREVRANGE": serve,
    "XRANGE": serve,
    "position": serve,
    "counts": inherit,
    "SUBSCRIBE": start,
    "UNSUBSCRIBE": serve,
    "TIME": start,
    "PING": start,
    "EVALSHA": start,  # Of a script that does nothing: asks whether this user may.
    "HELLO": start,
    "CLIENT": start,
    "INFO": start,
    "dead_list": bury,
    "ZSCORE": bury,
}
LIVES: Final = {**WRITES, **READS}
#: Made by the clock: how often tells nothing.
TIMED: Final = frozenset({"renew", "reap", "counts"})
#: In each run of the tests: after every write, and before the one that is made most.
FEW: Final = (
    *((name, AFTER) for name in WRITES if WRITES[name] not in {bury, start}),
    ("commit_step", BEFORE),
)
#: Their answers come among news: nobody can tell when they are done.
UNANSWERED: Final = frozenset({("SUBSCRIBE", AFTER), ("UNSUBSCRIBE", AFTER)})
ALL: Final = tuple(pair for pair in itertools.product(LIVES, (BEFORE, AFTER)) if pair not in UNANSWERED)
PLACES: Final = {"first": 0.0, "middle": 0.25, "late": 0.5} if SOAK else {"first": 0.0}


@pytest.fixture(scope="module")
def trace(crew: Crew) -> Iterator[Callable[[Life], Counter[str]]]:
    """How often an undisturbed life makes each call. In the end nothing may be left in Redis."""
    known: dict[Life, Counter[str]] = {}

    def count(life: Life) -> Counter[str]:
        if life not in known:
            crew.proxy.trace.clear()
            life(crew, f"calm-{life.__name__}")
            known[life] = Counter(crew.proxy.trace)
        return known[life]

    yield count
    assert_nothing_left(crew)


def assert_nothing_left(crew: Crew) -> None:
    """D10: after the time to live no key remembers what happened."""
    with crew.redis.client() as client:
        until(lambda: not client.zcard(crew.keys.leases), "no lease")
        advance(client, RESULT_TTL_MS + 1000)
    until(lambda: not crew.left_behind(), f"an empty queue, not {crew.left_behind()}")


def deadly(daemon: Daemon, victim: str) -> Callable[[str], object]:
    """Kills one of the two, and lets the call of one that still lives go its way."""
    if victim == "engine":
        return first(daemon.kill_engine, Outcome.PASS)
    return first(daemon.kill)


def live_and_die(crew: Crew, name: str, moment: Moment, victim: str, nth: int = 1) -> None:
    """Live a life in which somebody is killed at a call."""
    daemon = crew.daemons[0]
    daemon.revive()
    rule = crew.proxy.on(name, moment, deadly(daemon, victim), nth=nth)
    try:
        LIVES[name](crew, f"{name}-{moment}-{next(_numbers)}")
        assert rule.met.is_set(), f"{name} was called {rule.count} times only"
    finally:
        crew.proxy.lift()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "moment"), ALL if SOAK else FEW)
def test_a_daemon_killed_at_a_call_loses_and_doubles_nothing(
    crew: Crew, trace: Callable[[Life], Counter[str]], name: str, moment: Moment, place: str
) -> None:
    """D3, D6, D9: started again it finishes every job with the tokens of an undisturbed run."""
    count = trace(LIVES[name])[name] if SOAK and name not in TIMED else 1
    nth = max(1, int(PLACES[place] * count))
    if nth == 1 and place != "first":
        pytest.skip("it is called too rarely")
    live_and_die(crew, name, moment, "daemon", nth)


@pytest.mark.parametrize(("name", "moment"), ALL if SOAK else (("claim", AFTER), ("commit_step", AFTER)))
def test_an_engine_killed_at_a_call_loses_and_doubles_nothing(
    crew: Crew, trace: Callable[[Life], Counter[str]], name: str, moment: Moment
) -> None:
    """D3, D6: the daemon starts another, which goes on from the committed tokens."""
    del trace  # For what it looks at in the end.
    live_and_die(crew, name, moment, "engine")


@pytest.mark.parametrize("life", [serve, drain, start, inherit, bury] if SOAK else [serve, drain])
def test_every_call_of_a_life_is_a_kill_point(life: Life, trace: Callable[[Life], Counter[str]]) -> None:
    """A call that is new must be added above, or nobody dies at it."""
    assert set(trace(life)) <= set(LIVES)
