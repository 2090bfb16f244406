"""The daemon's addresses: free, or a batond's already. Nothing is left behind, no folder is made."""

from __future__ import annotations

import http.client
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batond.daemon.config_base import split_address
from batond.daemon.doctor.report import Finding, Level
from batond.daemon.errors import ConfigError
from batond.daemon.front.addresses import HeldAddresses, answers
from batond.daemon.front.server import LIVENESS, READINESS
from batond.daemon.front.tls import read_tls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.daemon.config import Settings

CHECK: Final = "addresses"
TIMEOUT_S: Final = 2.0
_TAKEN: Final = "end the other program (ss -ltnp), or change"


def look(settings: Settings) -> Iterator[Finding]:
    """Each address that the daemon would listen on."""
    for address in settings.server.listen:
        yield _listen(settings, address)
    if settings.server.metrics_listen:
        yield _metrics(settings.server.metrics_listen)
    admin = settings.server.admin_socket_path
    if admin is not None:
        yield _socket(settings, admin, "server.admin_socket", asks=False)


def _listen(settings: Settings, address: str) -> Finding:
    if address.startswith("unix:"):
        return _socket(settings, Path(address.removeprefix("unix:")), "server.listen", asks=True)
    refused = _refused(address)
    if not refused:
        return Finding(CHECK, Level.OK, f"{address} is free")
    if settings.tls.on:
        return _listen_tls(settings, address, refused)
    state = _health(address)
    if state:
        return Finding(CHECK, Level.OK, f"{address}: a batond is there, {state}")
    return Finding(CHECK, Level.FAULT, refused, f"{_TAKEN} server.listen")


def _listen_tls(settings: Settings, address: str, refused: str) -> Finding:
    """Who shows our certificate is our daemon; with TLS nothing more is asked."""
    host, port = split_address(address)
    files = read_tls(settings.tls)
    try:
        shown = ssl.get_server_certificate((_reached(host), port), timeout=TIMEOUT_S)
        known = ssl.PEM_cert_to_DER_cert(_first_certificate(files.certificates if files else b""))
    except (OSError, ValueError):
        return Finding(CHECK, Level.FAULT, refused, f"{_TAKEN} server.listen")
    if ssl.PEM_cert_to_DER_cert(shown) == known:
        return Finding(CHECK, Level.OK, f"{address}: a batond is there, with the certificate of [tls]")
    return Finding(
        CHECK,
        Level.WARNING,
        f"{address}: a server is there that shows another certificate",
        "reload the daemon if its certificate was renewed; else end the other program",
    )


def _first_certificate(pem: bytes) -> str:
    """Of a chain, the server's own."""
    return (
        pem.decode("ascii", "replace").partition("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----"
    )


def _socket(settings: Settings, path: Path, key: str, *, asks: bool) -> Finding:
    """A path is only looked at: a folder made here would be this user's, not the service's."""
    if answers(path):
        # The administrators' server has no health, and behind TLS nobody is asked by a path.
        asks = asks and not settings.tls.on
        state = _health(f"unix:{path.absolute()}") if asks else "it accepts connections"
        if state:
            return Finding(CHECK, Level.OK, f"{path}: a batond is there, {state}")
        return Finding(CHECK, Level.FAULT, f"{path}: another program answers there", f"{_TAKEN} {key}")
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            CHECK,
            Level.WARNING,
            f"{path}: this user can't write to {there}",
            f"under systemd RuntimeDirectory= makes it; else run this as the service's user, or change {key}",
        )
    return Finding(CHECK, Level.OK, f"{path} is free")


def _metrics(address: str) -> Finding:
    refused = _refused(address)
    if not refused:
        return Finding(CHECK, Level.OK, f"{address} is free, for metrics")
    host, port = split_address(address)
    connection = http.client.HTTPConnection(host or "localhost", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        ours = b"batond_" in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        ours = False
    finally:
        connection.close()
    if ours:
        return Finding(CHECK, Level.OK, f"{address}: a batond's metrics are there")
    return Finding(CHECK, Level.FAULT, refused, f"{_TAKEN} server.metrics_listen")


def _refused(address: str) -> str:
    try:
        HeldAddresses([address]).close()
    except ConfigError as error:
        return error.message
    return ""


def _reached(host: str) -> str:
    return "127.0.0.1" if host in {"", "0.0.0.0", "::"} else host  # noqa: S104 - compared, not bound


def _health(address: str) -> str:
    """How a batond at an address feels; empty if it is none. Health needs no token."""
    target = address
    if not address.startswith("unix:"):
        host, port = split_address(address)
        target = f"[{host}]:{port}" if ":" in _reached(host) else f"{_reached(host)}:{port}"
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # The generated class carries no types.
        try:
            live, ready = (
                stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S).status
                for service in (LIVENESS, READINESS)
            )
        except grpc.RpcError:
            return ""
    serving = health_pb2.HealthCheckResponse.SERVING
    words = "ready" if ready == serving else "not ready"
    return words if live == serving else f"{words}, its engine makes no progress"
