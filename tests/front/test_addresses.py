"""Addresses are held before the model is loaded, until the servers take them."""

from __future__ import annotations

import fcntl
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.errors import ConfigError
from batond.daemon.front.addresses import HeldAddresses
from batond.daemon.front.server import build_admin_server
from batond.v1 import admin_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def free() -> str:
    """An address that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_any_port_and_a_new_path_leave_nothing_behind(tmp_path: Path) -> None:
    addresses = ["127.0.0.1:0", "[::1]:0", "localhost:0", f"unix:{tmp_path}/folder/none.sock"]
    with closing(HeldAddresses(addresses)):
        assert not (tmp_path / "folder" / "none.sock").exists()
    assert not list((tmp_path / "folder").iterdir())


def test_a_claim_of_a_daemon_that_died_is_no_obstacle(tmp_path: Path) -> None:
    """V1: its lock ended with it, whatever it left behind."""
    (tmp_path / "batond.sock.lock").touch()
    HeldAddresses([f"unix:{tmp_path}/batond.sock"]).close()
    assert not list(tmp_path.iterdir())


def test_a_claim_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / "batond.sock.lock").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="can't listen on unix:"):
        HeldAddresses([f"unix:{tmp_path}/batond.sock"])
    assert (tmp_path / "other").read_text() == "kept"


def test_who_was_locked_out_by_a_claim_that_ends_claims_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two daemons could hold locks of two files of one name."""
    address = f"unix:{tmp_path}/batond.sock"
    first = HeldAddresses([address])
    lock = fcntl.flock

    def ended_meanwhile(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.close()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", ended_meanwhile)
    with (
        closing(HeldAddresses([address])),
        pytest.raises(ConfigError, match="another daemon is starting"),
    ):
        HeldAddresses([address])


def test_a_taken_port_is_named() -> None:
    """V1: within the first second, not after minutes of loading."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"can't listen on {address}.*in use.*is it taken"):
            HeldAddresses([address])
    HeldAddresses([address]).close()


@pytest.mark.parametrize("second", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_of_two_daemons_that_start_together_one_is_told(free: str, second: str) -> None:
    """V1: neither listens yet; the second one of the port, or of all the host's, need not load its model."""
    port = free.rpartition(":")[2]
    with closing(HeldAddresses([free])), pytest.raises(ConfigError, match=f"{second}:{port}.*is it taken"):
        HeldAddresses([f"{second}:{port}"])
    HeldAddresses([f"{second}:{port}"]).close()


def test_who_connects_to_a_held_port_is_refused_at_once(free: str) -> None:
    """A client that waits for the daemon to start tries again; it does not hang in a queue nobody empties."""
    host, _, port = free.rpartition(":")
    with closing(HeldAddresses([free])), pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5.0)


def test_a_port_of_a_former_run_is_no_obstacle(free: str) -> None:
    """The side that closes first keeps the address for a minute."""
    host, _, port = free.rpartition(":")
    with (
        socket.create_server((host, int(port))) as server,
        socket.create_connection((host, int(port))) as client,
    ):
        accepted, _ = server.accept()
        accepted.close()
        assert client.recv(1) == b""
    HeldAddresses([free]).close()


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1:80"):
        HeldAddresses(["192.0.2.1:80"])


def test_a_living_daemons_socket_is_not_taken(tmp_path: Path) -> None:
    """V1: but one that was left by a daemon that died is no obstacle."""
    path = tmp_path / "batond.sock"
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(path))
        daemon.listen()
        with pytest.raises(ConfigError, match="another process answers"):
            HeldAddresses([f"unix:{path}"])
    assert path.is_socket()
    HeldAddresses([f"unix:{path}"]).close()


def test_a_path_is_claimed_before_there_is_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V1: and for as long as the daemon lives, by whatever name."""
    monkeypatch.chdir(tmp_path)
    with closing(HeldAddresses([f"unix:{tmp_path}/batond.sock"])) as first:
        first.free_ports()
        with pytest.raises(ConfigError, match="another daemon is starting"):
            HeldAddresses(["unix:batond.sock"])
    HeldAddresses(["unix:batond.sock"]).close()


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Path]:
    """A socket somebody answers on."""
    path = tmp_path / "batond.sock"
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(path))
        daemon.listen()
        yield path


async def test_the_server_itself_takes_no_living_socket(living: Path) -> None:
    """A daemon that came in between would be heard no more."""
    servicer: Any = admin_pb2_grpc.AdminServiceServicer()  # Never called.
    with pytest.raises(ConfigError, match="another process answers"):
        build_admin_server(servicer, f"unix:{living}", 1 << 20)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(living))
