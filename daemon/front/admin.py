"""AdminService: what operators see and steer."""

from __future__ import annotations

import asyncio
import platform
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from batond.daemon.front import convert
from batond.daemon.front.identity import require_admin
from batond.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from batond.daemon.front.calls import Calls
    from batond.daemon.front.dispatcher import Dispatcher
    from batond.daemon.front.identity import Tenant
    from batond.daemon.front.requests import Limits
    from batond.daemon.front.state import DaemonState
    from batond.daemon.queue import JobStore
    from batond.policies.classes import SlaClasses
    from batond.v1 import types_pb2

LIBRARIES = ("torch", "transformers", "tokenizers", "grpcio", "protobuf", "redis", "msgspec")
DEFAULT_INTERVAL_S = 0.25
LEAST_INTERVAL_S = 0.05


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """See proto/batond/v1/admin.proto.

    Args:
        calls: What every rpc shares.
        state: How the daemon stands.
        dispatcher: The jobs it runs.
        store: The queue.
        classes: SLA classes.
        limits: What requests are held to.
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
        max_message_bytes: int,
    ) -> None:
        self._calls, self._state, self._dispatcher, self._store = calls, state, dispatcher, store
        self._classes, self._limits, self._max_message_bytes = classes, limits, max_message_bytes
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

    async def WatchBatch(self, request: admin_pb2.WatchBatchRequest, context: Any) -> None:
        """Stream the batch as it changes."""

        async def handle(tenant: Tenant) -> None:
            require_admin(tenant)
            asked_s = request.min_interval.ToTimedelta().total_seconds()
            interval_s = (
                max(asked_s, LEAST_INTERVAL_S) if request.HasField("min_interval") else DEFAULT_INTERVAL_S
            )
            while True:
                shot = self._dispatcher.snapshot
                if shot is not None:
                    counts = self._dispatcher.counts
                    queued = sum(counts.queued.values()) if counts is not None else 0
                    shown = convert.snapshot(shot, queued)
                    await context.write(admin_pb2.WatchBatchResponse(snapshot=shown))
                    await asyncio.sleep(interval_s)
                if self._dispatcher.snapshot is shot:
                    await self._dispatcher.next_snapshot()

        await self._calls.stream("WatchBatch", context, handle)

    async def ParkJob(self, request: admin_pb2.ParkJobRequest, context: Any) -> admin_pb2.ParkJobResponse:
        """Take a job's row and hold it."""

        async def handle(tenant: Tenant) -> admin_pb2.ParkJobResponse:
            return admin_pb2.ParkJobResponse(job=await self._steer(tenant, request, self._dispatcher.park))

        return await self._calls.answer("ParkJob", context, handle)

    async def ResumeJob(
        self, request: admin_pb2.ResumeJobRequest, context: Any
    ) -> admin_pb2.ResumeJobResponse:
        """Let a job parked by hand go on."""

        async def handle(tenant: Tenant) -> admin_pb2.ResumeJobResponse:
            return admin_pb2.ResumeJobResponse(
                job=await self._steer(tenant, request, self._dispatcher.resume)
            )

        return await self._calls.answer("ResumeJob", context, handle)

    async def _steer(
        self,
        tenant: Tenant,
        request: admin_pb2.ParkJobRequest | admin_pb2.ResumeJobRequest,
        act: Callable[[str, str], Awaitable[None]],
    ) -> types_pb2.Job:
        """Do something to a job of any tenant and show the job after it."""
        require_admin(tenant)
        owner = request.tenant or tenant.name
        record = await self._store.get(owner, request.job_id)
        await act(record.tenant, record.job_id)
        return convert.job(await self._store.get(owner, request.job_id))

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        """Stop intake and end the daemon when it is empty, or after the time-out."""

        async def handle(tenant: Tenant) -> admin_pb2.DrainResponse:
            require_admin(tenant)
            timeout_s = request.timeout.ToTimedelta().total_seconds() if request.HasField("timeout") else None
            running = self._dispatcher.running_jobs
            self._state.request_stop(timeout_s)
            return admin_pb2.DrainResponse(running_jobs=running)

        return await self._calls.answer("Drain", context, handle)

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
            policy=ready.policy,
            default_sla_class=tenant.default_class,
            kv_bytes_per_token=ready.kv_bytes_per_token,
            host_pool_bytes=ready.host_pool_bytes,
            max_message_bytes=self._max_message_bytes,
            tenant=tenant.name,
            max_choices=self._limits.max_choices,
            max_choice_tokens=self._limits.max_choice_tokens,
        )
        for one in self._classes:
            info.sla_classes.add(name=one.name, order=one.order, preemptible=one.preemptible)
        info.start_time.FromMilliseconds(int(self._started_unix_s * 1000))
        info.uptime.FromMilliseconds(int((time.monotonic() - self._started_s) * 1000))
        return info


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
