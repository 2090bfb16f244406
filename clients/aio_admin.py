"""What administrators do, as the asyncio client's calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from batond.clients import admin_calls, build, convert, errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batond.clients.admin_calls import AdminCall
    from batond.clients.batch import BatchSnapshot
    from batond.clients.daemons import DaemonInfo
    from batond.clients.dead import DeadJob, DeadJobPage
    from batond.clients.fleet import Fleet
    from batond.clients.model import JobInfo
    from batond.clients.tenants import PolicyInfo, TenantInfo, TenantLimits, TenantToken
    from batond.v1 import admin_pb2_grpc

T = TypeVar("T")


class AsyncAdminCalls:
    """Part of `AsyncClient`, which has the connection."""

    _fleet: Fleet
    _metadata: tuple[tuple[str, str], ...]
    _admin: admin_pb2_grpc.AdminServiceStub

    async def _call(self, method: Any, request: object, *, attempts: int | None = None) -> Any:
        """See `AsyncClient`."""
        raise NotImplementedError

    async def _ask(self, call: AdminCall[T]) -> T:
        if call.here:
            self._fleet.only()
        method = getattr(self._admin, call.method)
        return call.read(await self._call(method, call.request, attempts=call.attempts))

    async def daemons(self) -> tuple[DaemonInfo, ...]:
        """Returns the daemons that share the daemon's Redis, of all models.

        Raises:
            PermissionDeniedError: The caller is no administrator.
        """
        return await self._ask(admin_calls.list_daemons())

    async def watch_batch(self, min_interval_s: float | None = None) -> AsyncIterator[BatchSnapshot]:
        """Yields the batch as it stands, as it changes; ends when the daemon ends or the caller closes it."""
        request = build.watch_batch(min_interval_s)
        self._fleet.only()
        call = self._admin.WatchBatch.at(0)(request, metadata=self._metadata)
        try:
            async for response in call:
                yield convert.snapshot(response.snapshot)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error
        finally:
            call.cancel()

    async def park(self, job_id: str, *, tenant: str = "") -> JobInfo:
        """Takes the row of a running job and holds it until `resume`."""
        return await self._ask(admin_calls.park(job_id, tenant))

    async def resume(self, job_id: str, *, tenant: str = "") -> JobInfo:
        """Lets a job parked by hand compete for a row again."""
        return await self._ask(admin_calls.resume(job_id, tenant))

    async def drain(self, drain_timeout_s: float | None = None) -> int:
        """Tells the daemon to take no more jobs, finish or hand back what it has, and stop.

        Returns:
            How many jobs were in the engine then.
        """
        return await self._ask(admin_calls.drain(drain_timeout_s))

    async def policy(self) -> PolicyInfo:
        """Returns the active scheduling policy and the names of all."""
        return await self._ask(admin_calls.get_policy())

    async def set_policy(self, policy: str) -> str:
        """Exchanges the daemon's policy until its restart; no query is lost.

        Returns:
            The policy before.

        Raises:
            InvalidRequestError: There is no such policy; the message names those there are.
        """
        return await self._ask(admin_calls.set_policy(policy))

    async def create_tenant(
        self, name: str, limits: TenantLimits | None = None, *, certificate_subject: str = ""
    ) -> TenantToken:
        """Adds a tenant to all daemons of the queue; its token is shown in this answer only.

        Raises:
            AlreadyExistsError: The name was given before, or stands in the daemon's configuration.
        """
        return await self._ask(admin_calls.create_tenant(name, limits, certificate_subject))

    async def update_tenant(self, name: str, limits: TenantLimits) -> TenantInfo:
        """Replaces what an added tenant may do and use."""
        return await self._ask(admin_calls.update_tenant(name, limits))

    async def rotate_tenant_token(self, name: str) -> TenantToken:
        """Makes a new token for an added tenant; the old one is refused from now on."""
        return await self._ask(admin_calls.rotate_tenant_token(name))

    async def disable_tenant(self, name: str, *, cancel_jobs: bool = False) -> TenantInfo:
        """Refuses an added tenant's calls and ends its streams; accepted jobs run, or are cancelled."""
        return await self._ask(admin_calls.disable_tenant(name, cancel_jobs=cancel_jobs))

    async def enable_tenant(self, name: str) -> TenantInfo:
        """Lets a disabled tenant in again."""
        return await self._ask(admin_calls.enable_tenant(name))

    async def tenants(self) -> tuple[TenantInfo, ...]:
        """Returns all tenants by name, configured and added ones."""
        return await self._ask(admin_calls.list_tenants())

    async def dead_jobs_page(self, *, page_size: int = 0, page_token: str = "") -> DeadJobPage:
        """Returns one page of what was given up for good, of all tenants, newest first.

        Raises:
            PermissionDeniedError: The caller is no administrator.
            InvalidRequestError: The page token is none.
        """
        return await self._ask(admin_calls.list_dead_jobs(page_size, page_token))

    async def dead_jobs(self, *, page_size: int = 0) -> AsyncIterator[DeadJob]:
        """Yields what was given up for good, newest first; fetches pages as they are needed."""
        page_token = ""
        while True:
            page = await self.dead_jobs_page(page_size=page_size, page_token=page_token)
            for one in page.dead_jobs:
                yield one
            page_token = page.next_page_token
            if not page_token:
                return

    async def retry_dead_job(self, name: str) -> JobInfo:
        """Lets a dead job run again, from its committed tokens and with fresh attempts.

        Args:
            name: `DeadJob.name`.

        Raises:
            NotFoundError: There is no such entry.
            WrongStateError: It is of no job, or nobody could run it; the message says why.
        """
        return await self._ask(admin_calls.retry_dead_job(name))

    async def drop_dead_job(self, name: str) -> None:
        """Throws a dead job away, with what it has put out.

        Args:
            name: `DeadJob.name`.

        Raises:
            NotFoundError: There is no such entry.
        """
        await self._ask(admin_calls.drop_dead_job(name))
