"""Who calls and what the audit log says of it, over real gRPC: tokens, mutual TLS, administrators."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import grpc
import pytest
import structlog.testing
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.rpc import error_details_pb2, status_pb2

from batond.daemon.config_tenants import TenantConfig
from batond.daemon.errors import ExhaustedError
from batond.daemon.front.calls import Calls, by_credentials
from batond.daemon.front.identity import Identities
from batond.daemon.front.status import to_status
from batond.daemon.telemetry.metrics import Metrics
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batond.daemon.front.identity import Tenant


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TENANTS = [
    TenantConfig(name="red", token_sha256=sha256("r3d"), admin=True),
    TenantConfig(name="blue", certificate_subject="blue.example"),
    TenantConfig(name="grey", certificate_subject="CN=grey.example,O=org"),
]


@dataclass
class Certificate:
    """PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs certificates for clients and for 127.0.0.1."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.pem = self._sign(self.name, self.key.public_key(), authority=True)

    def issue(self, common_name: str, organization: str = "") -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if organization:
            attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        pem = self._sign(x509.Name(attributes), key.public_key())
        plain = serialization.NoEncryption()
        return Certificate(
            pem, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        )

    def _sign(self, name: x509.Name, public: Any, *, authority: bool = False) -> bytes:
        now = dt.datetime.now(dt.UTC)
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(address, critical=False)
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@dataclass
class Served:
    """A server with mutual TLS whose calls answer with the caller's name."""

    authority: Authority
    port: int

    async def ask(self, method: str, common_name: str, organization: str = "", token: str = "") -> str:
        own = self.authority.issue(common_name, organization)
        credentials = grpc.ssl_channel_credentials(self.authority.pem, own.key, own.certificate)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        async with grpc.aio.secure_channel(f"127.0.0.1:{self.port}", credentials) as channel:
            answer: bytes = await channel.unary_unary(f"/test/{method}")(b"", metadata=metadata, timeout=20)
            return answer.decode()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The server."""
    calls = Calls(by_credentials(Identities(TENANTS, SlaClasses())), Metrics())

    async def name_of(tenant: Tenant) -> bytes:
        return tenant.name.encode()

    async def who(_: bytes, context: Any) -> bytes:
        return await calls.answer("Who", context, name_of)

    async def change(_: bytes, context: Any) -> bytes:
        return await calls.act("Change", context, name_of, target="thing")

    async def read(_: bytes, context: Any) -> bytes:
        return await calls.act("Read", context, name_of, reads=True)

    async def broken(_: bytes, context: Any) -> bytes:
        async def fail(_: Tenant) -> bytes:
            raise RuntimeError("inside")

        return await calls.act("Break", context, fail)

    handlers = {
        name: grpc.unary_unary_rpc_method_handler(behaviour)
        for name, behaviour in (("Who", who), ("Change", change), ("Read", read), ("Break", broken))
    }
    authority = Authority()
    own = authority.issue("server")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    credentials = grpc.ssl_server_credentials(
        [(own.key, own.certificate)], root_certificates=authority.pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield Served(authority, port)
    await server.stop(0)


async def test_a_client_certificate_is_a_tenant(served: Served) -> None:
    assert await served.ask("Who", "blue.example") == "blue"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.ask("Who", "somebody.example")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_whole_subject_is_a_tenant(served: Served) -> None:
    assert await served.ask("Who", "grey.example", "org") == "grey"
    with pytest.raises(grpc.aio.AioRpcError):
        await served.ask("Who", "grey.example", "another")


async def test_a_token_goes_before_the_certificate(served: Served) -> None:
    assert await served.ask("Who", "blue.example", token="r3d") == "red"


async def test_another_authoritys_certificate_gets_nowhere(served: Served) -> None:
    stranger = Authority().issue("blue.example")
    credentials = grpc.ssl_channel_credentials(served.authority.pem, stranger.key, stranger.certificate)
    async with grpc.aio.secure_channel(f"127.0.0.1:{served.port}", credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test/Who")(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_administrators_do_is_audited(served: Served) -> None:
    with structlog.testing.capture_logs() as lines:
        await served.ask("Change", "x", token="r3d")
        await served.ask("Read", "x", token="r3d")
        asked: list[tuple[str, dict[str, str]]] = [
            ("Change", {"common_name": "blue.example"}),
            ("Read", {"common_name": "blue.example"}),
            ("Change", {"common_name": "x", "token": "wr0ng"}),
            ("Break", {"common_name": "x", "token": "r3d"}),
        ]
        for method, arguments in asked:
            with pytest.raises(grpc.aio.AioRpcError):
                await served.ask(method, **arguments)
    said = [
        (line["action"], line["actor"], line["outcome"], line["reason"])
        for line in lines
        if line["event"] == "admin_action"
    ]
    assert said == [
        ("Change", "red", "done", ""),
        ("Change", "blue", "refused", "NOT_ADMIN"),
        ("Read", "blue", "refused", "NOT_ADMIN"),
        ("Change", "", "refused", "BAD_TOKEN"),
        ("Break", "red", "failed", "RuntimeError"),
    ]
    assert "r3d" not in str(lines)
    assert "wr0ng" not in str(lines)


@pytest.mark.parametrize(("reads", "said"), [(False, [("Change", "red", "failed", "CANCELLED")]), (True, [])])
async def test_who_hangs_up_in_the_middle_of_a_change_is_audited(
    *, reads: bool, said: list[tuple[str, str, str, str]]
) -> None:
    """What was asked for may have been done by then; a watch that is closed changed nothing."""
    calls = Calls(by_credentials(Identities(TENANTS, SlaClasses())), Metrics())
    context, begun = Mock(), asyncio.Event()
    context.invocation_metadata.return_value = (("authorization", "Bearer r3d"),)
    context.auth_context.return_value = {}

    async def change(_: Tenant) -> None:
        begun.set()
        await asyncio.Event().wait()

    with structlog.testing.capture_logs() as lines:
        call = asyncio.create_task(calls.act("Change", context, change, target="thing", reads=reads))
        await asyncio.wait_for(begun.wait(), 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert said == [
        (line["action"], line["actor"], line["outcome"], line["reason"])
        for line in lines
        if line["event"] == "admin_action"
    ]


async def test_many_at_once_are_not_mixed_up(served: Served) -> None:
    names = await asyncio.gather(
        *(served.ask("Who", "blue.example", token=token) for token in ("r3d", "", "r3d", "")),
    )
    assert names == ["red", "blue", "red", "blue"]


@pytest.mark.parametrize(("details", "delay_s"), [({"retry_ms": 2500}, 2.5), ({}, 1.0)])
def test_exhaustion_says_when_to_come_back(details: dict[str, Any], delay_s: float) -> None:
    status = to_status(ExhaustedError("full", reason="TENANT_QUEUE_FULL", **details))
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    packed = dict(status.trailing_metadata)["grpc-status-details-bin"]
    retry = error_details_pb2.RetryInfo()
    found = status_pb2.Status.FromString(packed)
    assert any(detail.Unpack(retry) for detail in found.details)
    assert retry.retry_delay.ToMilliseconds() == delay_s * 1000
