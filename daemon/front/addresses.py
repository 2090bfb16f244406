"""Holds the daemon's addresses from its first second on: gRPC takes them minutes later, once it is loaded."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batond.daemon.config_base import split_address
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_ANSWER_S: Final = 1.0


class HeldAddresses:
    """Addresses that nobody else gets while the model is loaded; nobody is answered there either.

    A port is bound, without listening: who connects is refused. Of a Unix socket the path is claimed by a
    locked file beside it: the socket itself must not be there before somebody answers.

    Args:
        addresses: `host:port` or `unix:/path`.

    Raises:
        ConfigError: One is taken, is none of this host's, or is named twice.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._ports: list[socket.socket] = []
        self._claims: list[_Claim] = []
        for address in addresses:
            try:
                if address.startswith("unix:"):
                    self._claim(Path(address.removeprefix("unix:")))
                else:
                    self._bind(*split_address(address))
            except OSError as error:
                self.close()
                raise ConfigError(
                    f"can't listen on {address}: {error}; is it taken?", address=address
                ) from error

    def free_ports(self) -> None:
        """Let gRPC take the ports, now; a path stays claimed."""
        while self._ports:
            self._ports.pop().close()

    def close(self) -> None:
        """Give all of them free."""
        self.free_ports()
        while self._claims:
            self._claims.pop().close()

    def _bind(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in dict.fromkeys(found):
            held = socket.socket(family, kind, protocol)
            self._ports.append(held)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                held.bind(place)
            except OSError:
                # Connections of a former run may linger. A daemon that starts now holds the port without
                # this, and fails it again; where two find lingering ones, gRPC still finds the clash.
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind(place)

    def _claim(self, path: Path) -> None:
        if answers(path):
            raise OSError("another process answers there")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._claims.append(_Claim(path.with_name(f"{path.name}.lock")))


class _Claim:
    """A lock on a file beside a socket: who may not write to the folder can't hold it, and it ends with us.

    Raises:
        OSError: Somebody holds it, or the file can't be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        while True:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._file)
                raise OSError("another daemon is starting there") from error
            if self._is_there():
                return
            os.close(self._file)  # Its holder removed it before we had the lock.

    def close(self) -> None:
        """Give it up; nothing is left behind."""
        if self._is_there():
            self._path.unlink()
        os.close(self._file)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self._path.lstat())
        except FileNotFoundError:
            return False


def answers(path: Path) -> bool:
    """Whether somebody accepts connections on a Unix socket; one that a dead daemon left is none."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
