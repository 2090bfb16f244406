"""The administrators' socket: the kernel says who connects, through gRPC and back."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import structlog.testing

from batond.daemon.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from batond.daemon.front.calls import by_user
from batond.daemon.front.identity import LocalAdministrators
from batond.daemon.front.local_admin import AdminSocket, user_ids, user_of_peer
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one: the paths of sockets are."""
    path = Path(tempfile.mkdtemp(prefix="bd-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def relay(folder: Path) -> AsyncIterator[AdminSocket]:
    """The relay before a server that answers with the user it sees, and echoes."""
    relay = AdminSocket(folder / "admin.sock")

    async def answer(request: bytes, context: Any) -> bytes:
        return str(user_of_peer(context.peer())).encode() + b" " + request

    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    server.add_insecure_port(relay.inner_address)
    await server.start()
    await relay.start()
    yield relay
    await server.stop(0)
    await relay.stop()


async def ask(address: str, request: bytes = b"x") -> bytes:
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        answer: bytes = await channel.unary_unary("/test/Ask")(request, timeout=20)
        return answer


async def test_the_user_arrives(relay: AdminSocket, folder: Path) -> None:
    address = f"unix:{folder / 'admin.sock'}"
    answers = await asyncio.gather(*(ask(address) for _ in range(8)))
    assert set(answers) == {f"{os.geteuid()} x".encode()}


async def test_large_messages_pass(relay: AdminSocket, folder: Path) -> None:
    request = os.urandom(5 << 20)
    answer = await ask(f"unix:{folder / 'admin.sock'}", request)
    assert answer.endswith(request)


async def test_only_its_owner_can_open_it(relay: AdminSocket, folder: Path) -> None:
    assert stat.S_IMODE((folder / "admin.sock").stat().st_mode) == 0o600
    inner = Path(relay.inner_address.removeprefix("unix:"))
    assert stat.S_IMODE(inner.parent.stat().st_mode) == 0o700


async def test_strangers_are_refused_and_audited(relay: AdminSocket, folder: Path) -> None:
    relay._users = frozenset({os.geteuid() + 1})
    with structlog.testing.capture_logs() as lines, pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(f"unix:{folder / 'admin.sock'}")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert lines[0]["actor"] == f"local:{os.geteuid()}"
    assert (lines[0]["action"], lines[0]["outcome"]) == ("Connect", "refused")


async def test_nobody_gets_past_the_relay(relay: AdminSocket) -> None:
    """A process of the same user may reach the inner socket; without the relay's name it is nobody."""
    with pytest.raises(grpc.aio.AioRpcError, match="past the administrators' socket"):
        await ask(relay.inner_address)


async def test_a_dead_daemons_socket_is_replaced_and_a_closed_one_removed(folder: Path) -> None:
    path = folder / "sub" / "admin.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    first = AdminSocket(path)
    await first.start()
    path.unlink()
    second = AdminSocket(path, users=[12345])
    await second.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    await first.stop()
    assert path.is_socket()
    await second.stop()
    assert not path.exists()


async def test_a_living_daemons_socket_is_not_taken(relay: AdminSocket, folder: Path) -> None:
    """V1: two daemons with sockets in one folder; the first one's administrators still reach it."""
    second = AdminSocket(folder / "admin.sock")
    with pytest.raises(ConfigError, match=r"admin\.sock: another process answers there"):
        await second.start()
    await second.stop()
    assert await ask(f"unix:{folder / 'admin.sock'}") == f"{os.geteuid()} x".encode()


async def test_a_place_that_cant_be_had(folder: Path) -> None:
    (folder / "file").write_text("")
    relay = AdminSocket(folder / "file" / "admin.sock")
    with pytest.raises(ConfigError, match="admin_socket"):
        await relay.start()
    await relay.stop()


@pytest.mark.parametrize("peer", ["unix:", "ipv4:127.0.0.1:1", "unix:/tmp/x/root.1.1", "", "ipv4:0.1"])
def test_names_that_are_no_users(peer: str) -> None:
    with pytest.raises(UnauthenticatedError):
        user_of_peer(peer)


def test_users_by_name_and_number() -> None:
    assert user_ids(["root", "4711"]) == {0, 4711}
    with pytest.raises(ConfigError, match="no user 'nobody-knows'"):
        user_ids(["nobody-knows"])


async def test_a_gateway_is_no_administrator() -> None:
    """Whoever a gateway calls for would be one: the socket asks for no credentials."""
    context = SimpleNamespace(invocation_metadata=lambda: (("batond-gateway", "1"),), peer=lambda: "unix:")
    administrators = LocalAdministrators(SlaClasses())
    with pytest.raises(PermissionDeniedError, match="another address"):
        by_user(administrators)(context)
