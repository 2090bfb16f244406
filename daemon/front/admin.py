"""AdminService: what operators see and steer."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from batond.daemon.errors import InvalidRequestError, NotFoundError
from batond.daemon.front import convert, tenant_convert
from batond.daemon.queue.dead import MAX_PAGE as MOST_DEAD_PAGE
from batond.daemon.queue.reader import MAX_PAGE
from batond.daemon.telemetry.logging import get_logger
from batond.policies.registry import policy_names
from batond.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.protobuf.duration_pb2 import Duration

    from batond.daemon.front.calls import Calls
    from batond.daemon.front.dispatcher import Dispatcher
    from batond.daemon.front.identity import Tenant
    from batond.daemon.front.neighbours import Neighbours
    from batond.daemon.front.requests import Limits
    from batond.daemon.front.state import DaemonState
    from batond.daemon.front.tenant_book import TenantBook
    from batond.daemon.queue import JobStore
    from batond.policies.classes import SlaClasses
    from batond.v1 import types_pb2

LIBRARIES = ("torch", "transformers", "tokenizers", "grpcio", "protobuf", "redis", "msgspec")
DEFAULT_DEAD_PAGE = 50
DEFAULT_INTERVAL_S = 0.25
LEAST_INTERVAL_S = 0.05
LONGEST_S = 10**9  # 31 years: what is longer is a wrong unit.

_log = get_logger(__name__)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """See proto/batond/v1/admin.proto.

    Args:
        calls: What every rpc shares.
        state: How the daemon stands.
        dispatcher: The jobs it runs.
        store: The queue.
        classes: SLA classes.
        limits: What requests are held to.
        book: Tenants added at run time.
        neighbours: Daemons that share the Redis.
        max_message_bytes: Largest request.
    """

    def __init__(
        self,
        *,
        calls: Calls,
        state: DaemonState,
        dispatcher: Dispatcher,
        store: JobStore,
        classes: SlaClasses,
        limits: Limits,
        book: TenantBook,
        neighbours: Neighbours,
        max_message_bytes: int,
    ) -> None:
        self._calls, self._state, self._dispatcher, self._store = calls, state, dispatcher, store
        self._classes, self._limits, self._max_message_bytes = classes, limits, max_message_bytes
        self._book, self._neighbours = book, neighbours
        self._started_unix_s = time.time()
        self._started_s = time.monotonic()
        self._versions = {name: _version(name) for name in LIBRARIES} | {"python": platform.python_version()}

    async def GetServerInfo(
        self,
        request: admin_pb2.GetServerInfoRequest,  # noqa: ARG002 - nothing to ask for
        context: Any,
    ) -> admin_pb2.GetServerInfoResponse:
        """Say what is served, by what, and within which limits."""

        async def handle(tenant: Tenant) -> admin_pb2.GetServerInfoResponse:
            return self._info(tenant)

        return await self._calls.answer("GetServerInfo", context, handle)

    async def ListDaemons(
        self,
        request: admin_pb2.ListDaemonsRequest,  # noqa: ARG002 - nothing to ask for
        context: Any,
    ) -> admin_pb2.ListDaemonsResponse:
        """List the daemons that share the Redis."""

        async def handle(_: Tenant) -> admin_pb2.ListDaemonsResponse:
            found = await self._neighbours.all()
            return admin_pb2.ListDaemonsResponse(daemons=[convert.daemon(one) for one in found])

        return await self._calls.act("ListDaemons", context, handle, reads=True)

    async def WatchBatch(self, request: admin_pb2.WatchBatchRequest, context: Any) -> None:
        """Stream the batch as it changes."""

        async def handle(_: Tenant) -> None:
            interval_s = DEFAULT_INTERVAL_S
            if request.HasField("min_interval"):
                interval_s = max(_seconds(request.min_interval, "min_interval"), LEAST_INTERVAL_S)
            while True:
                shot = self._dispatcher.snapshot
                if shot is not None:
                    counts = self._dispatcher.counts
                    queued = sum(counts.queued.values()) if counts is not None else 0
                    shown = convert.snapshot(shot, queued)
                    shown.classes.extend(
                        convert.class_snapshot(one, self._dispatcher.recent) for one in self._classes
                    )
                    await context.write(admin_pb2.WatchBatchResponse(snapshot=shown))
                    await asyncio.sleep(interval_s)
                if self._dispatcher.snapshot is shot:
                    await self._dispatcher.next_snapshot()

        await self._calls.watch("WatchBatch", context, handle)

    async def ParkJob(self, request: admin_pb2.ParkJobRequest, context: Any) -> admin_pb2.ParkJobResponse:
        """Take a job's row and hold it."""

        async def handle(tenant: Tenant) -> admin_pb2.ParkJobResponse:
            return admin_pb2.ParkJobResponse(job=await self._steer(tenant, request, self._dispatcher.park))

        return await self._calls.act("ParkJob", context, handle, target=_job_of(request))

    async def ResumeJob(
        self, request: admin_pb2.ResumeJobRequest, context: Any
    ) -> admin_pb2.ResumeJobResponse:
        """Let a job parked by hand go on."""

        async def handle(tenant: Tenant) -> admin_pb2.ResumeJobResponse:
            return admin_pb2.ResumeJobResponse(
                job=await self._steer(tenant, request, self._dispatcher.resume)
            )

        return await self._calls.act("ResumeJob", context, handle, target=_job_of(request))

    async def _steer(
        self,
        tenant: Tenant,
        request: admin_pb2.ParkJobRequest | admin_pb2.ResumeJobRequest,
        act: Callable[[str, str], Awaitable[None]],
    ) -> types_pb2.Job:
        """Do something to a job of any tenant and show the job after it."""
        owner = request.tenant or tenant.name
        record = await self._store.get(owner, request.job_id)
        await act(record.tenant, record.job_id)
        record = await self._store.get(owner, request.job_id)
        return convert.job(record, now_ms=self._store.now_ms)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        """Stop intake and end the daemon when it is empty, or after the time-out."""

        async def handle(_: Tenant) -> admin_pb2.DrainResponse:
            timeout_s = _seconds(request.timeout, "timeout") if request.HasField("timeout") else None
            running = self._dispatcher.running_jobs
            self._state.request_stop(timeout_s)
            return admin_pb2.DrainResponse(running_jobs=running)

        return await self._calls.act("Drain", context, handle)

    async def GetPolicy(
        self,
        request: admin_pb2.GetPolicyRequest,  # noqa: ARG002 - nothing to ask for
        context: Any,
    ) -> admin_pb2.GetPolicyResponse:
        """Say which policy is active."""

        async def handle(_: Tenant) -> admin_pb2.GetPolicyResponse:
            return admin_pb2.GetPolicyResponse(policy=self._state.policy, known_policies=policy_names())

        return await self._calls.act("GetPolicy", context, handle, reads=True)

    async def SetPolicy(
        self, request: admin_pb2.SetPolicyRequest, context: Any
    ) -> admin_pb2.SetPolicyResponse:
        """Exchange the policy; the queries stay."""

        async def handle(_: Tenant) -> admin_pb2.SetPolicyResponse:
            known = policy_names()
            if request.policy not in known:
                raise InvalidRequestError(
                    f"unknown policy {request.policy[:100]!r}; known are {', '.join(known)}",
                    reason="UNKNOWN_POLICY",
                    field="policy",
                    known=", ".join(known),
                )
            before = self._state.policy
            await self._dispatcher.set_policy(request.policy)
            return admin_pb2.SetPolicyResponse(policy=request.policy, previous_policy=before)

        return await self._calls.act("SetPolicy", context, handle, target=request.policy)

    async def CreateTenant(
        self, request: admin_pb2.CreateTenantRequest, context: Any
    ) -> admin_pb2.CreateTenantResponse:
        """Add a tenant and show its token once."""

        async def handle(_: Tenant) -> admin_pb2.CreateTenantResponse:
            rights = tenant_convert.rights(request.limits)
            added, token = await self._book.create(request.name, rights, request.certificate_subject)
            return admin_pb2.CreateTenantResponse(tenant=tenant_convert.tenant(added), token=token)

        return await self._calls.act("CreateTenant", context, handle, target=request.name)

    async def UpdateTenant(
        self, request: admin_pb2.UpdateTenantRequest, context: Any
    ) -> admin_pb2.UpdateTenantResponse:
        """Replace what a tenant may do and use."""

        async def handle(_: Tenant) -> admin_pb2.UpdateTenantResponse:
            changed = await self._book.update(request.name, tenant_convert.rights(request.limits))
            return admin_pb2.UpdateTenantResponse(tenant=tenant_convert.tenant(changed))

        return await self._calls.act("UpdateTenant", context, handle, target=request.name)

    async def RotateTenantToken(
        self, request: admin_pb2.RotateTenantTokenRequest, context: Any
    ) -> admin_pb2.RotateTenantTokenResponse:
        """Make a new token and show it once."""

        async def handle(_: Tenant) -> admin_pb2.RotateTenantTokenResponse:
            changed, token = await self._book.rotate(request.name)
            return admin_pb2.RotateTenantTokenResponse(tenant=tenant_convert.tenant(changed), token=token)

        return await self._calls.act("RotateTenantToken", context, handle, target=request.name)

    async def DisableTenant(
        self, request: admin_pb2.DisableTenantRequest, context: Any
    ) -> admin_pb2.DisableTenantResponse:
        """Refuse a tenant's calls."""

        async def handle(_: Tenant) -> admin_pb2.DisableTenantResponse:
            changed = await self._book.set_disabled(request.name, disabled=True)
            if request.cancel_jobs:
                await self._cancel_jobs(request.name)
            return admin_pb2.DisableTenantResponse(tenant=tenant_convert.tenant(changed))

        return await self._calls.act("DisableTenant", context, handle, target=request.name)

    async def _cancel_jobs(self, tenant: str) -> None:
        """End all jobs of a tenant that has been disabled: none comes after them."""
        cancelled, cursor = 0, ""
        while True:
            page = await self._store.list_jobs(tenant, cursor=cursor, limit=MAX_PAGE)
            for record in page.jobs:
                if record.state.final:
                    continue
                with contextlib.suppress(NotFoundError):  # It has expired meanwhile.
                    await self._store.cancel(tenant, record.job_id)
                self._dispatcher.cancel(tenant, record.job_id)
                cancelled += 1
            cursor = page.next_cursor
            if not cursor:
                break
        _log.info("tenant_jobs_cancelled", tenant=tenant, jobs=cancelled)

    async def EnableTenant(
        self, request: admin_pb2.EnableTenantRequest, context: Any
    ) -> admin_pb2.EnableTenantResponse:
        """Let a disabled tenant in again."""

        async def handle(_: Tenant) -> admin_pb2.EnableTenantResponse:
            changed = await self._book.set_disabled(request.name, disabled=False)
            return admin_pb2.EnableTenantResponse(tenant=tenant_convert.tenant(changed))

        return await self._calls.act("EnableTenant", context, handle, target=request.name)

    async def ListTenants(
        self,
        request: admin_pb2.ListTenantsRequest,  # noqa: ARG002 - nothing to ask for
        context: Any,
    ) -> admin_pb2.ListTenantsResponse:
        """List configured and added tenants."""

        async def handle(_: Tenant) -> admin_pb2.ListTenantsResponse:
            await self._book.load()
            tenants = sorted(self._book.tenants, key=lambda one: one.name)
            return admin_pb2.ListTenantsResponse(tenants=[tenant_convert.tenant(one) for one in tenants])

        return await self._calls.act("ListTenants", context, handle, reads=True)

    async def ListDeadJobs(
        self, request: admin_pb2.ListDeadJobsRequest, context: Any
    ) -> admin_pb2.ListDeadJobsResponse:
        """List what was given up for good."""

        async def handle(_: Tenant) -> admin_pb2.ListDeadJobsResponse:
            size = min(request.page_size or DEFAULT_DEAD_PAGE, MOST_DEAD_PAGE)
            page = await self._store.dead_page(cursor=request.page_token, limit=size)
            dead_jobs = [convert.dead_job(letter) for letter in page.letters]
            return admin_pb2.ListDeadJobsResponse(dead_jobs=dead_jobs, next_page_token=page.next_cursor)

        return await self._calls.act("ListDeadJobs", context, handle, reads=True)

    async def RetryDeadJob(
        self, request: admin_pb2.RetryDeadJobRequest, context: Any
    ) -> admin_pb2.RetryDeadJobResponse:
        """Let a dead job run again."""

        async def handle(_: Tenant) -> admin_pb2.RetryDeadJobResponse:
            record = await self._store.dead_retry(request.name)
            return admin_pb2.RetryDeadJobResponse(job=convert.job(record, now_ms=self._store.now_ms))

        return await self._calls.act("RetryDeadJob", context, handle, target=request.name)

    async def DropDeadJob(
        self, request: admin_pb2.DropDeadJobRequest, context: Any
    ) -> admin_pb2.DropDeadJobResponse:
        """Throw a dead job away."""

        async def handle(_: Tenant) -> admin_pb2.DropDeadJobResponse:
            await self._store.dead_drop(request.name)
            return admin_pb2.DropDeadJobResponse()

        return await self._calls.act("DropDeadJob", context, handle, target=request.name)

    def _info(self, tenant: Tenant) -> admin_pb2.GetServerInfoResponse:
        ready = self._state.ready
        info = admin_pb2.GetServerInfoResponse(
            version=_version("batond"),
            library_versions=self._versions,
            state=self._state.server_state,
            state_message=self._state.message,
            model=ready.model,
            device=ready.device,
            rows=ready.rows,
            max_query_tokens=ready.max_query_tokens,
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            batch_kind=ready.batch_kind,
            batch_reason=ready.batch_reason,
            preemption_mode=ready.preemption_mode,
            policy=self._state.policy,
            default_sla_class=tenant.default_class,
            kv_bytes_per_token=ready.kv_bytes_per_token,
            host_pool_bytes=ready.host_pool_bytes,
            max_message_bytes=self._max_message_bytes,
            tenant=tenant.name,
            max_choices=self._limits.max_choices,
            max_choice_tokens=self._limits.max_choice_tokens,
            daemon_id=self._neighbours.id,
        )
        for one in self._classes:
            info.sla_classes.add(name=one.name, order=one.order, preemptible=one.preemptible)
        info.start_time.FromMilliseconds(int(self._started_unix_s * 1000))
        info.uptime.FromMilliseconds(int((time.monotonic() - self._started_s) * 1000))
        return info


def _job_of(request: admin_pb2.ParkJobRequest | admin_pb2.ResumeJobRequest) -> Callable[[str], str]:
    """Names a job as `<tenant>/<job id>`: its tenant is the caller's if none is given."""

    def named(caller: str) -> str:
        tenant = request.tenant or caller
        return f"{tenant}/{request.job_id}" if tenant else request.job_id

    return named


def _seconds(asked: Duration, field: str) -> float:
    """A time an administrator gave.

    Raises:
        InvalidRequestError: It is negative, or none.
    """
    nanoseconds = int(asked.seconds) * 10**9 + asked.nanos
    if not 0 <= nanoseconds <= LONGEST_S * 10**9:
        raise InvalidRequestError(f"{field} must be from 0 to {LONGEST_S} seconds", field=field)
    return nanoseconds / 1e9


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
