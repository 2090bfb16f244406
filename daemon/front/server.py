"""The gRPC server: services, health, reflection, limits and transport security."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from batond.daemon.config import is_local
from batond.daemon.errors import ConfigError
from batond.daemon.front.addresses import answers
from batond.daemon.front.malformed import RefuseMalformed
from batond.daemon.front.unknown_calls import careful_server
from batond.v1 import admin_pb2, admin_pb2_grpc, jobs_pb2, jobs_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc

    from batond.daemon.config import Settings
    from batond.daemon.front.admin import AdminServicer
    from batond.daemon.front.jobs import JobServicer
    from batond.daemon.front.state import DaemonState
    from batond.daemon.front.tls import ServerTls

#: Health services: keep the process, send it work, spare it work. "" is `readiness`.
LIVENESS, READINESS, SATURATION = "liveness", "readiness", "saturation"
HEALTH_EVERY_S = 0.5
_SHORTEST_PING_MS = 10_000
_TRANSPORT_SLACK = 4
_SERVICES = (
    jobs_pb2.DESCRIPTOR.services_by_name["JobService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)


def build_server(
    settings: Settings,
    jobs: JobServicer,
    admin: AdminServicer,
    health_servicer: health.aio.HealthServicer,
    tls: ServerTls | None = None,
) -> grpc.aio.Server:
    """Assemble the server and bind its addresses.

    Raises:
        ConfigError: An address can't be bound.
    """
    server = careful_server(
        interceptors=[RefuseMalformed()], options=_options(settings.server.max_message_bytes)
    )
    jobs_pb2_grpc.add_JobServiceServicer_to_server(jobs, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if settings.server.reflection:
        reflection.enable_server_reflection(
            (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
    for address in settings.server.listen:
        _bind(server, address, tls.credentials() if tls is not None else None)
    return server


def build_admin_server(admin: AdminServicer, address: str, max_message_bytes: int) -> grpc.aio.Server:
    """Assemble the local administrators' server; see `local_admin`.

    Raises:
        ConfigError: The address can't be bound.
    """
    server = careful_server(interceptors=[RefuseMalformed()], options=_options(max_message_bytes))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    reflection.enable_server_reflection((_SERVICES[1], reflection.SERVICE_NAME), server)
    _bind(server, address, None)
    return server


async def keep_health(servicer: health.aio.HealthServicer, state: DaemonState) -> None:
    """Keep the health services true until cancelled."""
    while True:
        for name, good in (
            ("", state.serving),
            (READINESS, state.serving),
            (LIVENESS, state.live),
            (SATURATION, not state.saturated),
        ):
            await servicer.set(name, _serving(good))
        await asyncio.sleep(HEALTH_EVERY_S)


def open_sockets(listen: Iterable[str]) -> None:
    """Let the service's group use the Unix sockets, whatever the umask; their folders say who gets there."""
    for address in listen:
        if address.startswith("unix:"):
            Path(address.removeprefix("unix:")).chmod(0o660)


def _serving(good: bool) -> Any:  # noqa: FBT001 - one word for yes and one for no
    statuses = health_pb2.HealthCheckResponse
    return statuses.SERVING if good else statuses.NOT_SERVING


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        # gRPC's own refusal says nothing: let it read beyond the limit, and refuse in words.
        ("grpc.max_receive_message_length", _TRANSPORT_SLACK * max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Clients may ping during a silent prefill; without this they earn a GOAWAY.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _SHORTEST_PING_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),  # Two daemons on one port would share calls at random.
    ]


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> None:
    try:
        if address.startswith("unix:"):
            _make_room(Path(address.removeprefix("unix:")))
            bound = server.add_insecure_port(address)
        elif credentials is not None:
            bound = server.add_secure_port(address, credentials)
        else:
            bound = server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"can't listen on {address}: {error}", address=address) from error
    if not bound:
        raise ConfigError(f"can't listen on {address}: is it taken?", address=address)


def _make_room(path: Path) -> None:
    """Make the socket's folder; remove the socket of a daemon that died.

    Raises:
        OSError: Somebody answers there, who would be heard no more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if answers(path):
        raise OSError("another process answers there; is it taken?")
    if path.is_socket():
        os.unlink(path)  # noqa: PTH108 - Path.unlink reads worse next to is_socket


__all__ = [
    "LIVENESS",
    "READINESS",
    "SATURATION",
    "build_admin_server",
    "build_server",
    "is_local",
    "keep_health",
]
