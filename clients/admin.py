"""What administrators do, as the synchronous client's calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from batond.clients import build, convert, daemons, dead, errors, tenants
from batond.clients.tenants import TenantLimits
from batond.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.clients.daemons import DaemonInfo
    from batond.clients.dead import DeadJob, DeadJobPage
    from batond.clients.fleet import Fleet
    from batond.clients.model import BatchSnapshot, JobInfo
    from batond.clients.tenants import PolicyInfo, TenantInfo, TenantToken


class AdminCalls:
    """Part of `Client`, which has the connection."""

    _fleet: Fleet
    _admin: admin_pb2_grpc.AdminServiceStub

    def _call(self, method: Any, request: object, *, attempts: int | None = None) -> Any:
        """See `Client`."""
        raise NotImplementedError

    def daemons(self) -> tuple[DaemonInfo, ...]:
        """Returns the daemons that share the daemon's Redis, of all models.

        Raises:
            PermissionDeniedError: The caller is no administrator.
        """
        response = self._call(self._admin.ListDaemons, admin_pb2.ListDaemonsRequest())
        return tuple(daemons.daemon(one) for one in response.daemons)

    def watch_batch(self, min_interval_s: float | None = None) -> Iterator[BatchSnapshot]:
        """Yields the batch as it stands, as it changes; ends when the daemon ends or the caller closes it."""
        request = build.watch_batch(min_interval_s)
        self._fleet.only()
        call = self._admin.WatchBatch.at(0)(request, metadata=self._fleet.metadata)
        try:
            for response in call:
                yield convert.snapshot(response.snapshot)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error
        finally:
            call.cancel()

    def park(self, job_id: str, *, tenant: str = "") -> JobInfo:
        """Takes the row of a running job and holds it until `resume`."""
        self._fleet.only()
        request = build.named(admin_pb2.ParkJobRequest, job_id=job_id, tenant=tenant)
        return convert.job(self._call(self._admin.ParkJob, request, attempts=1).job)

    def resume(self, job_id: str, *, tenant: str = "") -> JobInfo:
        """Lets a job parked by hand compete for a row again."""
        self._fleet.only()
        request = build.named(admin_pb2.ResumeJobRequest, job_id=job_id, tenant=tenant)
        return convert.job(self._call(self._admin.ResumeJob, request, attempts=1).job)

    def drain(self, drain_timeout_s: float | None = None) -> int:
        """Tells the daemon to take no more jobs, finish or hand back what it has, and stop.

        Returns:
            How many jobs were in the engine then.
        """
        self._fleet.only()
        response = self._call(self._admin.Drain, build.drain(drain_timeout_s), attempts=1)
        return int(response.running_jobs)

    def policy(self) -> PolicyInfo:
        """Returns the active scheduling policy and the names of all."""
        return tenants.policy(self._call(self._admin.GetPolicy, admin_pb2.GetPolicyRequest()))

    def set_policy(self, policy: str) -> str:
        """Exchanges the daemon's policy until its restart; no query is lost.

        Returns:
            The policy before.

        Raises:
            InvalidRequestError: There is no such policy; the message names those there are.
        """
        self._fleet.only()
        request = build.named(admin_pb2.SetPolicyRequest, policy=policy)
        response = self._call(self._admin.SetPolicy, request)
        return str(response.previous_policy)

    def create_tenant(
        self, name: str, limits: TenantLimits | None = None, *, certificate_subject: str = ""
    ) -> TenantToken:
        """Adds a tenant to all daemons of the queue; its token is shown in this answer only.

        Raises:
            AlreadyExistsError: The name was given before, or stands in the daemon's configuration.
        """
        request = tenants.create(name, limits or TenantLimits(), certificate_subject)
        return tenants.token(self._call(self._admin.CreateTenant, request, attempts=1))

    def update_tenant(self, name: str, limits: TenantLimits) -> TenantInfo:
        """Replaces what an added tenant may do and use."""
        request = tenants.update(name, limits)
        response = self._call(self._admin.UpdateTenant, request)
        return tenants.tenant(response.tenant)

    def rotate_tenant_token(self, name: str) -> TenantToken:
        """Makes a new token for an added tenant; the old one is refused from now on."""
        request = build.named(admin_pb2.RotateTenantTokenRequest, name=name)
        return tenants.token(self._call(self._admin.RotateTenantToken, request, attempts=1))

    def disable_tenant(self, name: str, *, cancel_jobs: bool = False) -> TenantInfo:
        """Refuses an added tenant's calls and ends its streams; accepted jobs run, or are cancelled."""
        request = build.named(admin_pb2.DisableTenantRequest, name=name)
        request.cancel_jobs = cancel_jobs
        response = self._call(self._admin.DisableTenant, request)
        return tenants.tenant(response.tenant)

    def enable_tenant(self, name: str) -> TenantInfo:
        """Lets a disabled tenant in again."""
        request = build.named(admin_pb2.EnableTenantRequest, name=name)
        response = self._call(self._admin.EnableTenant, request)
        return tenants.tenant(response.tenant)

    def tenants(self) -> tuple[TenantInfo, ...]:
        """Returns all tenants by name, configured and added ones."""
        response = self._call(self._admin.ListTenants, admin_pb2.ListTenantsRequest())
        return tuple(tenants.tenant(one) for one in response.tenants)

    def dead_jobs_page(self, *, page_size: int = 0, page_token: str = "") -> DeadJobPage:
        """Returns one page of what was given up for good, of all tenants, newest first.

        Raises:
            PermissionDeniedError: The caller is no administrator.
            InvalidRequestError: The page token is none.
        """
        request = build.list_dead_jobs(page_size, page_token)
        return dead.page(self._call(self._admin.ListDeadJobs, request))

    def dead_jobs(self, *, page_size: int = 0) -> Iterator[DeadJob]:
        """Yields what was given up for good, newest first; fetches pages as they are needed."""
        page_token = ""
        while True:
            page = self.dead_jobs_page(page_size=page_size, page_token=page_token)
            yield from page.dead_jobs
            page_token = page.next_page_token
            if not page_token:
                return

    def retry_dead_job(self, name: str) -> JobInfo:
        """Lets a dead job run again, from its committed tokens and with fresh attempts.

        Args:
            name: `DeadJob.name`.

        Raises:
            NotFoundError: There is no such entry.
            WrongStateError: It is of no job, or nobody could run it; the message says why.
        """
        request = build.named(admin_pb2.RetryDeadJobRequest, name=name)
        return convert.job(self._call(self._admin.RetryDeadJob, request, attempts=1).job)

    def drop_dead_job(self, name: str) -> None:
        """Throws a dead job away, with what it has put out.

        Args:
            name: `DeadJob.name`.

        Raises:
            NotFoundError: There is no such entry.
        """
        request = build.named(admin_pb2.DropDeadJobRequest, name=name)
        self._call(self._admin.DropDeadJob, request, attempts=1)
