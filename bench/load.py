"""How much queue and front carry, each held against the bare thing in the same run.

`python -m batond.bench load`. The engine is `fake_engine.py`, which computes nothing. On a machine that does
other things too, seconds are worth little; ratios within the run and CPU times are what counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from batond.bench import load_front
from batond.bench.load_queue import QueueBench
from batond.daemon.queue import EmbeddedRedis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from batond.bench.load_front import StreamDelays, SubmitRate
    from batond.bench.load_queue import QueueRate

PACKAGES: Final = ("grpcio", "protobuf", "redis", "hiredis", "msgspec", "uvloop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes.

    Attributes:
        jobs: Jobs of each kind of work of the queue.
        window: Jobs a claim, and a pipeline.
        waiting: Jobs submitted over gRPC that nobody runs.
        at_once: Submits under way at any time.
        rounds: Turns of each measurement and its floor.
        streams: Open at once.
        rows: Of the batch, each in turn; as many streams get a token a step, the others wait.
        tokens_per_s: Of all streams together.
        window_s: How long tokens are timed.
    """

    jobs: int = 12_000
    window: int = 60
    waiting: int = 20_000
    at_once: int = 64
    rounds: int = 4
    streams: int = 1000
    rows: tuple[int, ...] = (1000, 250)
    tokens_per_s: int = 5000
    window_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Everything that was measured.

    Attributes:
        options: Sizes.
        queue: A kind of work each.
        submits: Over gRPC.
        streams: For each number of rows the bare server's and the daemon's.
    """

    options: Options
    queue: list[QueueRate]
    submits: SubmitRate
    streams: list[StreamDelays]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": machine(),
            "options": asdict(self.options),
            "queue": [one.as_dict() for one in self.queue],
            "submits": self.submits.as_dict(),
            "streams": [one.as_dict() for one in self.streams],
        }


def machine() -> dict[str, str]:
    """On what it ran."""
    found = {"python": platform.python_version(), "cores": str(len(os.sched_getaffinity(0)))}
    found["load"] = f"{os.getloadavg()[0]:.1f}"
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def run(options: Options, tell: Callable[[str], None]) -> LoadReport:
    """Measure everything, one after the other.

    Args:
        options: Sizes.
        tell: Hears what is being done.
    """
    with tempfile.TemporaryDirectory(prefix="bl-") as name:
        folder = Path(name)
        queue = _queue(folder / "queue", options, tell)
        submits = load_front.submits(
            folder,
            jobs=options.waiting,
            warm_up=max(options.at_once, options.waiting // 20),
            at_once=options.at_once,
            rounds=options.rounds,
            tell=tell,
        )
        streams = [
            delays
            for rows in options.rows
            for delays in load_front.streams(
                folder,
                count=options.streams,
                rows=rows,
                step_s=min(rows, options.streams) / options.tokens_per_s,
                window_s=options.window_s,
                tell=tell,
            )
        ]
    return LoadReport(options=options, queue=queue, submits=submits, streams=streams)


def _queue(folder: Path, options: Options, tell: Callable[[str], None]) -> list[QueueRate]:
    server = EmbeddedRedis(folder)
    server.start()
    try:
        bench = QueueBench(
            server, window=options.window, round_jobs=options.jobs // options.rounds, rounds=options.rounds
        )
        return asyncio.run(bench.run(tell))
    finally:
        server.stop()


def show(console: Console, report: LoadReport) -> None:
    """Print the tables."""
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    console.print(_queue_table(report.queue))
    console.print(_submit_table(report.submits))
    console.print(_stream_table(report.streams))


def _queue_table(rates: Sequence[QueueRate]) -> Table:
    table = _table(
        "Queue scripts against the same writes in a bare pipeline; CPU time in us a job",
        (
            "work",
            "jobs/s",
            "bare, jobs/s",
            "ratio",
            "Redis",
            "bare Redis",
            "client",
            "commands",
            "jobs/s a Redis core",
        ),
    )
    for one in rates:
        table.add_row(
            one.work,
            f"{one.per_s:,.0f}",
            f"{one.bare_per_s:,.0f}",
            f"{one.ratio:.2f}",
            f"{one.redis_us:.0f}",
            f"{one.bare_redis_us:.0f}",
            f"{one.client_us:.0f}",
            f"{one.commands:.1f}",
            f"{one.redis_per_s:,.0f}",
        )
    return table


def _submit_table(rate: SubmitRate) -> Table:
    table = _table("SubmitJob over gRPC; CPU time in us a call", ("what", "figure"))
    rows = {
        "accepted a second": f"{rate.per_s:,.0f}",
        "bare server, a second": f"{rate.bare_per_s:,.0f}",
        "ratio": f"{rate.ratio:.2f}",
        "time of a call, p50 and p99": f"{rate.p50_ms:.1f} ms, {rate.p99_ms:.1f} ms",
        **{f"CPU time, {name}": f"{value:.0f}" for name, value in rate.cpu_us.items()},
        "CPU time, bare server": f"{rate.bare_cpu_us:.0f}",
        "jobs waiting at the end": f"{rate.jobs:,}",
        "front, bytes a waiting job": f"{rate.front_bytes:,.0f}",
        "front, MB at the end": f"{rate.front_rss_bytes / 1e6:.0f}",
        "Redis, bytes a waiting job": f"{rate.redis_bytes:,.0f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _stream_table(delays: Sequence[StreamDelays]) -> Table:
    table = _table(
        "Tokens from engine to caller; CPU time in ms a thousand tokens",
        (
            "server",
            "streams",
            "rows",
            "step, s",
            "tokens/s",
            "p50, ms",
            "p99, ms",
            "max, ms",
            "CPU",
            "broken",
        ),
    )
    for one in delays:
        table.add_row(
            one.server,
            f"{one.streams:,}",
            f"{one.rows:,}",
            f"{one.step_s:g}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.p50_ms:.1f}",
            f"{one.p99_ms:.1f}",
            f"{one.max_ms:.1f}",
            ", ".join(f"{name} {value:.0f}" for name, value in one.cpu_ms.items()),
            f"{one.broken}",
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    return table


def write(path: Path, report: LoadReport) -> None:
    """Write everything as JSON."""
    path.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
