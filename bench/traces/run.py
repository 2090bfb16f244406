"""A real trace on a real daemon: policies one after the other, and what the simulator says of the same.

On a daemon of one's own arrivals can be scaled to a load of what the simulator says it can do, with step
times measured on it just before. The most urgent class is replayed alone too: what it sees with nothing else
on the machine. Ctrl-C ends the replay that runs and keeps what had ended.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batond.bench.traces import step_costs, workload
from batond.bench.traces.options import OwnDaemon, RunningDaemon
from batond.bench.traces.replay import failures, interruptible, lateness_s, outcome, replay, throughput
from batond.bench.traces.sites import Connector, own_site, started
from batond.bench.traces.watch import BatchWatch
from batond.clients.errors import BatondClientError
from batond.daemon.errors import ConfigError, StateError
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.simulator.command import at_load
from batond.daemon.simulator.costs import PRESETS, load_costs
from batond.daemon.simulator.report import report
from batond.daemon.simulator.setup import Setup
from batond.daemon.simulator.trace import of_class, rebased
from batond.daemon.simulator.world import World, saturated_s
from batond.policies.classes import DEFAULT_CLASSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from batond.bench.traces.options import Options
    from batond.bench.traces.replay import Replayed, Throughput
    from batond.bench.traces.sites import Site
    from batond.bench.traces.watch import BatchUse, Moment
    from batond.bench.traces.workload import Workload
    from batond.clients import ServerInfo
    from batond.daemon.simulator.report import Report
    from batond.daemon.simulator.trace import Request
    from batond.daemon.simulator.world import Outcome
    from batond.policies.classes import SlaClasses

PROBE_TOKENS: Final = 512  # Most of a prompt that is timed where chunks have no size of their own.


@dataclass(frozen=True, slots=True)
class Run:
    """One replay.

    Attributes:
        policy: Active on the daemon.
        about: " alone", if only the most urgent class was replayed.
        replayed: Every request, as its client saw it.
        outcome: Of those with an end.
        report: Its figures.
        predicted: The simulator's, of the same requests; None without it, and of a run that was stopped.
        predicted_report: Its figures.
        throughput: What was done a second.
        batch: What the engine counted; None if the daemon does not show it to us.
        course: How full the batch was over time; empty then.
        drift: How long a step of a full batch took after it, over what was measured before; not a number
            where that is not measured.
        stopped: It was ended by Ctrl-C.
    """

    policy: str
    about: str
    replayed: list[Replayed]
    outcome: Outcome
    report: Report
    predicted: Outcome | None
    predicted_report: Report | None
    throughput: Throughput
    batch: BatchUse | None
    course: list[Moment]
    drift: float
    stopped: bool

    @property
    def name(self) -> str:
        """Of policy and requests."""
        return f"{self.policy}{self.about}"

    @property
    def unfinished(self) -> int:
        """Requests without an end."""
        return sum(not one.ended for one in self.replayed)

    @property
    def failures(self) -> dict[str, int]:
        """Requests that failed or were not accepted, by the reason."""
        return failures(self.replayed)


@dataclass(slots=True)
class Result:
    """What came of it.

    Attributes:
        info: The daemon.
        fit: Step times, measured before or given; None without a simulation.
        workload: What was chosen of the trace.
        requests: As replayed, with their arrivals scaled.
        one_tenant: All tenants of the trace are one to the daemon.
        runs: Of each policy; that of the most urgent class alone is the first.
        stopped: It was ended by Ctrl-C.
    """

    info: ServerInfo
    fit: step_costs.Fit | None
    workload: Workload
    requests: list[Request]
    one_tenant: bool
    runs: list[Run] = field(default_factory=list)
    stopped: bool = False

    @property
    def alone(self) -> Run | None:
        """The most urgent class with nothing else on the machine."""
        return next((one for one in self.runs if one.about), None)

    @property
    def full(self) -> list[Run]:
        """All requests, under each policy."""
        return [one for one in self.runs if not one.about]

    @property
    def lateness_s(self) -> float:
        """How late the clients sent at worst."""
        return max((lateness_s(one.replayed) for one in self.runs), default=0.0)


def run(options: Options, console: Console) -> Result:
    """Replay the trace under every policy, on a daemon that is started for it or on one that runs.

    Raises:
        ConfigError: Something that is asked for can't be.
        StateError: A running daemon is not reached, or not ready.
    """
    if isinstance(options.daemon, RunningDaemon):
        return asyncio.run(_on_running(options, options.daemon, console))
    classes = workload.with_targets(DEFAULT_CLASSES, options)
    chosen = workload.choose(options, classes)
    # The measurement of step times decodes so many tokens after the longest prompt.
    spare_tokens = 4 * step_costs.DECODED_TOKENS if options.simulate else 0
    with started(options.daemon, chosen.requests, classes, options.policies[0], spare_tokens) as daemon:
        with console.status("starting Redis, loading the model"):
            info = daemon.wait_ready()

        async def on_own() -> Result:
            tenants = sorted({one.tenant for one in chosen.requests})
            async with own_site(daemon, info, tenants) as site:
                return await _replay_all(options, site, chosen, classes, console)

        return asyncio.run(on_own())


async def _on_running(options: Options, running: RunningDaemon, console: Console) -> Result:
    async with Connector(running) as connector:
        info = await connector.info()
        classes = workload.offered_classes(info.sla_classes, options)
        chosen = workload.choose(options, classes, info.max_query_tokens)
        site = connector.site(info, sorted({one.tenant for one in chosen.requests}))
        return await _replay_all(options, site, chosen, classes, console)


async def _replay_all(
    options: Options, site: Site, chosen: Workload, classes: SlaClasses, console: Console
) -> Result:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        fit = await _measure(options, site, chosen.requests, progress) if options.simulate else None
        setup = _setup(options, site.info, classes, fit)
        requests = _arriving(options, setup, chosen.requests, progress)
        result = Result(site.info, fit, chosen, requests, site.one_tenant)
        replays = _Replays(options, site, setup, progress, fit)
        urgent = next(name for name in classes.names if any(one.sla_class == name for one in requests))
        several = any(one.sla_class != urgent for one in requests)
        names = options.policies or (site.info.policy,)
        parts = [(names[0], of_class(requests, urgent), " alone")] if options.alone and several else []
        parts += [(name, requests, "") for name in names]
        async with replays:
            for policy, some, about in parts:
                one = await replays.one(policy, some, about)
                result.runs += [one] if one is not None else []
                if one is None or one.stopped:
                    result.stopped = True
                    break
    if not result.runs:
        raise StateError("stopped before anything had ended: there is nothing to show")
    return result


def _setup(options: Options, info: ServerInfo, classes: SlaClasses, fit: step_costs.Fit | None) -> Setup:
    setup = Setup(
        costs=PRESETS["cpu"] if fit is None else fit.costs,
        rows=info.rows,
        classes=classes,
        seed=options.seed,
    )
    own = options.daemon
    if isinstance(own, RunningDaemon):
        return setup
    return replace(
        setup,
        chunk_tokens=own.chunk_tokens,
        host_pool_bytes=own.host_pool_bytes,
        limits=PlannerLimits(quantum_tokens=own.quantum_tokens),
    )


def _arriving(options: Options, setup: Setup, requests: list[Request], progress: Progress) -> list[Request]:
    """The requests when they are sent."""
    if options.saturate:
        return [replace(one, arrival_s=0.0) for one in requests]
    if options.effective_load is None:
        return rebased(requests, options.rate or 1.0)
    task = progress.add_task("capacity, simulated", total=None)
    scaled = at_load(requests, saturated_s(setup, requests), options.effective_load)
    progress.remove_task(task)
    return scaled


async def _measure(
    options: Options, site: Site, requests: Sequence[Request], progress: Progress
) -> step_costs.Fit:
    info = site.info
    if options.costs:
        costs = replace(load_costs(options.costs), kv_token_bytes=info.kv_bytes_per_token)
        return step_costs.Fit(costs, 0.0, 0.0)
    longest_tokens = max(one.prompt_tokens for one in requests)
    chunk_tokens = options.daemon.chunk_tokens if isinstance(options.daemon, OwnDaemon) else "auto"
    task = progress.add_task("step times", total=step_costs.measurements(info.rows))
    return await step_costs.measure(
        _prober(options, site),
        rows=info.rows,
        chunk_tokens=min(PROBE_TOKENS, longest_tokens) if chunk_tokens == "auto" else chunk_tokens,
        longest_tokens=longest_tokens,
        kv_token_bytes=info.kv_bytes_per_token,
        on_done=lambda: progress.advance(task),
    )


def _prober(options: Options, site: Site) -> step_costs.Prober:
    dice = random.Random(options.seed)  # noqa: S311 - prompts
    return step_costs.Prober(next(iter(site.clients.values())), site.info.vocab_size, dice)


class _Replays:
    """Replays on the daemon and in the simulator; when it is left, the daemon has its policy back."""

    def __init__(
        self, options: Options, site: Site, setup: Setup, progress: Progress, fit: step_costs.Fit | None
    ) -> None:
        self._site, self._setup, self._progress, self._fit = site, setup, progress, fit
        self._prober = _prober(options, site)
        self._active = site.info.policy

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._set_policy(self._site.info.policy)

    async def one(self, policy: str, requests: Sequence[Request], about: str) -> Run | None:
        """Replay under a policy; None if it was stopped before anything had ended.

        Raises:
            ConfigError: The daemon does not exchange its policy for us.
        """
        await self._set_policy(policy)
        name = f"{policy}{about}"
        task = self._progress.add_task(name, total=len(requests))
        with interruptible() as stop:
            async with BatchWatch(self._site.operator) as watch:
                watch.begin()
                replayed = await replay(
                    self._site.clients,
                    self._setup,
                    requests,
                    self._site.info.vocab_size,
                    on_done=lambda: self._progress.advance(task),
                    stop=stop,
                )
            stopped = stop.is_set()
        ended = [one for one in replayed if one.ended]
        if not ended:
            return None
        simulated = self._fit is not None
        real = outcome(f"{name}, daemon" if simulated else name, self._setup, ended)
        predicted = self._predicted(policy, name, requests) if simulated and not stopped else None
        return Run(
            policy=policy,
            about=about,
            replayed=replayed,
            outcome=real,
            report=report(real),
            predicted=predicted,
            predicted_report=None if predicted is None else report(predicted),
            throughput=throughput(replayed),
            batch=watch.use,
            course=watch.course,
            drift=math.nan if stopped else await self._drift(),
            stopped=stopped,
        )

    async def _set_policy(self, policy: str) -> None:
        if policy == self._active:
            return
        try:
            await self._site.operator.set_policy(policy)
        except BatondClientError as error:
            raise ConfigError(
                f"the daemon keeps its policy {self._active}: {error}", field="policies"
            ) from error
        self._active = policy

    def _predicted(self, policy: str, name: str, requests: Sequence[Request]) -> Outcome:
        predicted = World(self._setup, policy, requests).run()
        predicted.policy = f"{name}, simulated"
        return predicted

    async def _drift(self) -> float:
        if self._fit is None:
            return math.nan
        rows = self._setup.rows
        step_s = await self._prober.decode_s(rows, step_costs.SHORT_TOKENS)
        cached = rows * (step_costs.SHORT_TOKENS + step_costs.DECODED_TOKENS)
        return step_s / self._fit.costs.decode_s(rows, cached)
