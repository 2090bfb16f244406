"""Real Redis servers on loopback: one, a primary behind Sentinels, a Cluster. They can be killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, Final, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from batond.daemon.queue.embedded import find_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

HOST: Final = "127.0.0.1"
SERVICE: Final = "jobs"
SLOTS: Final = 16384
WAIT_S: Final = 60.0
POLL_S: Final = 0.02
#: A node of a Cluster listens on its port and on this one above it.
BUS_OFFSET: Final = 10_000
#: Low, so that failovers take a second or two; a real one has seconds here.
DOWN_AFTER_MS: Final = 500


def await_true(what: str, check: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
    """Waits until a check holds; a server that does not answer yet means no.

    Raises:
        TimeoutError: It did not come to hold.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(redis.RedisError, OSError):
            if check():
                return
        time.sleep(POLL_S)
    raise TimeoutError(f"{what}: not within {timeout_s:g} s")


def free_port() -> int:
    """A port that is free, and whose bus port is."""
    while True:
        port = random.randint(20_000, 45_000)  # noqa: S311 - no secret
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind((HOST, port))
            other.bind((HOST, port + BUS_OFFSET))
            return port


class RedisServer:
    """One server process.

    Args:
        folder: Of its own; made if missing.
        options: Of its configuration; a server without an append-only file and without eviction by default.
        lines: Lines of a Sentinel's configuration; makes it one.
        binary: None searches as the daemon does.
    """

    def __init__(
        self,
        folder: Path,
        options: dict[str, str] | None = None,
        *,
        lines: Sequence[str] = (),
        binary: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._folder = folder
        self._binary = binary or find_server()
        settings = {
            "port": str(self.port),
            "bind": HOST,
            "dir": str(folder),
            "logfile": str(folder / "log"),
            "daemonize": "no",
        }
        if not lines:
            settings |= {"save": '""', "appendonly": "no", "repl-diskless-sync-delay": "0"}
        self._sentinel = bool(lines)
        self._file = folder / "server.conf"
        text = [f"{name} {value}" for name, value in (settings | (options or {})).items()]
        self._file.write_text("\n".join([*text, *lines, ""]), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{HOST}:{self.port}"

    def client(self, **options: Any) -> redis.Redis:
        """A client of this very server, that does not try again."""
        return redis.Redis(
            host=HOST, port=self.port, socket_timeout=5, retry=Retry(NoBackoff(), 0), **options
        )

    def ask(self, *words: str) -> Any:
        """Sends one command; replies as the server gives them."""
        with self.client() as client:
            return cast("Any", client).execute_command(*words)

    def info(self, section: str) -> dict[str, Any]:
        """Gives a part of INFO."""
        with self.client() as client:
            return dict(cast("Any", client).info(section))

    @property
    def runs(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it, if it does not run, and waits until it answers."""
        if self.runs:
            return
        extra = ["--sentinel"] if self._sentinel else []
        self._process = subprocess.Popen(  # noqa: S603 - our own binary, our own file
            [str(self._binary), str(self._file), *extra],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        await_true(f"{self.address} answers", lambda: bool(self.ask("PING")))

    def kill(self) -> None:
        """SIGKILL; does nothing if it does not run."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Any:
        """Stops it meanwhile as SIGSTOP does: connections stay, nothing is answered."""
        assert self._process is not None  # noqa: S101 - started in __init__
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


class Sentinels:
    """A primary, its replicas and three Sentinels."""

    def __init__(self, folder: Path, *, replicas: int = 2, options: dict[str, str] | None = None) -> None:
        self.service = SERVICE
        self.servers = [RedisServer(folder / "0", options)]
        first = self.servers[0]
        for number in range(1, replicas + 1):
            follow = {"replicaof": f"{HOST} {first.port}"}
            self.servers.append(RedisServer(folder / str(number), (options or {}) | follow))
        self._await_replicas()
        lines = [
            f"sentinel monitor {SERVICE} {HOST} {first.port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 3000",
        ]
        self.sentinels = [RedisServer(folder / f"s{number}", lines=lines) for number in range(3)]
        for sentinel in self.sentinels:
            await_true("Sentinels know all", lambda one=sentinel: self._complete(one))  # type: ignore[misc]

    @property
    def nodes(self) -> list[str]:
        """Addresses of the Sentinels."""
        return [sentinel.address for sentinel in self.sentinels]

    @property
    def primary(self) -> RedisServer:
        """The one that the Sentinels agree on."""
        found: list[RedisServer] = []

        def agreed() -> bool:
            named = {
                int(one.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1]) for one in self.sentinels
            }
            found[:] = [server for server in self.servers if {server.port} == named]
            return bool(found) and found[0].info("replication")["role"] == "master"

        await_true("the Sentinels agree", agreed)
        return found[0]

    def replicas_of(self, primary: RedisServer) -> list[RedisServer]:
        """All servers but the primary."""
        return [server for server in self.servers if server is not primary]

    def fail_over(self) -> RedisServer:
        """Kills the primary; gives the new one."""
        old = self.primary
        old.kill()
        return self.await_promotion(old)

    def await_promotion(self, old: RedisServer) -> RedisServer:
        """Waits until another one than this is the primary; gives it."""
        found: list[RedisServer] = []

        def promoted() -> bool:
            found[:] = [self.primary]
            return found[0] is not old

        await_true("a replica is promoted", promoted)
        return found[0]

    def mend(self) -> None:
        """Starts what was killed, and waits until all are in place again."""
        for sentinel in self.sentinels:
            sentinel.start()
        primary = self.primary
        for server in self.servers:
            if server is not primary:
                server.start()
                # The Sentinels would do it, but look at most every ten seconds. One that ran may follow
                # the old primary, which follows the new one now: a failover would make it begin anew.
                server.ask("REPLICAOF", HOST, str(primary.port))
        self._await_replicas()
        for sentinel in self.sentinels:
            await_true("Sentinels see the replicas", lambda one=sentinel: self._sees_replicas(one))  # type: ignore[misc]

    def stop(self) -> None:
        """Kills all."""
        for server in (*self.sentinels, *self.servers):
            server.kill()

    def _await_replicas(self) -> None:
        def in_sync() -> bool:
            roles = [server.info("replication") for server in self.servers]
            primary: dict[str, Any] = next((one for one in roles if one["role"] == "master"), {})
            links = [one["master_link_status"] for one in roles if one["role"] != "master"]
            return links == ["up"] * (len(self.servers) - 1) and primary.get("connected_slaves") == len(links)

        await_true("replicas are in sync", in_sync)
        # A replica counts for WAIT only after its first acknowledgement, up to a second after its link is up.
        await_true("replicas acknowledge a write", self._acknowledged)

    def _acknowledged(self) -> bool:
        primary = next(server for server in self.servers if server.info("replication")["role"] == "master")
        with primary.client() as client:  # WAIT speaks of what its own connection wrote.
            client.set("acknowledged", 1, px=1)
            return bool(cast("Any", client).wait(len(self.servers) - 1, 1000) == len(self.servers) - 1)

    def _sees_replicas(self, sentinel: RedisServer) -> bool:
        """Whether a Sentinel takes all but the primary for replicas that are up."""
        flags = [_table(one)["flags"] for one in sentinel.ask("SENTINEL", "SLAVES", SERVICE)]
        return flags == ["slave"] * (len(self.servers) - 1)

    def _complete(self, sentinel: RedisServer) -> bool:
        known = _table(sentinel.ask("SENTINEL", "MASTER", SERVICE))
        others, replicas = int(known["num-other-sentinels"]), int(known["num-slaves"])
        return (others, replicas) == (2, len(self.servers) - 1)


class Cluster:
    """A Redis Cluster of three primaries with a replica each."""

    def __init__(self, folder: Path, *, options: dict[str, str] | None = None) -> None:
        given = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(DOWN_AFTER_MS),
            "cluster-config-file": "nodes.conf",
            **(options or {}),
        }
        self.servers = [RedisServer(folder / str(number), given) for number in range(6)]
        bounds = [SLOTS * number // 3 for number in range(4)]
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            server = self.servers[number]
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            server.ask("CLUSTER", "ADDSLOTS", *map(str, range(start, end)))
        for server in self.servers[1:]:
            server.ask("CLUSTER", "MEET", HOST, str(self.servers[0].port))
        await_true("all nodes are known", lambda: all(self._knows_all(one) for one in self.servers))
        for number in range(3):
            name = _word(self.servers[number].ask("CLUSTER", "MYID"))
            self.servers[number + 3].ask("CLUSTER", "REPLICATE", name)
        self._await_whole()

    @property
    def nodes(self) -> list[str]:
        """Addresses of all nodes."""
        return [server.address for server in self.servers]

    @property
    def primaries(self) -> list[RedisServer]:
        """Those that serve slots now."""
        return [server for server in self.servers if server.info("replication")["role"] == "master"]

    def primary_of(self, key: str) -> RedisServer:
        """The node that serves a key's slot."""
        found: list[RedisServer] = []

        def asked() -> bool:
            for server in self.servers:
                with contextlib.suppress(redis.RedisError, OSError):
                    server.ask("EXISTS", key)
                    found[:] = [server]
                    return True
            return False

        await_true("somebody serves the key", asked)
        return found[0]

    def fail_over(self, key: str) -> RedisServer:
        """Kills the primary of a key's slot; gives the new one."""
        old = self.primary_of(key)
        old.kill()
        return self.primary_of(key)

    def replicas_of(self, primary: RedisServer) -> list[RedisServer]:
        """The replica of one of the primaries."""
        ports = {
            int(value["port"])
            for name, value in primary.info("replication").items()
            if name.startswith("slave") and isinstance(value, dict)
        }
        return [server for server in self.servers if server.port in ports]

    def mend(self) -> None:
        """Starts what was killed, and waits until all are in place again."""
        for server in self.servers:
            server.start()
        self._await_whole()

    def stop(self) -> None:
        """Kills all."""
        for server in self.servers:
            server.kill()

    def _knows_all(self, server: RedisServer) -> bool:
        return int(self._cluster_info(server)["cluster_known_nodes"]) == len(self.servers)

    def _await_whole(self) -> None:
        def whole() -> bool:
            roles = [server.info("replication") for server in self.servers]
            linked = [one for one in roles if one["role"] == "slave" and one["master_link_status"] == "up"]
            fine = all(self._cluster_info(one)["cluster_state"] == "ok" for one in self.servers)
            seen = all(self._sees_replicas(one) for one in self.servers)
            return fine and seen and len(linked) == len(self.servers) - 3

        await_true("the Cluster is whole", whole)

    def _sees_replicas(self, server: RedisServer) -> bool:
        """Whether this node knows all replicas as such: that takes a round of gossip."""
        with server.client() as client:
            slots = cast("Any", client).execute_command("CLUSTER", "SLOTS")
        nodes = {int(node[1]) for _, _, *nodes in slots for node in nodes}
        return nodes == {one.port for one in self.servers}

    @staticmethod
    def _cluster_info(server: RedisServer) -> dict[str, str]:
        lines = _word(server.ask("CLUSTER", "INFO")).split("\r\n")
        return dict(line.split(":", 1) for line in lines if ":" in line)


def _word(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _table(flat: Any) -> dict[str, str]:
    """Names and values, as newer protocols and clients give them or one after the other."""
    about = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    return {_word(name): _word(value) for name, value in about.items()}
