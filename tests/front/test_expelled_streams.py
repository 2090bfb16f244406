"""Open streams end when their caller would not be let in any more: real gRPC, tenants that change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from batond.daemon.config_tenants import TenantConfig
from batond.daemon.front.calls import Calls, by_credentials
from batond.daemon.front.identity import Account, Identities, account_of, hash_token
from batond.daemon.telemetry.metrics import Metrics
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batond.daemon.front.identity import Tenant

CLASSES = SlaClasses()
TIMEOUT_S = 20


def account(name: str, token: str, *, disabled: bool = False, admin: bool = False) -> Account:
    config = TenantConfig(name=name, token_sha256=hash_token(token).hex(), admin=admin)
    return account_of(config, CLASSES, disabled=disabled)


class Scene:
    """A server whose streams send their tenant's name and go on for ever."""

    def __init__(self) -> None:
        self.identities = Identities([], CLASSES)
        self.metrics = Metrics()
        self.calls = Calls(by_credentials(self.identities), self.metrics)
        self.ends: list[tuple[str, bool]] = []
        self.left = asyncio.Event()  # Somebody left who was not expelled.
        self.port = 0

    def tenants(self, *accounts: Account) -> None:
        """What the tenant book does when tenants have changed."""
        self.identities.replace_added(accounts)
        self.calls.recheck()

    async def endless(self, method: str, context: Any) -> None:
        async def handle(tenant: Tenant) -> None:
            try:
                await context.write(tenant.name.encode())
                await asyncio.Event().wait()
            finally:
                self.ends.append((tenant.name, self.calls.expelled(context)))
                if not self.ends[-1][1]:
                    self.left.set()

        run = self.calls.watch if method == "Admin" else self.calls.stream
        await run(method, context, handle)

    async def open(self, channel: grpc.aio.Channel, token: str = "", method: str = "Stream") -> Any:
        """An open stream, of which the first message has come."""
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        call = channel.unary_stream(f"/test/{method}")(b"", metadata=metadata, timeout=TIMEOUT_S)
        assert await call.read()
        return call


@pytest.fixture
async def scene() -> AsyncIterator[tuple[Scene, grpc.aio.Channel]]:
    one, server = Scene(), grpc.aio.server()

    async def stream(_: bytes, context: Any) -> None:
        await one.endless("Stream", context)

    async def admin(_: bytes, context: Any) -> None:
        await one.endless("Admin", context)

    handlers = {
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Admin": grpc.unary_stream_rpc_method_handler(admin),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield one, channel
    await server.stop(None)


async def code(call: Any) -> str:
    found: grpc.StatusCode = await asyncio.wait_for(call.code(), TIMEOUT_S)
    return found.name


async def test_only_the_refused_callers_streams_end(scene: tuple[Scene, grpc.aio.Channel]) -> None:
    one, channel = scene
    one.tenants(account("red", "r"), account("blue", "b"), account("grey", "g"))
    red, blue, grey = [await one.open(channel, token) for token in "rbg"]
    one.tenants(account("red", "r", disabled=True), account("blue", "new"), account("grey", "g"))
    assert (await code(red), await code(blue)) == ("PERMISSION_DENIED", "UNAUTHENTICATED")
    assert not grey.done()
    assert sorted(one.ends) == [("blue", True), ("red", True)]
    one.calls.recheck()
    grey.cancel()
    await asyncio.wait_for(one.left.wait(), TIMEOUT_S)
    assert one.ends[-1] == ("grey", False), "a client that leaves is no stranger"
    read = one.metrics.registry.get_sample_value
    labels = {"method": "Stream", "code": "PERMISSION_DENIED"}
    assert read("batond_rpcs_refused_total", labels) == 1
    assert read("batond_open_streams") == 0
    assert not one.calls._streams


async def test_a_token_that_is_anothers_now_does_not_keep_a_stream(
    scene: tuple[Scene, grpc.aio.Channel],
) -> None:
    one, channel = scene
    one.tenants(account("red", "r"))
    stream = await one.open(channel, "r")
    one.tenants(account("red", "new"), account("blue", "r"))
    assert await code(stream) == "UNAUTHENTICATED"


async def test_without_tenants_streams_last_until_there_is_one(
    scene: tuple[Scene, grpc.aio.Channel],
) -> None:
    one, channel = scene
    stream = await one.open(channel)
    one.tenants()
    one.tenants(account("red", "r"))
    assert await code(stream) == "UNAUTHENTICATED"


async def test_who_is_no_administrator_any_more_sees_no_more(scene: tuple[Scene, grpc.aio.Channel]) -> None:
    one, channel = scene
    one.tenants(account("red", "r", admin=True))
    batch, jobs = await one.open(channel, "r", "Admin"), await one.open(channel, "r")
    one.tenants(account("red", "r"))
    assert await code(batch) == "PERMISSION_DENIED"
    assert not jobs.done()
    assert [name for name, _ in one.ends] == ["red"]
    jobs.cancel()
