"""The front against a bare gRPC server: submits, memory of waiting jobs, and streams of tokens.

Daemon, Redis, engine, bare server and callers are processes of their own; the same callers call both servers.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psutil
import redis

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STAMPS_VARIABLE, STEP_VARIABLE
from batond.bench.load_client import Result, Task
from batond.bench.load_cpu import Meter, Spent, percentiles, rss_bytes
from batond.bench.local_daemon import LocalDaemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

TENANT: Final = "load"
NEVER_S: Final = 3600.0  # A step so long that no job moves.
MANY_TOKENS: Final = 100_000  # More than a stream gets before it is closed.
START_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRate:
    """SubmitJob from many callers; medians over the rounds.

    Attributes:
        per_s: Accepted a second.
        bare_per_s: Answered a second by the bare server.
        p50_ms: Median time of a call.
        p99_ms: The 99th percentile.
        cpu_us: CPU time a job by process, microseconds.
        bare_cpu_us: CPU time of the bare server a call.
        jobs: Waiting at the end.
        front_bytes: Memory of the front a waiting job.
        redis_bytes: Memory of Redis a waiting job.
        front_rss_bytes: Memory of the front at the end.
    """

    per_s: float
    bare_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: dict[str, float]
    bare_cpu_us: float
    jobs: int
    front_bytes: float
    redis_bytes: float
    front_rss_bytes: int

    @property
    def ratio(self) -> float:
        """Share of the bare rate."""
        return self.per_s / self.bare_per_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDelays:
    """Tokens on their way from the engine to a caller, while all streams were open.

    Attributes:
        server: "daemon" or "bare".
        streams: Open at once.
        rows: Of them get tokens; the others wait.
        step_s: Time between two tokens of a stream.
        window_s: How long all were open.
        tokens_per_s: Received in that time, a second.
        p50_ms: Median of the delay.
        p99_ms: The 99th percentile.
        max_ms: The longest.
        cpu_ms: CPU time a thousand tokens by process, ms.
        tokens: Received in all.
        broken: Streams that did not bring each token once, and an end.
        behind: Tokens that came in one message with an earlier one.
    """

    server: str
    streams: int
    rows: int
    step_s: float
    window_s: float
    tokens_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_ms: dict[str, float]
    tokens: int
    broken: int
    behind: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Process:
    """A client's or a server's process that speaks a line at a time."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
            [sys.executable, "-m", f"batond.bench.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    def hear(self, *words: str) -> str:
        """Its next line, which must be one of these words, if any are given.

        Raises:
            RuntimeError: It said something else, or ended.
        """
        assert self._process.stdout is not None  # noqa: S101 - for type checkers: it is a pipe
        line = self._process.stdout.readline().strip()
        if not line or (words and line not in words):
            raise RuntimeError(
                f"a process of the measurement said {line!r}, not one of {words or 'its result'}"
            )
        return line

    def go(self) -> None:
        """Send the word for which it waits."""
        assert self._process.stdin is not None  # noqa: S101 - for type checkers: it is a pipe
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def _process(module: str, *arguments: str) -> Iterator[Process]:
    process = Process(module, *arguments)
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def daemon_on(folder: Path, *, rows: int, step_s: float) -> Iterator[LocalDaemon]:
    """A daemon on the engine that computes nothing, whose tokens tell when they left it."""
    folder.mkdir()
    daemon = LocalDaemon(
        folder,
        [TENANT],
        model={"path": str(folder), "name": "fake"},
        engine={"rows": rows},
        sections={
            "queue": {"max_queued": 10_000_000},
            "service": {"frozen_after_s": 2 * NEVER_S, "drain_timeout_s": 0},
        },
        environment={STEP_VARIABLE: str(step_s), STAMPS_VARIABLE: "1"},
        program=PROGRAM,
    )
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.stop()


@contextlib.contextmanager
def _bare(folder: Path, rows: int, step_s: float) -> Iterator[Process]:
    socket = folder / "echo.sock"
    with _process("load_echo", str(socket), str(rows), str(step_s)) as server:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not socket.exists():
            if time.monotonic() > deadline_s:
                raise RuntimeError("the bare server did not start")
            time.sleep(POLL_S)
        yield server
    socket.unlink(missing_ok=True)


def call(task: Task, pids: Mapping[str, int]) -> tuple[Result, Spent]:
    """Let callers do their task.

    Args:
        task: What they do.
        pids: Processes whose CPU time is taken, beside that of the callers.

    Returns:
        What came of it, and what was spent: over all of it, or while all streams were open.
    """
    with _process("load_client", msgspec.json.encode(task).decode()) as client:
        client.hear("ready")
        meter = Meter({**pids, "callers": client.pid})
        client.go()
        if task.max_tokens:
            # Short streams may end before the last has begun: then there is nothing to measure.
            if client.hear("steady", "ending") == "steady":
                meter.lap()
                client.hear("ending")
            spent = meter.lap()
            result = msgspec.json.decode(client.hear(), type=Result)
        else:
            result = msgspec.json.decode(client.hear(), type=Result)
            spent = meter.lap()
    return result, spent


def _pids(daemon: LocalDaemon) -> dict[str, int]:
    """The daemon's processes by what they do."""
    found = {"front": daemon.process.pid}
    for child in psutil.Process(daemon.process.pid).children():
        found["redis" if "redis" in child.name() or "valkey" in child.name() else "engine"] = child.pid
    return found


def submits(
    folder: Path, *, jobs: int, warm_up: int, at_once: int, rounds: int, tell: Callable[[str], None]
) -> SubmitRate:
    """Submit jobs that nobody runs, in rounds, the bare server in between.

    Args:
        folder: For sockets and the queue.
        jobs: In all.
        warm_up: Jobs before, which are not counted.
        at_once: Calls under way at any time.
        rounds: Of the daemon and the bare server each.
        tell: Hears what is being done.
    """
    a_round = jobs // rounds
    with daemon_on(folder / "submits", rows=1, step_s=NEVER_S) as daemon, _bare(folder, 1, NEVER_S) as bare:
        pids = _pids(daemon)
        target, echo = f"unix:{daemon.socket}", f"unix:{folder / 'echo.sock'}"
        token = daemon.tokens[TENANT]
        tell("submits over gRPC: warming up")
        for name in (target, echo):
            call(Task(target=name, token=token, prefix="warm", calls=warm_up, at_once=at_once), {})
        before = _memory(daemon, pids)
        done: list[tuple[Result, Spent]] = []
        floor: list[tuple[Result, Spent]] = []
        for number in range(rounds):
            tell(f"submits over gRPC: {number + 1} of {rounds}")
            task = Task(target=target, token=token, prefix=f"r{number}", calls=a_round, at_once=at_once)
            done.append(call(task, pids))
            floor.append(call(msgspec.structs.replace(task, target=echo), {"bare": bare.pid}))
        after = _memory(daemon, pids)
    latencies_ms = [one for result, _ in done for one in result.latencies_ms]
    p50_ms, p99_ms, _ = percentiles(latencies_ms)
    return SubmitRate(
        per_s=a_round / statistics.median(result.wall_s for result, _ in done),
        bare_per_s=a_round / statistics.median(result.wall_s for result, _ in floor),
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        cpu_us={
            name: statistics.median(spent.cpu_s[name] for _, spent in done) / a_round * 1e6
            for name in done[0][1].cpu_s
        },
        bare_cpu_us=statistics.median(spent.cpu_s["bare"] for _, spent in floor) / a_round * 1e6,
        jobs=a_round * rounds,
        front_bytes=(after[0] - before[0]) / (a_round * rounds),
        redis_bytes=(after[1] - before[1]) / (a_round * rounds),
        front_rss_bytes=after[0],
    )


def _memory(daemon: LocalDaemon, pids: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of the front, and of the data in Redis."""
    socket = next((daemon.folder / "redis").rglob("redis.sock"))
    with redis.Redis(unix_socket_path=str(socket)) as client:
        used = int(client.info("memory")["used_memory"])
    return rss_bytes(pids["front"]), used


def streams(
    folder: Path, *, count: int, rows: int, step_s: float, window_s: float, tell: Callable[[str], None]
) -> list[StreamDelays]:
    """Open streams of which as many as there are rows get a token a step: at the bare server, at the daemon.

    Args:
        folder: For sockets and the queue.
        count: Streams.
        rows: Of the batch; streams beyond them wait.
        step_s: Time of a step.
        window_s: How long all are open.
        tell: Hears what is being done.
    """
    task = Task(
        target="",
        token="",
        prefix="s",
        calls=count,
        rows=min(rows, count),
        max_tokens=MANY_TOKENS,
        window_s=window_s,
    )
    shape = f"{count} streams, {rows} rows"
    tell(f"{shape}: the bare server")
    with _bare(folder, rows, step_s) as bare:
        target = f"unix:{folder / 'echo.sock'}"
        floor = call(msgspec.structs.replace(task, target=target), {"bare": bare.pid})
    tell(f"{shape}: the daemon")
    with daemon_on(folder / f"streams-{rows}", rows=rows, step_s=step_s) as daemon:
        task = msgspec.structs.replace(task, target=f"unix:{daemon.socket}", token=daemon.tokens[TENANT])
        done = call(task, _pids(daemon))
    return [_delays("bare", step_s, task, *floor), _delays("daemon", step_s, task, *done)]


def _delays(server: str, step_s: float, task: Task, result: Result, spent: Spent) -> StreamDelays:
    p50_ms, p99_ms, max_ms = percentiles(result.delays_ms)
    measured = len(result.delays_ms)
    return StreamDelays(
        server=server,
        streams=task.calls,
        rows=task.rows,
        step_s=step_s,
        window_s=spent.wall_s,
        tokens_per_s=measured / spent.wall_s if spent.wall_s else 0.0,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        max_ms=max_ms,
        cpu_ms={name: cpu_s / max(1, measured) * 1e6 for name, cpu_s in spent.cpu_s.items()},
        tokens=result.tokens,
        broken=result.broken,
        behind=result.behind,
    )
