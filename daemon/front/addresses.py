"""Whether addresses can be listened on: asked before the model is loaded, minutes before gRPC asks."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batond.daemon.config_base import split_address
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_ANSWER_S: Final = 1.0


def check_addresses(addresses: Iterable[str]) -> None:
    """Bind each address for a moment, as gRPC will; of a Unix socket, ask whether somebody answers there.

    Raises:
        ConfigError: One is taken, or is none of this host's.
    """
    for address in addresses:
        try:
            if address.startswith("unix:"):
                _check_unix(Path(address.removeprefix("unix:")))
            else:
                _check_tcp(*split_address(address))
        except OSError as error:
            raise ConfigError(f"can't listen on {address}: {error}", address=address) from error


def _check_tcp(host: str, port: int) -> None:
    for family, kind, protocol, _, place in socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # Connections of a former run may linger.
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(place)


def _check_unix(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect(str(path))
        except OSError:
            return  # Left by a daemon that died; it will be removed.
    raise OSError("another process answers there")
