"""The command `batond simulate`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress

from batond.daemon.errors import ConfigError
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.simulator.costs import load_costs
from batond.daemon.simulator.figures import load_plotter, plot
from batond.daemon.simulator.options import (
    classes_with,
    known_classes,
    numbers,
    pairs,
    policy_options,
    tenant_limits,
)
from batond.daemon.simulator.report import report
from batond.daemon.simulator.setup import Setup
from batond.daemon.simulator.show import as_json, print_tables
from batond.daemon.simulator.trace import (
    busiest,
    of_class,
    read_trace,
    rebased,
    with_classes,
    with_time_limits,
)
from batond.daemon.simulator.world import World, saturated_s
from batond.policies.registry import load_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.simulator.trace import Request
    from batond.daemon.simulator.world import Outcome

_DEFAULTS = Setup(costs=load_costs("h100"))
_LIMITS = PlannerLimits()
PIPE_COLUMNS = 400

Trace = Annotated[
    Path, typer.Argument(help="CSV: arrival_s,prompt_tokens,output_tokens[,tenant][,class][,time_limit_s].")
]
Policy = Annotated[str, typer.Option(help="Policies to compare, with commas between.")]
Classes = Annotated[str, typer.Option(help="Class by tenant, such as code=interactive,conv=batch.")]
Weights = Annotated[str, typer.Option(help="Weight by tenant, such as code=2,conv=1.")]
Queued = Annotated[str, typer.Option(help="Most waiting jobs by tenant, such as conv=500.")]
Running = Annotated[str, typer.Option(help="Most running jobs by tenant.")]
PerMinute = Annotated[str, typer.Option(help="Most tokens per minute by tenant.")]
LongestQueue = Annotated[str, typer.Option(help="Longest queue time by class, such as interactive=5, s.")]
TimeLimit = Annotated[str, typer.Option(help="Time from arrival to the last token by class, s.")]
Window = Annotated[float, typer.Option(help="Only the busiest so many seconds; 0 is all.")]
Load = Annotated[float, typer.Option(help="Arrivals over capacity, such as 1.1; 0 keeps the trace's times.")]
Only = Annotated[str, typer.Option(help="Leave out all other classes, after the load was scaled with them.")]
Daemons = Annotated[int, typer.Option(help="Equal daemons on one queue.")]
Rows = Annotated[int, typer.Option(help="Rows of each batch.")]
Chunk = Annotated[str, typer.Option(help="Prompt tokens between two decode steps: auto, or a number.")]
Quantum = Annotated[int, typer.Option(help="Tokens before a row may be taken.")]
Option = Annotated[list[str] | None, typer.Option(help="Option of a policy: fair.ageing_s=30; repeat.")]
Parks = Annotated[int, typer.Option(help="Parks after which a query stays.")]
HostPool = Annotated[int, typer.Option(help="Host RAM for parked KV, each.")]
MaxTokens = Annotated[int, typer.Option(help="Output tokens that are asked for; 0: those emitted.")]
Overcommit = Annotated[bool, typer.Option(help="Reserve KV for what is expected, or for all asked for.")]
Costs = Annotated[str, typer.Option(help="Step times: h100, cpu, or a JSON file.")]
Cost = Annotated[list[str] | None, typer.Option(help="One step time, such as step_s=0.01; repeat.")]
Noise = Annotated[float, typer.Option(help="Steps take up to this part longer or shorter.")]
Seed = Annotated[int, typer.Option(help="Of the noise, and of ties between daemons.")]
Json = Annotated[bool, typer.Option("--json", help="Figures as JSON.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw curves, such as file.svg (matplotlib).")]


def simulate(  # noqa: PLR0917 - typer passes by name
    trace: Trace,
    policy: Policy = "priority,fcfs",
    classes: Classes = "",
    weights: Weights = "",
    max_queued: Queued = "",
    max_running: Running = "",
    tokens_per_minute: PerMinute = "",
    longest_queue: LongestQueue = "",
    time_limit: TimeLimit = "",
    window: Window = 0.0,
    load: Load = 0.0,
    only: Only = "",
    daemons: Daemons = _DEFAULTS.daemons,
    rows: Rows = _DEFAULTS.rows,
    chunk_tokens: Chunk = "auto",
    quantum_tokens: Quantum = _LIMITS.quantum_tokens,
    max_parks: Parks = _LIMITS.max_parks,
    option: Option = None,
    host_pool_bytes: HostPool = _DEFAULTS.host_pool_bytes,
    max_tokens: MaxTokens = _DEFAULTS.max_tokens,
    overcommit: Overcommit = _DEFAULTS.overcommit,
    costs: Costs = "h100",
    cost: Cost = None,
    noise: Noise = 0.0,
    seed: Seed = 0,
    json_output: Json = False,  # noqa: FBT002 - typer
    plot_path: Plot = None,
) -> None:
    """Replay a trace in virtual time and compare policies; no model and no GPU is needed."""
    names = policy_list(policy)
    if plot_path is not None:
        load_plotter()
    quotas = {"queued": max_queued, "running": max_running, "tokens_per_minute": tokens_per_minute}
    setup = Setup(
        costs=load_costs(costs, cost or ()),
        daemons=daemons,
        rows=rows,
        chunk_tokens=_chunk_tokens(chunk_tokens),
        host_pool_bytes=host_pool_bytes,
        max_tokens=max_tokens,
        overcommit=overcommit,
        classes=classes_with(longest_queue),
        limits=PlannerLimits(quantum_tokens=quantum_tokens, max_parks=max_parks),
        policy_options=policy_options(option or ()),
        tenants=tenant_limits(weights, quotas),
        noise=noise,
        seed=seed,
    )
    requests = with_classes(read_trace(trace), setup.classes, pairs(classes, "classes"))
    requests = _limited(requests, setup, time_limit)
    requests = _in_window(setup, requests, window, load)
    if only:
        requests = of_class(requests, only)
    outcomes = _run(setup, names, requests)
    reports = [report(outcome) for outcome in outcomes]
    arriving_s = requests[-1].arrival_s
    if json_output:
        about = {"requests": len(requests), "arriving_s": arriving_s, "load": load or None, "seed": seed}
        typer.echo(as_json(reports, **about))
    else:
        # A pipe or a file has no edge at which figures would be cut.
        narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
        console = Console(width=None if narrow else PIPE_COLUMNS)
        scaled = f", {load:g} of capacity" if load else ""
        console.print(f"{len(requests)} requests in {arriving_s:.0f} s{scaled}")
        print_tables(console, reports)
    if plot_path is not None:
        plot(plot_path, outcomes)


def _chunk_tokens(given: str) -> Literal["auto"] | int:
    if given == "auto":
        return "auto"
    if not given.isdecimal():
        raise ConfigError(
            f"chunk_tokens must be auto or a number from 1 on, not {given!r}", field="chunk_tokens"
        )
    return int(given)


def policy_list(text: str) -> list[str]:
    """Names of registered policies, from a list with commas.

    Raises:
        ConfigError: There is none, or one is unknown.
    """
    names = [name for part in text.split(",") if (name := part.strip())]
    if not names:
        raise ConfigError("no policy is named", field="policy")
    for name in names:
        load_policy(name)
    return names


def _limited(requests: Sequence[Request], setup: Setup, time_limit: str) -> list[Request]:
    limits_s = numbers(time_limit, "time_limit")
    known_classes(limits_s, setup.classes, "time_limit")
    return with_time_limits(requests, limits_s)


def _in_window(setup: Setup, requests: list[Request], window_s: float, load: float) -> list[Request]:
    requests = busiest(requests, window_s) if window_s else rebased(requests, 1.0)
    if load:
        with Console(stderr=True).status("capacity"):
            capacity_s = saturated_s(setup, requests)
        requests = at_load(requests, capacity_s, load)
    return requests


def at_load(requests: Sequence[Request], capacity_s: float, load: float) -> list[Request]:
    """Scale arrivals so that the fleet is offered `load` times what it can do.

    Args:
        requests: By arrival, from 0.
        capacity_s: Seconds the fleet takes for all of them at once.
        load: Offered over capacity.

    Raises:
        ConfigError: The load is not above 0, or there is no rate to scale.
    """
    if not 0 < load < float("inf"):
        raise ConfigError(f"the load must be above 0, not {load}", field="load")
    if not (requests[-1].arrival_s and capacity_s):
        raise ConfigError("requests that arrive all at once, or are all refused, have no load", field="load")
    return rebased(requests, load * requests[-1].arrival_s / capacity_s)


def _run(setup: Setup, names: Sequence[str], requests: Sequence[Request]) -> list[Outcome]:
    outcomes = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name in names:
            task = progress.add_task(name, total=len(requests))
            world = World(setup, name, requests)
            outcomes.append(world.run(lambda done, task=task: progress.update(task, completed=done)))  # type: ignore[misc] # bound early on purpose
    return outcomes
