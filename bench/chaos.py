"""The chaos soak: daemons, engines and Redis die while jobs run, and at the end everything must add up.

What is promised, and counted: an accepted job finishes; a watcher, whatever daemons it went to, got each
token once; every output equals that of an undisturbed run; after the time to live Redis remembers nothing.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batond.bench.faults.clock import advance
from batond.bench.faults.crew import TENANTS, Crew, until
from batond.bench.faults.crowd import Crowd, draw_jobs
from batond.bench.faults.havoc import Havoc
from batond.clients import convert
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.bench.faults.work import Job

CALM_PART: Final = 0.15  # Of the duration: no more jobs come, faults go on.
LOAD: Final = 0.6  # Of what the crew could do undisturbed.
RESULT_TTL_S: Final = 24 * 3600
PROGRESS_S: Final = 10.0
SETTLE_S: Final = 180.0
SHOWN: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to do to whom.

    Attributes:
        duration_s: Time in which things happen.
        jobs: Submitted over it.
        daemons: How many share the queue.
        rows: Of each.
        step_s: Time of an engine's step.
        lease_s: Of claims.
        every_s: Mean time between two faults.
        watched: Part of the jobs that are watched.
        seed: Of jobs and faults.
    """

    duration_s: float = 600.0
    jobs: int = 2000
    daemons: int = 4
    rows: int = 4
    step_s: float = 0.02
    lease_s: float = 2.0
    every_s: float = 3.0
    watched: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what can't be run.

        Raises:
            ConfigError: An option has no meaning.
        """
        if min(self.duration_s, self.jobs, self.daemons, self.rows, self.step_s, self.every_s) <= 0:
            raise ConfigError("duration, jobs, daemons, rows, step and every must be above 0")

    @property
    def mean_tokens(self) -> float:
        """Of a job, so that the crew has enough to do and no more than it can."""
        tokens = LOAD * self.daemons * self.rows / self.step_s * self.duration_s * (1 - CALM_PART)
        return max(8.0, tokens / self.jobs)


@dataclass(slots=True)
class Tally:
    """What came of it. The fields of `broken` must be empty or zero.

    Attributes:
        figures: Counts by name, for the reader.
        broken: Promises that did not hold, a line each.
        folder: Where logs are, if something is broken.
    """

    figures: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    folder: Path | None = None

    @property
    def passed(self) -> bool:
        """Whether every promise held, and there was something to hold it against."""
        return not self.broken and self.figures.get("jobs finished", 0) > 0

    def lines(self) -> list[str]:
        """The tally, a line each."""
        rows = [f"{name:<44}{value:>12,.6g}" for name, value in self.figures.items()]
        rows += [f"BROKEN: {line}" for line in self.broken[:SHOWN]]
        if len(self.broken) > SHOWN:
            rows.append(f"... and {len(self.broken) - SHOWN} more")
        if self.folder is not None:
            rows.append(f"logs: {self.folder}")
        return [*rows, "OK: nothing lost, nothing doubled" if self.passed else "FAILED"]


def run(options: Options, say: Callable[[str], None]) -> Tally:
    """Run the soak and count.

    Args:
        options: What to do.
        say: Told of progress.
    """
    # A short path: Unix sockets lie in it.
    folder = Path(tempfile.mkdtemp(prefix="bd-chaos-"))
    tally = Tally()
    try:
        with Crew(
            folder,
            lease_s=options.lease_s,
            rows=options.rows,
            step_s=options.step_s,
            result_ttl_s=RESULT_TTL_S,
        ) as crew:
            for _ in range(options.daemons):
                crew.add()
            asyncio.run(_soak(options, crew, tally, say))
    finally:
        if tally.passed:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            tally.folder = folder
            say(f"logs: {folder}")
    return tally


async def _soak(options: Options, crew: Crew, tally: Tally, say: Callable[[str], None]) -> None:
    await _Soak(options, crew, tally, say).run()  # Connections belong to the loop they are made in.


class _Soak:
    """One run of the soak."""

    def __init__(self, options: Options, crew: Crew, tally: Tally, say: Callable[[str], None]) -> None:
        self._options, self._crew, self._tally, self._say = options, crew, tally, say
        self._havoc = Havoc(crew, seed=options.seed, every_s=options.every_s)
        self._crowd = Crowd(crew.daemons, options.seed)
        self._random = random.Random(options.seed)  # noqa: S311 - for a schedule, not for secrets
        self._began_s = time.monotonic()
        self._finished: set[str] = set()

    async def run(self) -> None:
        """Disturb, let settle, count."""
        options = self._options
        jobs = draw_jobs(self._random, options.jobs, TENANTS, options.mean_tokens)
        busy_s = options.duration_s * (1 - CALM_PART)
        starts_s = sorted(self._random.uniform(0.0, busy_s) for _ in jobs)
        watched = [self._random.random() < options.watched for _ in jobs]
        self._began_s = time.monotonic()
        self._havoc.start()
        progress = asyncio.create_task(self._show_progress())
        work = [
            asyncio.create_task(self._live(job, start_s, seen))
            for job, start_s, seen in zip(jobs, starts_s, watched, strict=True)
        ]
        await asyncio.sleep(options.duration_s)
        await asyncio.to_thread(self._havoc.stop)
        self._say("calm: no more faults, what was accepted must finish")
        supervisor = asyncio.create_task(self._supervise())
        _, late = await asyncio.wait(work, timeout=SETTLE_S)
        for task in (*late, progress):
            task.cancel()
        ends = await asyncio.gather(*work, progress, return_exceptions=True)
        self._tally.broken += [repr(end) for end in ends if isinstance(end, Exception)]
        await self._count(jobs)
        supervisor.cancel()
        await self._crowd.close()

    async def _live(self, job: Job, start_s: float, watched: bool) -> None:  # noqa: FBT001 - a column of a table
        """Submit a job at its time, watch it if it is watched, and wait for its end."""
        await asyncio.sleep(max(0.0, self._began_s + start_s - time.monotonic()))
        await self._crowd.submit(job)
        if watched:
            await self._crowd.watch(job)
        while True:
            if convert.job(await self._crowd.get(job)).state.final:
                self._finished.add(job.job_id)
                return
            await asyncio.sleep(self._random.uniform(0.5, 1.5))

    async def _supervise(self) -> None:
        """A daemon that could not start while Redis was dead is started again."""
        while True:
            await asyncio.to_thread(self._havoc.supervise)
            await asyncio.sleep(0.2)

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            deeds = ", ".join(f"{count} {name}" for name, count in sorted(self._havoc.counts.items()))
            self._say(
                f"{time.monotonic() - self._began_s:5.0f} s: {len(self._crowd.accepted)} accepted, "
                f"{len(self._finished)} finished, "
                f"{self._crowd.counts['tokens delivered']} tokens delivered; {deeds}"
            )

    async def _count(self, jobs: Sequence[Job]) -> None:
        """Hold everything against the promises."""
        crowd, tally = self._crowd, self._tally
        tally.broken += [f"never accepted: {job.job_id}" for job in jobs if job.job_id not in crowd.accepted]
        lost = [job_id for job_id in crowd.accepted if job_id not in self._finished]
        tally.broken += [f"lost: {job_id}" for job_id in lost]
        others = []
        for job_id in sorted(self._finished):
            job = crowd.accepted[job_id]
            try:
                found = await crowd.get(job)
            except TimeoutError as error:  # The others would not be told of either.
                tally.broken.append(str(error))
                break
            others += [why] if (why := job.wrong(convert.job(found))) else []
        streams = [watcher for watcher in crowd.watchers.values() if watcher.wrong()]
        tally.broken += others + [watcher.wrong() for watcher in streams] + crowd.surprises
        left = await asyncio.to_thread(self._left_behind)
        tally.broken += [f"left behind: {key}" for key in left]
        havoc = self._havoc
        tally.figures |= {
            "jobs accepted": len(crowd.accepted),
            "jobs finished": len(self._finished),
            "jobs lost": len(lost),
            "outputs that differ from an undisturbed run": len(others),
            "jobs watched": len(crowd.watchers),
            "tokens delivered to watchers": sum(len(one.token_ids) for one in crowd.watchers.values()),
            "tokens delivered twice": sum(one.counts["doubled"] for one in crowd.watchers.values()),
            "tokens skipped": sum(one.counts["skipped"] for one in crowd.watchers.values()),
            "calls of watchers": sum(one.counts["calls"] for one in crowd.watchers.values()),
            "keys left behind after the time to live": len(left),
            **{name: havoc.counts[name] for name in sorted(havoc.counts)},
            "jobs taken from dead or paused daemons": len(havoc.takeovers_s),
            "longest until one could run again, s": max(havoc.takeovers_s, default=0.0),
            "time, s": time.monotonic() - self._began_s,
        }

    def _left_behind(self) -> list[str]:
        """Let the time to live pass, and look what is left."""
        with self._crew.redis.client() as client:
            advance(client, (RESULT_TTL_S + 1) * 1000)
        try:
            until(lambda: not self._crew.left_behind(), "an empty queue")
        except TimeoutError:
            return self._crew.left_behind()
        return []
