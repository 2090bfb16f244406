"""Dead jobs of a real daemon: listed with their evidence, retried and dropped by administrators alone."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batond.clients import JobState, errors
from batond.daemon.queue import EmbeddedRedis, HandBackOutcome, JobSpec, JobStore, open_async
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.local_daemon import LocalDaemon

pytestmark = [pytest.mark.redis]
SECRET = "a prompt that is its tenant's alone"
PROMPT = [5, 6, 7]
UNSERVED = "elsewhere"


@pytest.fixture(scope="module")
def daemon(start_daemon: Callable[..., LocalDaemon]) -> LocalDaemon:
    """One of this module's own, which changes it."""
    one = start_daemon()
    one.wait_ready()
    return one


def audit(daemon: LocalDaemon) -> list[tuple[str, str, str, str]]:
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [
        (line["action"], line["actor"], line["target"], line["outcome"])
        for line in lines
        if line.get("logger") == "audit"
    ]


async def _kill(daemon: LocalDaemon, job_ids: list[str], garbage: dict[str, bytes]) -> None:
    client = open_async(EmbeddedRedis(daemon.folder / "redis").url)
    # In a class that the daemon does not serve, so that it leaves the job to the claim that dies here.
    store = JobStore(client, "tiny", [UNSERVED], max_attempts=1)
    spec = JobSpec(
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        seed=1,
        prompt_text=SECRET,
    )
    for job_id in job_ids:
        await store.submit(
            "red", job_id, spec_json=msgspec.json.encode(spec), body_hash="h", sla_class=UNSERVED
        )
        (job,) = await store.claim("gone", {UNSERVED: 1}, lease_ms=60_000)
        outcome = await store.hand_back(
            "gone", "red", job_id, job.record.epoch, charge=True, why="the engine died: device assert"
        )
        assert outcome is HandBackOutcome.DEAD
        await client.hset(store.keys.job(f"red/{job_id}"), "sla_class", "standard")
    for name, evidence in garbage.items():
        await client.zadd(store.keys.dead, {name: 1})
        await client.hset(store.keys.evidence, name, evidence)
    await client.aclose()


def kill(daemon: LocalDaemon, *job_ids: str, garbage: dict[str, bytes] | None = None) -> None:
    asyncio.run(_kill(daemon, list(job_ids), garbage or {}))


def test_a_dead_job_is_seen_retried_and_runs(
    daemon: LocalDaemon, solo: Callable[[list[int], int], list[int]]
) -> None:
    """D8: its tenant sees it failed, the operator sees why; retried, it emits what it would have emitted."""
    kill(daemon, "poison")
    with daemon.operator() as operator, daemon.client("red") as red:
        failed = red.get("poison")
        assert (failed.state, failed.error_reason) == (JobState.FAILED, "ATTEMPTS")
        (entry,) = operator.dead_jobs()
        assert (entry.name, entry.tenant, entry.job_id) == ("red/poison", "red", "poison")
        assert (entry.reason, entry.attempts, entry.can_retry, entry.obstacle) == ("ATTEMPTS", 1, True, "")
        assert entry.died_time == failed.finished_time
        (line,) = entry.evidence
        assert line.endswith("epoch 1 owner gone: the engine died: device assert")
        assert SECRET not in repr(entry)
        job = operator.retry_dead_job(entry.name)
        assert (job.tenant, job.job_id, job.error_reason, job.text) == ("red", "poison", "", "")
        assert list(operator.dead_jobs()) == []
        done = red.result("poison")
        assert list(done.output_token_ids) == solo(PROMPT, 4)
        with pytest.raises(errors.NotFoundError):
            operator.retry_dead_job(entry.name)
    assert ("RetryDeadJob", "operator", "red/poison", "done") in audit(daemon)
    assert ("RetryDeadJob", "operator", "red/poison", "refused") in audit(daemon)


def test_garbage_is_listed_and_dropped(daemon: LocalDaemon) -> None:
    """D13: readable whatever it is, page by page; nothing that can't run is let run."""
    garbage = {"garbage:\\x80": b"\xff", "red/nothing": b"[]", "": b'{"message": "\\u001b[31m"}'}
    kill(daemon, "first", "second", garbage=garbage)
    with daemon.operator() as operator:
        page = operator.dead_jobs_page(page_size=2)
        assert [one.name for one in page.dead_jobs] == ["red/second", "red/first"]
        entries = [*page.dead_jobs]
        while page.next_page_token:
            page = operator.dead_jobs_page(page_size=2, page_token=page.next_page_token)
            entries += page.dead_jobs
        assert [one.can_retry for one in entries] == [True, True, False, False, False]
        assert all(one.message.isprintable() and one.reason for one in entries)
        for one in entries[2:]:
            with pytest.raises(errors.WrongStateError) as caught:
                operator.retry_dead_job(one.name)
            assert caught.value.reason == "NOT_RETRYABLE"
        for one in entries:
            operator.drop_dead_job(one.name)
        assert list(operator.dead_jobs()) == []
        for call in (operator.drop_dead_job, operator.retry_dead_job):
            for name in ("red/first", "", "raw:%zz", "ü"):
                with pytest.raises(errors.NotFoundError):
                    call(name)
        with pytest.raises(errors.InvalidRequestError):
            operator.dead_jobs_page(page_token="none of ours")
    with daemon.client("red") as red, pytest.raises(errors.NotFoundError):
        red.get("first")
    assert ("DropDeadJob", "operator", "red/first", "done") in audit(daemon)


def test_tenants_neither_see_nor_touch_dead_jobs(daemon: LocalDaemon) -> None:
    """V4: not even their own; what they tried is audited."""
    kill(daemon, "theirs")
    with daemon.client("red") as red:
        calls: list[Callable[[], Any]] = [
            red.dead_jobs_page,
            lambda: red.retry_dead_job("red/theirs"),
            lambda: red.drop_dead_job("red/theirs"),
        ]
        for call in calls:
            with pytest.raises(errors.PermissionDeniedError):
                call()
        assert red.get("theirs").state is JobState.FAILED
    with daemon.operator() as operator:
        operator.drop_dead_job("red/theirs")
    refused = {
        action for action, actor, _, outcome in audit(daemon) if (actor, outcome) == ("red", "refused")
    }
    assert refused == {"ListDeadJobs", "RetryDeadJob", "DropDeadJob"}
