"""A real trace on the real daemon: policies one after the other, each beside the simulator's prediction.

The trace is cut to its busiest seconds, thinned evenly to a number of requests, and its lengths are divided,
so that a small model on a CPU can serve it; arrivals are scaled to a load of what the simulator says it
can do with step times measured on it just before. The most urgent class is replayed alone too: what it sees
with nothing else on the machine.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batond.bench import replay, step_costs
from batond.bench.local_daemon import OPERATOR, LocalDaemon
from batond.daemon.errors import ConfigError
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.simulator.command import at_load
from batond.daemon.simulator.costs import load_costs
from batond.daemon.simulator.report import Report, report
from batond.daemon.simulator.setup import Setup
from batond.daemon.simulator.show import as_json, print_tables
from batond.daemon.simulator.trace import busiest, of_class, read_trace, rebased, with_classes
from batond.daemon.simulator.world import World, saturated_s
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from batond.clients import AsyncClient, ServerInfo
    from batond.daemon.simulator.trace import Request

HOST_POOL_BYTES = 1 << 29
MOST_DRIFT = 0.15  # Of step times during the runs; beyond, figures say more of the machine than of policies.


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is replayed, and on what.

    Attributes:
        trace: CSV as for `batond simulate`.
        policies: Registered policies, one after the other.
        classes: Class by tenant of the trace.
        window_s: Only the busiest so many seconds; 0 is all.
        requests: Kept of them, evenly; 0 is all.
        shrink: Prompt and output lengths are divided by it.
        load: Arrivals over capacity.
        rows: Of the batch.
        chunk_tokens: Prompt tokens between two decode steps.
        quantum_tokens: Tokens before a row may be taken; 16 is for lengths that were not divided.
        model: As in `[model] path`.
        threads: Of torch in the engine; 0 is its own choice.
        costs: Step times as for `batond simulate`, to repeat a run with; "" measures them.
        seed: Of the prompts.
    """

    trace: Path
    policies: tuple[str, ...]
    classes: Mapping[str, str]
    window_s: float = 600.0
    requests: int = 240
    shrink: float = 16.0
    load: float = 1.1
    rows: int = 4
    chunk_tokens: int = 128
    quantum_tokens: int = 2
    model: str = "smollm2"
    threads: int = 0
    costs: str = ""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it.

    Attributes:
        info: The daemon.
        fit: Step times, measured before or given.
        requests: As replayed.
        reports: Of each policy: the daemon, then the simulator.
        alone: The most urgent class with nothing else on the machine, under the first policy: both again.
        drift: By run: how long a step of a full batch took after it, over the fit.
        lateness_s: How late the clients sent at worst.
    """

    info: ServerInfo
    fit: step_costs.Fit
    requests: list[Request]
    reports: list[Report]
    alone: tuple[Report, Report]
    drift: dict[str, float]
    lateness_s: float


def workload(options: Options) -> list[Request]:
    """The requests, before their arrivals are scaled.

    Raises:
        ConfigError: The trace can't be read, or an option makes no sense.
    """
    if not (options.shrink >= 1 and options.requests >= 0):
        raise ConfigError("shrink must be at least 1, and requests not negative")
    requests = with_classes(read_trace(options.trace), SlaClasses(), options.classes)
    requests = busiest(requests, options.window_s) if options.window_s else rebased(requests, 1.0)
    if 0 < options.requests < len(requests):
        kept = (number * len(requests) // options.requests for number in range(options.requests))
        requests = [requests[place] for place in kept]
    return rebased([_shrunk(request, options.shrink) for request in requests], 1.0)


def _shrunk(request: Request, factor: float) -> Request:
    prompt, output = (
        max(1, round(tokens / factor)) for tokens in (request.prompt_tokens, request.output_tokens)
    )
    return replace(request, prompt_tokens=prompt, output_tokens=output)


def run(options: Options, console: Console) -> Result:
    """Start a daemon, measure it, and replay the trace under every policy."""
    requests = workload(options)
    longest = max(one.prompt_tokens + one.output_tokens for one in requests)
    engine = {
        "rows": options.rows,
        "chunk_tokens": options.chunk_tokens,
        "quantum_tokens": options.quantum_tokens,
        # The measurement of step times decodes so many tokens after the longest prompt.
        "max_query_tokens": longest + 4 * step_costs.DECODED_TOKENS,
        "host_pool_bytes": HOST_POOL_BYTES,
        "policy": options.policies[0],
        "threads": options.threads,
    }
    tenants = sorted({one.tenant for one in requests})
    with tempfile.TemporaryDirectory(prefix="batond-trace-") as name:
        daemon = LocalDaemon(Path(name), tenants, model={"path": options.model}, engine=engine)
        try:
            with console.status("starting Redis, loading the model"):
                info = daemon.wait_ready()
            return asyncio.run(_run(options, daemon, info, requests, console))
        finally:
            daemon.stop()


async def _run(
    options: Options, daemon: LocalDaemon, info: ServerInfo, requests: list[Request], console: Console
) -> Result:
    tenants = sorted({one.tenant for one in requests})
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    clients = {name: daemon.async_client(name) for name in (*tenants, OPERATOR)}
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            prober = step_costs.Prober(clients[tenants[0]], info.vocab_size, random.Random(options.seed))  # noqa: S311 - prompts
            fit = await _measure(options, prober, info, requests, progress)
            setup = Setup(
                costs=fit.costs,
                rows=options.rows,
                chunk_tokens=options.chunk_tokens,
                host_pool_bytes=HOST_POOL_BYTES,
                limits=PlannerLimits(quantum_tokens=options.quantum_tokens),
                seed=options.seed,
            )
            scaled = at_load(requests, saturated_s(setup, requests), options.load)
            replays = _Replays(clients, setup, prober, info.vocab_size, progress)
            urgent = next(
                name for name in setup.classes.names if any(one.sla_class == name for one in scaled)
            )
            alone = await replays.both(options.policies[0], of_class(scaled, urgent), " alone")
            reports = [one for name in options.policies for one in await replays.both(name, scaled)]
    finally:
        for client in clients.values():
            await client.close()
    return Result(info, fit, scaled, reports, alone, replays.drift, replays.lateness_s)


async def _measure(
    options: Options,
    prober: step_costs.Prober,
    info: ServerInfo,
    requests: Sequence[Request],
    progress: Progress,
) -> step_costs.Fit:
    if options.costs:
        costs = replace(load_costs(options.costs), kv_token_bytes=info.kv_bytes_per_token)
        return step_costs.Fit(costs, 0.0, 0.0)
    task = progress.add_task("step times", total=step_costs.measurements(options.rows))
    return await step_costs.measure(
        prober,
        rows=options.rows,
        chunk_tokens=options.chunk_tokens,
        longest_tokens=max(one.prompt_tokens for one in requests),
        kv_token_bytes=info.kv_bytes_per_token,
        on_done=lambda: progress.advance(task),
    )


class _Replays:
    """Replays on the daemon and in the simulator."""

    def __init__(
        self,
        clients: Mapping[str, AsyncClient],
        setup: Setup,
        prober: step_costs.Prober,
        vocab_size: int,
        progress: Progress,
    ) -> None:
        self._clients, self._setup, self._vocab_size = clients, setup, vocab_size
        self._prober, self._progress = prober, progress
        self.drift: dict[str, float] = {}
        self.lateness_s = 0.0

    async def both(self, policy: str, requests: Sequence[Request], about: str = "") -> tuple[Report, Report]:
        """The daemon's report and the simulator's. The daemon is idle before and after."""
        await self._clients[OPERATOR].set_policy(policy)
        task = self._progress.add_task(f"{policy}{about}", total=len(requests))
        replayed = await replay.replay(
            self._clients, self._setup, requests, self._vocab_size, lambda: self._progress.advance(task)
        )
        self.lateness_s = max(self.lateness_s, replay.lateness_s(replayed))
        rows = self._setup.rows
        step_s = await self._prober.decode_s(rows, step_costs.SHORT_TOKENS)
        fitted_s = self._setup.costs.decode_s(
            rows, rows * (step_costs.SHORT_TOKENS + step_costs.DECODED_TOKENS)
        )
        self.drift[f"{policy}{about}"] = step_s / fitted_s
        real = report(replay.outcome(f"{policy}{about}, daemon", self._setup, replayed))
        predicted = report(World(self._setup, policy, requests).run())
        return real, replace(predicted, policy=f"{policy}{about}, simulated")


def show(console: Console, options: Options, result: Result) -> None:
    """Print the tables and what they come to."""
    info, fit = result.info, result.fit
    versions = ", ".join(f"{name} {version}" for name, version in sorted(info.library_versions.items()))
    console.print(f"{info.model} on {info.device}, {info.rows} rows, batch {info.batch_kind}; {versions}")
    console.print(
        f"{'given' if options.costs else 'measured'}: a step {fit.costs.step_s * 1e3:.1f} ms"
        f" + {fit.costs.row_s * 1e3:.2f} a row"
        f" + {fit.costs.cached_token_s * 1e6:.2f} us a cached token;"
        f" prompts {fit.costs.prefill_s * 1e3:.1f} ms + {fit.costs.prefill_token_s * 1e3:.3f} a token;"
        f" {fit.overhead_s * 1e3:.1f} ms around them, not simulated; fitted within {fit.error:.0%}"
    )
    console.print(
        f"{len(result.requests)} requests in {result.requests[-1].arrival_s:.0f} s, {options.load:g} of"
        f" capacity, lengths / {options.shrink:g}; sent {result.lateness_s * 1e3:.0f} ms late at worst"
    )
    drift = ", ".join(f"{name} {factor:.2f}" for name, factor in result.drift.items())
    console.print(f"steps after each run, over those measured before: {drift}")
    if max(abs(factor - 1) for factor in result.drift.values()) > MOST_DRIFT + result.fit.error:
        console.print("[bold]the machine did not keep its speed: compare nothing below[/bold]")
    print_tables(console, result.reports)
    for line in summary(result):
        console.print(line)


def summary(result: Result) -> list[str]:
    """The two figures that choose a policy, for the daemon and the simulator."""
    lines = []
    for place, where in enumerate(("daemon", "simulated")):
        alone, first = result.alone[place], result.reports[place]
        urgent, lone = first.groups[0], alone.groups[0]
        line = (
            f"{where}: {urgent.sla_class} TTFT p99 {urgent.ttft_s.p99:.2f} s under {first.policy},"
            f" {urgent.ttft_s.p99 / lone.ttft_s.p99:.2f} times its {lone.ttft_s.p99:.2f} s with nothing else"
            f" on the machine"
        )
        for other in result.reports[2 + place :: 2]:
            tokens, theirs = (one.groups[-1].tokens_per_s for one in (first, other))
            line += (
                f"; {first.groups[-1].sla_class} {tokens / theirs - 1:+.1%} tokens/s against {other.policy}"
            )
        lines.append(line)
    return lines


def write(path: Path, options: Options, result: Result) -> None:
    """Write every figure as JSON."""
    about = asdict(options) | {"trace": options.trace.name}
    costs = asdict(result.fit.costs)
    reports = [*result.alone, *result.reports]
    path.write_text(
        as_json(
            reports,
            options=about,
            versions=dict(result.info.library_versions),
            costs=costs,
            overhead_s=result.fit.overhead_s,
            fit_error=result.fit.error,
            drift=result.drift,
            lateness_s=result.lateness_s,
            arriving_s=result.requests[-1].arrival_s,
        ),
        encoding="utf-8",
    )
