"""What administrators ask: for each call its method, its request, how often it may be tried, and its answer.

Shared by the synchronous and the asyncio client, which add the connection and the words for their users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from batond.clients import build, convert, daemons, dead, tenants
from batond.v1 import admin_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.clients.daemons import DaemonInfo
    from batond.clients.dead import DeadJobPage
    from batond.clients.model import JobInfo
    from batond.clients.tenants import PolicyInfo, TenantInfo, TenantLimits, TenantToken

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdminCall(Generic[T]):
    """One call.

    Attributes:
        method: Its name in `AdminService`.
        request: What is sent.
        read: Turns the response into what the caller gets.
        attempts: Most tries; None is the client's own number. 1 where a second one would not be the same.
        here: Whether it is about one daemon, so that the client must know just one address.
    """

    method: str
    request: object
    read: Callable[[Any], T]
    attempts: int | None = None
    here: bool = False


def list_daemons() -> AdminCall[tuple[DaemonInfo, ...]]:
    """See `Client.daemons`."""
    return AdminCall(
        "ListDaemons",
        admin_pb2.ListDaemonsRequest(),
        lambda response: tuple(daemons.daemon(one) for one in response.daemons),
    )


def park(job_id: str, tenant: str) -> AdminCall[JobInfo]:
    """See `Client.park`."""
    request = build.named(admin_pb2.ParkJobRequest, job_id=job_id, tenant=tenant)
    return AdminCall("ParkJob", request, _job, attempts=1, here=True)


def resume(job_id: str, tenant: str) -> AdminCall[JobInfo]:
    """See `Client.resume`."""
    request = build.named(admin_pb2.ResumeJobRequest, job_id=job_id, tenant=tenant)
    return AdminCall("ResumeJob", request, _job, attempts=1, here=True)


def drain(drain_timeout_s: float | None) -> AdminCall[int]:
    """See `Client.drain`."""
    request = build.drain(drain_timeout_s)
    return AdminCall("Drain", request, lambda response: int(response.running_jobs), attempts=1, here=True)


def get_policy() -> AdminCall[PolicyInfo]:
    """See `Client.policy`."""
    return AdminCall("GetPolicy", admin_pb2.GetPolicyRequest(), tenants.policy)


def set_policy(policy: str) -> AdminCall[str]:
    """See `Client.set_policy`."""
    request = build.named(admin_pb2.SetPolicyRequest, policy=policy)
    return AdminCall("SetPolicy", request, lambda response: str(response.previous_policy), here=True)


def create_tenant(name: str, limits: TenantLimits | None, certificate_subject: str) -> AdminCall[TenantToken]:
    """See `Client.create_tenant`."""
    request = tenants.create(name, limits or tenants.TenantLimits(), certificate_subject)
    return AdminCall("CreateTenant", request, tenants.token, attempts=1)


def update_tenant(name: str, limits: TenantLimits) -> AdminCall[TenantInfo]:
    """See `Client.update_tenant`."""
    return AdminCall("UpdateTenant", tenants.update(name, limits), _tenant)


def rotate_tenant_token(name: str) -> AdminCall[TenantToken]:
    """See `Client.rotate_tenant_token`."""
    request = build.named(admin_pb2.RotateTenantTokenRequest, name=name)
    return AdminCall("RotateTenantToken", request, tenants.token, attempts=1)


def disable_tenant(name: str, *, cancel_jobs: bool) -> AdminCall[TenantInfo]:
    """See `Client.disable_tenant`."""
    request = build.named(admin_pb2.DisableTenantRequest, name=name)
    request.cancel_jobs = cancel_jobs
    return AdminCall("DisableTenant", request, _tenant)


def enable_tenant(name: str) -> AdminCall[TenantInfo]:
    """See `Client.enable_tenant`."""
    return AdminCall("EnableTenant", build.named(admin_pb2.EnableTenantRequest, name=name), _tenant)


def list_tenants() -> AdminCall[tuple[TenantInfo, ...]]:
    """See `Client.tenants`."""
    return AdminCall(
        "ListTenants",
        admin_pb2.ListTenantsRequest(),
        lambda response: tuple(tenants.tenant(one) for one in response.tenants),
    )


def list_dead_jobs(page_size: int, page_token: str) -> AdminCall[DeadJobPage]:
    """See `Client.dead_jobs_page`."""
    return AdminCall("ListDeadJobs", build.list_dead_jobs(page_size, page_token), dead.page)


def retry_dead_job(name: str) -> AdminCall[JobInfo]:
    """See `Client.retry_dead_job`."""
    return AdminCall("RetryDeadJob", build.named(admin_pb2.RetryDeadJobRequest, name=name), _job, attempts=1)


def drop_dead_job(name: str) -> AdminCall[None]:
    """See `Client.drop_dead_job`."""
    request = build.named(admin_pb2.DropDeadJobRequest, name=name)
    return AdminCall("DropDeadJob", request, lambda _: None, attempts=1)


def _job(response: Any) -> JobInfo:
    return convert.job(response.job)


def _tenant(response: Any) -> TenantInfo:
    return tenants.tenant(response.tenant)
