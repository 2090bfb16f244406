"""Wall clocks of daemons are wrong, and jump: time in the queue is the Redis server's."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from batond.bench.fake_daemon import CLOCK_VARIABLE
from batond.bench.faults.clock import advance
from batond.bench.faults.counts import full_or
from batond.bench.faults.crew import MODEL, Crew, until
from batond.bench.faults.work import CLASSES, Job, Watcher, insist
from batond.daemon.queue import Chunk, JobSpec, JobStore, StepCommit, open_async
from batond.daemon.queue import JobState as StoredState
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batond.bench.faults.crew import Daemon, OwnRedis
    from batond.bench.faults.proxy import RedisProxy

TENANT: Final = "red"
FIVE_MINUTES_S: Final = 300.0
_numbers = itertools.count()


def new_job(max_tokens: int) -> Job:
    """A job of its own name."""
    number = next(_numbers)
    return Job(f"t{number}", TENANT, (number % 900 + 1,), max_tokens, number, "standard")


def shifted(crew: Crew, folder: Path, shift_s: float) -> tuple[Daemon, Path]:
    """A daemon whose wall clock is wrong, and the file that says by how much."""
    clock = folder / f"clock{len(crew.daemons)}"
    clock.write_text(str(shift_s))
    return crew.add(environment={CLOCK_VARIABLE: str(clock)}), clock


def test_wrong_and_jumping_wall_clocks_change_nothing(make_crew: Callable[..., Crew], folder: Path) -> None:
    """D11: ten minutes apart, then each jumps; no lease is stolen, no job is late, no result expires."""
    crew = make_crew(step_s=0.01, lease_s=1.0)
    ahead, clock_ahead = shifted(crew, folder, FIVE_MINUTES_S)
    behind, clock_behind = shifted(crew, folder, -FIVE_MINUTES_S)
    jobs = [new_job(150) for _ in range(4)]
    with ahead.client(TENANT) as one, behind.client(TENANT) as other:
        for job, client in zip(jobs, (one, other, one, other), strict=True):
            client.submit(
                token_ids=list(job.prompt),
                max_tokens=job.max_tokens,
                seed=job.seed,
                job_id=job.job_id,
                time_limit_s=60.0,
            )
        watcher = Watcher(jobs[0])
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watcher.watch, behind)
            until(lambda: watcher.token_ids, "a token")
            clock_ahead.write_text(str(-FIVE_MINUTES_S))
            clock_behind.write_text(str(FIVE_MINUTES_S))
            assert [job.wrong(other.wait(job.job_id)) for job in jobs] == [""] * 4
            watching.result(30.0)
        assert watcher.wrong() == ""
        assert [job.wrong(one.get(job.job_id)) for job in jobs] == [""] * 4
    with crew.redis.client() as client:
        epochs = [client.hget(crew.keys.job(f"{TENANT}/{job.job_id}"), "epoch") for job in jobs]
        assert epochs == [b"1"] * 4


def test_the_clock_of_redis_ends_leases_results_and_deadlines(crew: Crew) -> None:
    """D2, D10: what is due later comes at once when the queue's clock is turned; nothing else does."""
    daemon = crew.daemons[0]
    done, running = new_job(5), new_job(300)
    for job in (done, running):
        insist(daemon, TENANT, job.submit)
    assert done.wrong(insist(daemon, TENANT, lambda client: client.wait(done.job_id))) == ""
    with crew.redis.client() as client:
        job_key = crew.keys.job(f"{TENANT}/{done.job_id}")
        advance(client, 60_000)
        assert client.exists(job_key)
        assert 0 < client.pttl(job_key) <= 540_000
        advance(client, 600_000)
        until(lambda: not client.exists(job_key), "the result's end")
        until(lambda: not client.zscore(crew.keys.expiring, f"{TENANT}/{done.job_id}"), "the sweep")
    info = insist(daemon, TENANT, lambda client: client.wait(running.job_id))
    assert running.wrong(info) == ""  # Its lease was over twice: it went on, here or anew.


@pytest.mark.timeout(3600)
async def test_keys_and_memory_come_back_after_many_jobs(store: tuple[OwnRedis, RedisProxy]) -> None:
    """D10: after the time to live nothing is left, and no memory is used for it."""
    count = full_or(600, 100_000)
    server, _ = store
    client = open_async(server.url)
    queue = JobStore(client, MODEL, CLASSES, max_queued=count)
    with server.client() as straight:
        await live(queue, "first", 50)
        await forget(queue, straight)
        before = straight.info("memory")["used_memory"]
        await live(queue, "many", count)
        assert straight.dbsize() > count
        await forget(queue, straight)
        kept = {key.decode().rpartition("}:")[2].partition(":")[0] for key in straight.scan_iter("*")}
        assert kept <= {"classes", "clock", "totals", "accounts", "floor", "pace"}
        straight.memory_purge()
        assert straight.info("memory")["used_memory"] < before + (1 << 20)
    await client.aclose()


async def live(queue: JobStore, tag: str, count: int) -> None:
    """Jobs are submitted, run and end."""
    spec = JobSpec(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=2), seed=1)
    encoded = msgspec.json.encode(spec)
    for number in range(count):
        await queue.submit(
            f"t{number % 50}",
            f"{tag}{number}",
            spec_json=encoded,
            body_hash="h",
            sla_class=CLASSES[number % 3],
        )
    left = count
    while left:
        claimed = await queue.claim("d:1:x", dict.fromkeys(CLASSES, 200), lease_ms=600_000)
        ends = [
            StepCommit(
                tenant=job.record.tenant,
                job_id=job.record.job_id,
                epoch=job.record.epoch,
                chunks=(Chunk(first_index=0, token_ids=[1, 2], text="ab"),),
                state=StoredState.SUCCEEDED,
                finish_reason="length",
            )
            for job in claimed
        ]
        assert (await queue.commit_step("d:1:x", ends)).refused == []
        left -= len(claimed)


async def forget(queue: JobStore, straight: object) -> None:
    """The time to live passes, and the reaper sweeps."""
    advance(straight, 25 * 3600 * 1000)  # type: ignore[arg-type]
    while (await queue.reap()).swept:
        continue
