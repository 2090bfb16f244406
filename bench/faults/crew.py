"""Daemons that share a queue, and the Redis below it: all may be killed, paused and started again."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import psutil
import redis

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE
from batond.bench.faults.proxy import RedisProxy, script_names
from batond.bench.local_daemon import LocalDaemon
from batond.daemon.queue import EmbeddedRedis
from batond.daemon.queue.calls import load_script
from batond.daemon.queue.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

MODEL: Final = "fake"
TENANTS: Final = ("red", "blue")
WAIT_S: Final = 60.0
STARTS: Final = 3
LOG_CHARS: Final = 1000


class OwnRedis(EmbeddedRedis):
    """A server that can be killed and started again with what it had written."""

    def __init__(self, folder: Path) -> None:
        # Accepted is only what is on disk when the client hears of it: no fsync, no promise.
        super().__init__(folder, fsync="always")

    def start(self) -> None:
        """Start it, and teach it the queue's scripts, so that each call of one is one call."""
        super().start()
        with self.client() as client:
            for name in script_names().values():
                client.script_load(load_script(name).source)

    def client(self) -> redis.Redis:
        """A connection past any proxy, that waits: to turn the clock of 100,000 jobs takes a while."""
        return redis.Redis.from_url(self.url, socket_timeout=2 * WAIT_S)

    def kill(self) -> None:
        """SIGKILL."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def pause(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)


class Daemon(LocalDaemon):
    """A daemon on a fake engine, and what can be done to both."""

    def engine_pid(self) -> int | None:
        """Process of its engine, if there is one."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                if child.status() != psutil.STATUS_ZOMBIE:
                    return child.pid
        return None

    def kill(self) -> None:
        """SIGKILL. Its engine sees the socket close and ends."""
        process = self.process  # Another thread may start the next one meanwhile.
        if process.poll() is None:
            process.kill()
            process.wait()

    def kill_engine(self) -> bool:
        """SIGKILL for its engine; returns whether there was one."""
        return self.signal_engine(signal.SIGKILL)

    def signal_engine(self, number: signal.Signals) -> bool:
        """Send a signal to its engine; returns whether there was one."""
        pid = self.engine_pid()
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def pause(self) -> None:
        """SIGSTOP for the daemon alone: its engine goes on until nobody reads it."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def start(self) -> None:
        """Start it again without waiting for it."""
        self.process = self._start()

    def log_tail(self, lines: int = 40) -> str:
        """The end of its log, without the long lines of the configuration."""
        words = [line for line in self.log.read_text(errors="replace").splitlines() if len(line) < LOG_CHARS]
        return "\n".join(words[-lines:])

    def revive(self) -> None:
        """Start it again if it is dead; again if it is killed meanwhile.

        Raises:
            SystemExit: It does not start.
        """
        for _ in range(STARTS):
            if self.process.poll() is None:
                return
            with contextlib.suppress(SystemExit):
                self.restart()
        if self.process.poll() is not None:
            self.restart()


class Crew:
    """One Redis, a proxy before it, and daemons, most of them through the proxy or none.

    Args:
        folder: A short one: Unix sockets lie in it.
        lease_s: Of claims.
        rows: Of each engine.
        step_s: Time of a step.
        result_ttl_s: How long results are kept.
        max_attempts: As `queue.max_attempts`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lease_s: float = 0.6,
        rows: int = 2,
        step_s: float = 0.002,
        result_ttl_s: int = 600,
        max_attempts: int = 1000,
    ) -> None:
        self.folder = folder
        self.lease_s = lease_s
        self._rows, self._step_s = rows, step_s
        self._queue = {"lease_s": lease_s, "result_ttl_s": result_ttl_s, "max_attempts": max_attempts}
        self._count = itertools.count()
        self.daemons: list[Daemon] = []
        self.keys = Keys(MODEL)
        self.redis = OwnRedis(folder / "r")
        self.redis.start()
        self.proxy = RedisProxy(self.redis.socket_path, folder / "p.sock")
        self.proxy.__enter__()

    def add(
        self,
        *,
        proxied: bool = False,
        environment: Mapping[str, str] | None = None,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        wait: bool = True,
    ) -> Daemon:
        """Start one more daemon of the queue."""
        folder = self.folder / str(next(self._count))
        folder.mkdir()
        given = {name: dict(keys) for name, keys in (sections or {}).items()}
        url = self.proxy.url if proxied else self.redis.url
        given["queue"] = {**self._queue, "url": url, **given.get("queue", {})}
        given["service"] = {"engine_backoff_s": 0.05, "drain_timeout_s": 0.0, **given.get("service", {})}
        daemon = Daemon(
            folder,
            TENANTS,
            model={"path": str(folder), "name": MODEL},
            engine={"rows": self._rows},
            sections=given,
            environment={STEP_VARIABLE: str(self._step_s), **(environment or {})},
            tokens=self.daemons[0].tokens if self.daemons else None,
            program=PROGRAM,
        )
        self.daemons.append(daemon)
        if wait:
            daemon.wait_ready()
        return daemon

    def left_behind(self) -> list[str]:
        """Keys of the model, but for those that never grow: after the time to live there are none."""
        constant = {self.keys.base + ":" + name for name in ("classes", "clock", "totals")}
        with self.redis.client() as client:
            names = {key.decode() for key in client.scan_iter(self.keys.base + ":*", count=1000)}
        return sorted(name for name in names - constant if not self._bounded(name))

    def _bounded(self, name: str) -> bool:
        """Accounts and paces run out by themselves, and are at most one a class."""
        kind = name.removeprefix(self.keys.base + ":").partition(":")[0]
        return kind in {"accounts", "floor", "pace"}

    def close(self) -> None:
        """End everything."""
        self.proxy.lift()
        self.proxy.go_on()
        for daemon in self.daemons:
            children = []
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(daemon.process.pid).children(recursive=True)
            daemon.kill()
            for child in children:  # One that stands still doesn't see that its front is gone.
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.proxy.__exit__()
        self.redis.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def until(holds: Any, what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait until `holds()` is true and give it back.

    Raises:
        TimeoutError: It took too long; `what` says what was waited for.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if found := holds():
            return found
        time.sleep(0.01)
    raise TimeoutError(f"waited {timeout_s:.0f} s in vain: {what}")
