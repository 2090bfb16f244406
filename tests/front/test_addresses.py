"""Addresses are tried before the model is loaded."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ConfigError
from batond.daemon.front.addresses import check_addresses

if TYPE_CHECKING:
    from pathlib import Path


def test_free_addresses_stay_free(tmp_path: Path) -> None:
    check_addresses(["127.0.0.1:0", "[::1]:0", "localhost:0", f"unix:{tmp_path}/none.sock"])
    assert not list(tmp_path.iterdir())


def test_a_taken_port_is_named() -> None:
    """V1: within the first second, not after minutes of loading."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"can't listen on {address}.*in use"):
            check_addresses([address])
    check_addresses([address])


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1:80"):
        check_addresses(["192.0.2.1:80"])


def test_a_living_daemons_socket_is_not_taken(tmp_path: Path) -> None:
    """V1: but one that was left by a daemon that died is no obstacle."""
    path = tmp_path / "batond.sock"
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(path))
        daemon.listen()
        with pytest.raises(ConfigError, match="another process answers"):
            check_addresses([f"unix:{path}"])
    assert path.is_socket()
    check_addresses([f"unix:{path}"])
