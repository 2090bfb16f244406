"""Tenants of a real daemon: tokens, caps, quotas, changes at run time, local administrators, audit lines."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from batond.clients import (
    Client,
    Finished,
    JobFailedError,
    JobState,
    RetryPolicy,
    Started,
    TenantLimits,
    errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import JobStream

    AfterTokens = Callable[[JobStream, int], None]

pytestmark = [pytest.mark.redis]
ONCE = RetryPolicy(attempts=1)


def connect(daemon: LocalDaemon, token: str, **options: Any) -> Client:
    return Client(f"unix:{daemon.socket}", token=token, **{"timeout_s": 60.0, "retry": ONCE} | options)


def local(daemon: LocalDaemon) -> Client:
    """An administrator by the kernel's word."""
    return Client(f"unix:{daemon.socket.with_name('admin.sock')}", timeout_s=60.0, retry=ONCE)


def audit(daemon: LocalDaemon) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("logger") == "audit"]


@pytest.fixture(scope="module")
def daemon(start_daemon: Callable[..., LocalDaemon]) -> LocalDaemon:
    """One of this module's own, which changes it."""
    one = start_daemon()
    one.wait_ready()
    return one


@pytest.fixture
def resting(daemon: LocalDaemon, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A tenant that has used up its tokens for most of a minute: its jobs wait longer than a test takes."""
    name = request.node.name[:60].lower()
    with daemon.operator() as operator:
        made = operator.create_tenant(name, TenantLimits(tokens_per_minute=1, max_queued=2))
    with connect(daemon, made.token) as client:
        client.result(client.submit(token_ids=[1] * 300, max_tokens=2).job_id)
        yield client
        for job in client.list():
            client.cancel(job.job_id)


def test_a_capped_tenant_is_refused_or_lowered(daemon: LocalDaemon) -> None:
    """V4, S11: PERMISSION_DENIED, or lowered by configuration; both are audited."""
    with daemon.operator() as operator:
        strict = operator.create_tenant("capped", TenantLimits(highest_class="batch"))
        soft = operator.create_tenant("lowered", TenantLimits(highest_class="batch", lower_class=True))
    with connect(daemon, strict.token) as client:
        with pytest.raises(errors.PermissionDeniedError) as caught:
            client.submit(token_ids=[1], sla_class="interactive")
        assert (caught.value.reason, caught.value.details["allowed"]) == ("CLASS_NOT_ALLOWED", "batch")
        assert client.submit(token_ids=[1], max_tokens=1).effective_sla_class == "batch"
    with connect(daemon, soft.token) as client:
        job = client.result(client.submit(token_ids=[1], max_tokens=2, sla_class="interactive").job_id)
    assert (job.sla_class, job.effective_sla_class) == ("interactive", "batch")
    assert job.queue_time_s >= 0
    assert job.preemptions == 0
    asked = [(line["actor"], line["target"], line["outcome"]) for line in audit(daemon)]
    assert ("capped", "interactive", "refused") in asked
    assert ("lowered", "interactive", "lowered") in asked


def test_tenants_see_their_own_jobs_only(daemon: LocalDaemon) -> None:
    """V4, Q2: another tenant's id is NOT_FOUND in every call; the same id of two tenants is two jobs."""
    with daemon.client("red") as red, daemon.client("blue") as blue:
        red.submit(token_ids=[1, 2], max_tokens=2, job_id="mine")
        red.submit(token_ids=[5, 6], max_tokens=2, job_id="same")
        blue.submit(token_ids=[7], max_tokens=2, job_id="same")
        for call in (
            blue.get,
            blue.cancel,
            blue.wait,
            lambda job_id: blue.update(job_id, sla_class="batch"),
        ):
            with pytest.raises(errors.NotFoundError):
                call("mine")
        assert red.result("same").prompt_tokens == 2
        assert blue.result("same").prompt_tokens == 1
        assert "mine" not in {job.job_id for job in blue.list()}
        for call in (blue.park, blue.resume, blue.disable_tenant, blue.rotate_tenant_token):
            with pytest.raises(errors.PermissionDeniedError):
                call("mine")
        for ask in (blue.tenants, blue.policy, blue.drain):
            with pytest.raises(errors.PermissionDeniedError):
                ask()
    refused = {(line["action"], line["actor"]) for line in audit(daemon) if line["outcome"] == "refused"}
    assert {("DisableTenant", "blue"), ("Drain", "blue"), ("ListTenants", "blue")} <= refused


def test_tokens_rotate_and_tenants_are_refused_without_a_restart(daemon: LocalDaemon) -> None:
    with daemon.operator() as operator:
        made = operator.create_tenant("fresh", TenantLimits())
        with connect(daemon, made.token) as old:
            assert old.server_info().tenant == "fresh"
            newer = operator.rotate_tenant_token("fresh")
            with pytest.raises(errors.UnauthenticatedError):
                old.server_info()
        with connect(daemon, newer.token) as client:
            job = client.submit(token_ids=[3], max_tokens=2)
            operator.disable_tenant("fresh")
            for call in (client.server_info, lambda: client.submit(token_ids=[1])):
                with pytest.raises(errors.PermissionDeniedError) as caught:
                    call()
                assert caught.value.reason == "TENANT_DISABLED"
            operator.enable_tenant("fresh")
            assert client.result(job.job_id).output_tokens == 2  # What was accepted has run.
        with pytest.raises(errors.AlreadyExistsError):
            operator.create_tenant("fresh")
        with pytest.raises(errors.WrongStateError):
            operator.disable_tenant("red")
        with pytest.raises(errors.InvalidRequestError):
            operator.create_tenant("bad", TenantLimits(highest_class="gold"))
        shown = {one.name: one for one in operator.tenants()}
    assert shown["red"].configured
    assert shown["fresh"].token_hint == newer.tenant.token_hint != made.tenant.token_hint
    log = daemon.log.read_text()
    for secret in (made.token, newer.token):
        assert secret not in log
    done = [(line["action"], line["target"], line["outcome"]) for line in audit(daemon)]
    for action in ("CreateTenant", "RotateTenantToken", "DisableTenant", "EnableTenant"):
        assert (action, "fresh", "done") in done
    assert ("DisableTenant", "red", "refused") in done


def test_streams_end_with_the_right_to_open_them_and_jobs_run_on(
    daemon: LocalDaemon, after_tokens: AfterTokens
) -> None:
    """Rotated out or disabled: an open stream ends as new calls are refused; its job is durable."""
    long = {"token_ids": [3], "max_tokens": 3000, "ignore_eos": True, "sla_class": "batch"}
    with daemon.operator() as operator:
        made = operator.create_tenant("streaming", TenantLimits())
        with connect(daemon, made.token) as old:
            attached = old.generate(job_id="attached", **long)
            after_tokens(attached, 3)
            newer = operator.rotate_tenant_token("streaming")
            with pytest.raises(errors.UnauthenticatedError):
                after_tokens(attached, 10**6)
        with connect(daemon, newer.token) as client:
            waiting = client.submit(job_id="waiting", **long)
            assert client.get("attached").state in {JobState.RUNNING, JobState.PARKED}, (
                "its end was not asked for"
            )
            watch = client.watch("attached")
            after_tokens(watch, 5)
            operator.disable_tenant("streaming")
            with pytest.raises(errors.PermissionDeniedError) as caught:
                after_tokens(watch, 10**6)
            assert caught.value.reason == "TENANT_DISABLED"
            operator.enable_tenant("streaming")
            assert not client.get("attached").state.final
            assert not client.get(waiting.job_id).state.final
            operator.disable_tenant("streaming", cancel_jobs=True)
            operator.enable_tenant("streaming")
            ends = [client.wait(job_id).state for job_id in ("attached", "waiting")]
    assert ends == [JobState.CANCELLED] * 2


def test_an_administrators_stream_ends_with_its_rights(daemon: LocalDaemon) -> None:
    with daemon.operator() as operator:
        made = operator.create_tenant("watcher", TenantLimits(admin=True))
        with connect(daemon, made.token) as watcher:
            snapshots = watcher.watch_batch()
            next(snapshots)
            operator.update_tenant("watcher", TenantLimits())
            with pytest.raises(errors.PermissionDeniedError) as caught:
                for _ in snapshots:
                    pass
    assert caught.value.reason == "NOT_ADMIN"


def test_a_full_quota_says_when_to_come_back(daemon: LocalDaemon, resting: Client) -> None:
    first = resting.submit(token_ids=[1], max_tokens=1)
    resting.submit(token_ids=[1], max_tokens=1)
    with pytest.raises(errors.ExhaustedError) as caught:
        resting.submit(token_ids=[1], max_tokens=1)
    assert caught.value.reason == "TENANT_QUEUE_FULL"
    assert caught.value.details["limit"] == "2"
    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 120
    again = resting.submit(token_ids=[1], max_tokens=1, job_id=first.job_id)
    assert again.job_id == first.job_id  # A repeated call is no new job.
    assert resting.get(first.job_id).state is JobState.QUEUED
    with daemon.client("red") as red:
        red.result(red.submit(token_ids=[1], max_tokens=1).job_id)  # The others' part is not full.
    resting.cancel(first.job_id)
    resting.submit(token_ids=[1], max_tokens=1)


def test_the_longest_prompt_is_the_tenants(daemon: LocalDaemon) -> None:
    with daemon.operator() as operator:
        made = operator.create_tenant("short", TenantLimits(longest_prompt_tokens=3))
        with connect(daemon, made.token) as client:
            client.submit(token_ids=[1, 2, 3], max_tokens=1)
            with pytest.raises(errors.InvalidRequestError) as caught:
                client.submit(token_ids=[1, 2, 3, 4], max_tokens=1)
            assert (caught.value.reason, caught.value.details["limit"]) == ("PROMPT_TOO_LONG", "3")
            operator.update_tenant("short", TenantLimits(longest_prompt_tokens=4))
            client.submit(token_ids=[1, 2, 3, 4], max_tokens=1)


def test_waiting_jobs_are_only_lowered(resting: Client) -> None:
    job_id = resting.submit(token_ids=[1], max_tokens=1, sla_class="standard").job_id
    assert resting.update(job_id, sla_class="batch").effective_sla_class == "batch"
    with pytest.raises(errors.PermissionDeniedError) as caught:
        resting.update(job_id, sla_class="standard")
    assert caught.value.reason == "CLASS_RAISED"
    soon = dt.datetime.now(dt.UTC).replace(microsecond=0) + dt.timedelta(hours=1)
    assert resting.update(job_id, deadline=soon).deadline == soon
    with pytest.raises(errors.ServerDeadlineError):
        resting.update(job_id, deadline=dt.datetime(2020, 1, 1, tzinfo=dt.UTC))
    with pytest.raises(errors.InvalidRequestError, match="nothing to change"):
        resting.update(job_id)
    resting.cancel(job_id)
    with pytest.raises(errors.WrongStateError):
        resting.update(job_id, sla_class="batch")


def test_a_waiting_job_ends_at_its_time_limit(resting: Client) -> None:
    """S11: the job's end says how long it waited."""
    job = resting.submit(token_ids=[1], max_tokens=1, time_limit_s=1.0)
    assert job.deadline is not None
    with pytest.raises(JobFailedError) as caught:
        resting.result(job.job_id)
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    assert caught.value.job.queue_time_s >= 0.9
    with pytest.raises(errors.ServerDeadlineError):
        resting.submit(token_ids=[1], deadline=dt.datetime(2020, 1, 1, tzinfo=dt.UTC))


def test_a_streams_deadline_is_its_jobs(resting: Client) -> None:
    with pytest.raises((errors.TimeoutExpiredError, JobFailedError)):
        resting.generate_text(token_ids=[1], max_tokens=1, job_id="bound", timeout_s=1.0)
    ended = resting.wait("bound")
    assert ended.deadline is not None
    assert ended.state in {JobState.FAILED, JobState.CANCELLED}
    with (
        pytest.raises(errors.TimeoutExpiredError),
        resting.generate(token_ids=[1], max_tokens=1, job_id="free", detached=True, timeout_s=1.0) as stream,
    ):
        stream.last_job()
    assert resting.get("free").deadline is None
    assert resting.get("free").state is JobState.QUEUED


def test_a_stream_says_how_long_its_job_waited(daemon: LocalDaemon) -> None:
    """S11."""
    with daemon.client("red") as red, red.generate(token_ids=[1, 2], max_tokens=3) as stream:
        events = list(stream)
    job = next(event.job for event in events if isinstance(event, Finished))
    started = next(event for event in events if isinstance(event, Started))
    assert started.queue_time_s > 0
    assert abs(started.queue_time_s - job.queue_time_s) < 0.01


def test_the_policy_is_exchanged(daemon: LocalDaemon, after_tokens: AfterTokens) -> None:
    with daemon.operator() as operator:
        before = operator.policy()
        assert before.policy == "priority"
        job = operator.submit(token_ids=[4], max_tokens=300, ignore_eos=True)
        after_tokens(operator.watch(job.job_id), 5)
        assert operator.set_policy("fcfs") == "priority"
        assert operator.policy().policy == operator.server_info().policy == "fcfs"
        assert operator.result(job.job_id).output_tokens == 300
        with pytest.raises(errors.InvalidRequestError) as caught:
            operator.set_policy("luck")
        assert caught.value.details["known"] == ", ".join(before.known_policies)
        operator.set_policy("priority")
    assert ("SetPolicy", "fcfs", "done") in [
        (line["action"], line["target"], line["outcome"]) for line in audit(daemon)
    ]


def test_a_local_administrator_needs_no_token(daemon: LocalDaemon) -> None:
    with local(daemon) as client:
        assert client.server_info().tenant == f"local:{os.geteuid()}"
        made = client.create_tenant("locally", TenantLimits())
        with pytest.raises(errors.UnsupportedCallError):
            client.submit(token_ids=[1])  # It is for administration alone.
        with connect(daemon, made.token) as tenant:
            job = tenant.submit(token_ids=[1], max_tokens=1)
            tenant.result(job.job_id)
        with pytest.raises(errors.NotFoundError):
            client.park("unknown", tenant="locally")
    line = next(
        line for line in audit(daemon) if line["target"] == "locally" and line["action"] == "CreateTenant"
    )
    assert line["actor"] == f"local:{os.geteuid()}"
    assert re.search(rf"/{os.geteuid()}\.\d+\.\d+$", line["peer"])


def test_strangers_are_told_apart_and_audited(daemon: LocalDaemon) -> None:
    with connect(daemon, "wrong") as client:
        with pytest.raises(errors.UnauthenticatedError):
            client.server_info()
        with pytest.raises(errors.UnauthenticatedError):
            client.create_tenant("evil")
    line = [line for line in audit(daemon) if line["target"] == "evil"][-1]
    assert (line["actor"], line["outcome"], line["reason"]) == ("", "refused", "BAD_TOKEN")


def test_added_tenants_survive_a_restart(start_daemon: Callable[..., LocalDaemon]) -> None:
    daemon = start_daemon()
    daemon.wait_ready()
    with daemon.operator() as operator:
        made = operator.create_tenant("stays", TenantLimits(highest_class="batch"))
    daemon.stop()
    assert not daemon.socket.with_name("admin.sock").exists()
    daemon.restart()
    with connect(daemon, made.token) as client:
        assert client.submit(token_ids=[1], max_tokens=1).effective_sla_class == "batch"
