"""Rubbish in Redis leaves the daemon serving, executes nothing and harms nobody else's jobs (D13)."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import grpc
import pytest
import redis.asyncio

from batond.bench.fuzz_calls import Tally, answer
from batond.bench.fuzz_messages import Case
from batond.bench.fuzz_records import JOBS, VICTIM, Vandal
from batond.clients.errors import BatondClientError
from batond.daemon.queue.keys import Keys
from batond.v1 import admin_pb2, jobs_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from conftest import Fuzzed, Plan

JOB_SERVICE = "/batond.v1.JobService/"
ADMIN_SERVICE = "/batond.v1.AdminService/"
pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
async def client(fuzzed: Fuzzed) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(f"unix://{fuzzed.redis_socket}") as opened:
        yield opened


def look(seed: int, number: int, tokens: dict[str, str], letters: list[str]) -> Case:
    """A call that reads or moves what may just have been spoiled."""
    rng = random.Random(f"look/{seed}/{number}")
    job_id = f"v{rng.randrange(JOBS)}"
    submit = jobs_pb2.SubmitJobRequest(job_id=job_id)
    submit.spec.tokens.token_ids[:] = [1, 2, 3]
    of_the_job = random.Random(job_id)  # Whoever submits it submits the same.
    submit.spec.sla_class = of_the_job.choice(("", "batch", "interactive"))
    submit.spec.sampling.max_tokens = of_the_job.choice((1, 30, 300))
    submit.spec.sampling.n = of_the_job.choice((1, 1, 2))
    name = rng.choice(letters) if letters else "red/v1"
    calls = (
        (JOB_SERVICE + "SubmitJob", submit),
        (JOB_SERVICE + "SubmitJob", submit),
        (JOB_SERVICE + "SubmitJob", submit),
        (JOB_SERVICE + "GenerateStream", jobs_pb2.GenerateStreamRequest(job_id=job_id, spec=submit.spec)),
        (JOB_SERVICE + "GetJob", jobs_pb2.GetJobRequest(job_id=job_id)),
        (JOB_SERVICE + "WatchJob", jobs_pb2.WatchJobRequest(job_id=job_id)),
        (JOB_SERVICE + "ListJobs", jobs_pb2.ListJobsRequest()),
        (JOB_SERVICE + "UpdateJob", jobs_pb2.UpdateJobRequest(job_id=job_id, sla_class="batch")),
        (JOB_SERVICE + "CancelJob", jobs_pb2.CancelJobRequest(job_id=job_id)),
        (ADMIN_SERVICE + "ParkJob", admin_pb2.ParkJobRequest(job_id=job_id, tenant=VICTIM)),
        (ADMIN_SERVICE + "ResumeJob", admin_pb2.ResumeJobRequest(job_id=job_id, tenant=VICTIM)),
        (ADMIN_SERVICE + "ListDeadJobs", admin_pb2.ListDeadJobsRequest()),
        (ADMIN_SERVICE + "RetryDeadJob", admin_pb2.RetryDeadJobRequest(name=name)),
        (ADMIN_SERVICE + "DropDeadJob", admin_pb2.DropDeadJobRequest(name=name)),
        (ADMIN_SERVICE + "ListTenants", admin_pb2.ListTenantsRequest()),
        (ADMIN_SERVICE + "GetServerInfo", admin_pb2.GetServerInfoRequest()),
        (ADMIN_SERVICE + "WatchBatch", admin_pb2.WatchBatchRequest()),
    )
    path, request = rng.choice(calls)
    who = "operator" if path.startswith(ADMIN_SERVICE) else VICTIM
    return Case(
        number=number,
        kind=path.rpartition("/")[2],
        path=path,
        requests=(request.SerializeToString(),),
        metadata=(("authorization", f"Bearer {tokens[who]}"),),
        patience_s=rng.choice((0.0, 0.02, 0.2))
        if path.endswith(("Stream", "WatchJob", "WatchBatch"))
        else None,
    )


async def dead_letters(fuzzed: Fuzzed) -> list[str]:
    async with fuzzed.daemon.async_client("operator") as operator:
        return [letter.name for letter in (await operator.dead_jobs_page()).dead_jobs]


async def test_rubbish_in_redis_leaves_the_daemon_serving(
    fuzzed: Fuzzed, client: redis.asyncio.Redis, plan: Plan, say: Callable[..., None]
) -> None:
    """D13: any key, any value, while jobs run; the jobs of others are right all the while."""
    marker = fuzzed.daemon.folder / "executed"
    vandal, tally = Vandal(client, Keys("fake"), marker), Tally()
    numbers = plan.numbers(400, 30_000)
    done: list[str] = []
    left = iter(numbers)
    letters: list[str] = []

    async def worker() -> None:
        async with grpc.aio.insecure_channel(
            fuzzed.target, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            for number in left:
                done.append(f"{number}: {await vandal.spoil(plan.seed, number)}")
                for part in (0, 1):
                    one = look(plan.seed, 2 * number + part, fuzzed.tokens, letters)
                    tally.take(plan.seed, one, *await answer(channel, one))
                if number % 50 == 49:
                    try:
                        async with asyncio.timeout(90):  # A suspect may have its turn first (docs/adr/0006).
                            await fuzzed.good_job(number)
                        letters[:] = await dead_letters(fuzzed)
                    except (BatondClientError, TimeoutError) as error:
                        tally.faults.append(f"number {number}: {error!r}")
                        tally.faults += done[-60:]
                        return

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(worker())
    say(f"seed {plan.seed}: {len(done)} keys spoiled, {tally.calls} calls", *tally.lines())
    faults = [*tally.faults, *fuzzed.faults_in_log(), *fuzzed.in_log("redis_away")]
    assert not faults, "\n".join(faults[:400])
    assert not marker.exists()
    assert await dead_letters(fuzzed)
    await fuzzed.good_job(len(numbers))
