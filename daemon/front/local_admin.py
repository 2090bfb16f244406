"""The local administrators' socket: who connects is known from the kernel, not from a token.

gRPC does not show SO_PEERCRED to Python. So a relay accepts the connections, asks the kernel who connects,
refuses everybody but administrators, and passes the bytes on to a server of their own behind a second socket:

    batonctl ── admin.sock ── relay: SO_PEERCRED ── <private folder>/grpc.sock ── gRPC
                                  bound to <private folder>/<uid>.<pid>.<number>

The relay's end is bound to a name with the user id in it, which gRPC gives back as `context.peer()`. The
folder can be entered by the daemon's own user alone, so nobody else reaches the second socket with a name of
their making.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pwd
import shutil
import socket
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import ConfigError, UnauthenticatedError
from batond.daemon.front import audit
from batond.daemon.front.addresses import answers

if TYPE_CHECKING:
    from collections.abc import Iterable

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
_READ_BYTES: Final = 1 << 16
_OWNER_ONLY: Final = 0o600
#: With further users the folder says who gets to the socket, and the kernel who may use it.
_EVERYBODY: Final = 0o666


class AdminSocket:
    """The relay.

    Args:
        path: Where administrators connect.
        users: User ids that may, beside root and the daemon's own.

    Attributes:
        inner_address: Where the administrators' gRPC server listens.
    """

    def __init__(self, path: Path, users: Iterable[int] = ()) -> None:
        self._path = path
        named = frozenset(users)
        self._users = named | {0, os.geteuid()}
        self._mode = _EVERYBODY if named else _OWNER_ONLY
        self._folder = Path(tempfile.mkdtemp(prefix="batond-"))  # Mode 0700.
        self._numbers = itertools.count()
        self._inode = -1
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self.inner_address = f"unix:{self._folder / 'grpc.sock'}"

    async def start(self) -> None:
        """Accept connections, once the inner server listens.

        A socket that a dead daemon left is replaced; `HeldAddresses` keeps others from doing so meanwhile.

        Raises:
            ConfigError: The path can't be used, or somebody answers there.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _check_left(self._path)
            if self._path.is_socket():
                self._path.unlink()
            self._server = await asyncio.start_unix_server(self._accept, self._path)
            self._path.chmod(self._mode)
            self._inode = self._path.stat().st_ino
        except OSError as error:
            raise ConfigError(f"can't listen on server.admin_socket {self._path}: {error}") from error

    async def stop(self) -> None:
        """Close all connections and remove both sockets."""
        if self._server is not None:
            self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # Not that of a daemon that came after this one.
                self._path.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)
        pid, uid = _peer(writer)
        try:
            if uid in self._users:
                await self._relay(reader, writer, f"{uid}.{pid}.{next(self._numbers)}")
            else:
                audit.record("Connect", actor=f"local:{uid}", outcome="refused", reason="NOT_ADMIN")
        except OSError:
            return  # One of both ends went away.
        finally:
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound = self._folder / name
        try:
            inner.setblocking(False)  # noqa: FBT003 - the name says it
            inner.bind(str(bound))
            await asyncio.get_running_loop().sock_connect(inner, self.inner_address.removeprefix("unix:"))
            inner_reader, inner_writer = await asyncio.open_unix_connection(sock=inner)
        except OSError:
            inner.close()
            raise
        finally:
            # gRPC asks for the name when it accepts, from the kernel; the file is not needed for it.
            bound.unlink(missing_ok=True)
        ways = [
            asyncio.ensure_future(_pump(reader, inner_writer)),
            asyncio.ensure_future(_pump(inner_reader, writer)),
        ]
        try:
            # HTTP/2 has no use for half a connection: one end is the end of both.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            inner_writer.close()


def _check_left(path: Path) -> None:
    """Refuse to take the place of a living daemon.

    Raises:
        OSError: Somebody answers there.
    """
    if answers(path):
        raise OSError("another process answers there")


def user_of_peer(peer: str) -> int:
    """The user id in the name the relay bound its end to, as gRPC gives it.

    Raises:
        UnauthenticatedError: The connection did not come through the relay.
    """
    first = Path(peer.removeprefix("unix:")).name.split(".")[0]
    if not peer.startswith("unix:") or not first.isdecimal():
        raise UnauthenticatedError("this call came past the administrators' socket", reason="NO_CREDENTIALS")
    return int(first)


def user_ids(names: Iterable[str]) -> frozenset[int]:
    """User ids of users given by name or number.

    Raises:
        ConfigError: This host does not know one.
    """
    found = set()
    for name in names:
        if name.isdecimal():
            found.add(int(name))
            continue
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError as error:
            raise ConfigError(f"server.admin_users: there is no user {name!r} on this host") from error
    return frozenset(found)


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Process and user id of who connected, as of then."""
    connection = writer.get_extra_info("socket")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
