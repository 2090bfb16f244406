"""The command `batond simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from batond.daemon.errors import ConfigError
from batond.daemon.scheduler.victims import PlannerLimits
from batond.daemon.simulator.costs import load_costs
from batond.daemon.simulator.report import report
from batond.daemon.simulator.setup import Setup
from batond.daemon.simulator.show import as_json, load_plotter, plot, print_tables
from batond.daemon.simulator.trace import busiest, of_class, read_trace, rebased, with_classes
from batond.daemon.simulator.world import World, saturated_s
from batond.policies.registry import load_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.simulator.trace import Request
    from batond.daemon.simulator.world import Outcome

_DEFAULTS = Setup(costs=load_costs("h100"))
_LIMITS = PlannerLimits()

Trace = Annotated[Path, typer.Argument(help="CSV: arrival_s,prompt_tokens,output_tokens[,tenant][,class].")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw curves, such as file.svg (matplotlib).")]


def simulate(  # noqa: PLR0917 - typer passes by name
    trace: Trace,
    policy: Annotated[str, typer.Option(help="Policies to compare, with commas between.")] = "priority,fcfs",
    classes: Annotated[str, typer.Option(help="Class by tenant, such as code=interactive,conv=batch.")] = "",
    weights: Annotated[str, typer.Option(help="Weight by tenant, such as code=2,conv=1.")] = "",
    window: Annotated[float, typer.Option(help="Only the busiest so many seconds; 0 is all.")] = 0.0,
    load: Annotated[
        float, typer.Option(help="Arrivals over capacity, such as 1.1; 0 keeps the trace's times.")
    ] = 0.0,
    only: Annotated[
        str, typer.Option(help="Leave out all other classes, after the load was scaled with them.")
    ] = "",
    daemons: Annotated[int, typer.Option(help="Equal daemons on one queue.")] = _DEFAULTS.daemons,
    rows: Annotated[int, typer.Option(help="Rows of each batch.")] = _DEFAULTS.rows,
    chunk_tokens: Annotated[
        int, typer.Option(help="Prompt tokens between two decode steps.")
    ] = _DEFAULTS.chunk_tokens,
    quantum_tokens: Annotated[
        int, typer.Option(help="Tokens before a row may be taken.")
    ] = _LIMITS.quantum_tokens,
    max_parks: Annotated[int, typer.Option(help="Parks after which a query stays.")] = _LIMITS.max_parks,
    host_pool_bytes: Annotated[
        int, typer.Option(help="Host RAM for parked KV, each.")
    ] = _DEFAULTS.host_pool_bytes,
    costs: Annotated[str, typer.Option(help="Step times: h100, cpu, or a JSON file.")] = "h100",
    cost: Annotated[
        list[str] | None, typer.Option(help="One step time, such as step_s=0.01; repeat.")
    ] = None,
    noise: Annotated[float, typer.Option(help="Steps take up to this part longer or shorter.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the noise, and of ties between daemons.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,  # noqa: FBT002 - typer
    plot_path: Plot = None,
) -> None:
    """Replay a trace in virtual time and compare policies; no model and no GPU is needed."""
    names = [name for part in policy.split(",") if (name := part.strip())]
    if not names:
        raise ConfigError("no policy is named", field="policy")
    for name in names:
        load_policy(name)
    if plot_path is not None:
        load_plotter()
    setup = Setup(
        costs=load_costs(costs, cost or ()),
        daemons=daemons,
        rows=rows,
        chunk_tokens=chunk_tokens,
        host_pool_bytes=host_pool_bytes,
        limits=PlannerLimits(quantum_tokens=quantum_tokens, max_parks=max_parks),
        weights={tenant: _weight(tenant, value) for tenant, value in _pairs(weights, "weights").items()},
        noise=noise,
        seed=seed,
    )
    requests = with_classes(read_trace(trace), setup.classes, _pairs(classes, "classes"))
    requests = busiest(requests, window) if window else rebased(requests, 1.0)
    if load:
        with Console(stderr=True).status("capacity"):
            capacity_s = saturated_s(setup, requests)
        requests = at_load(requests, capacity_s, load)
    if only:
        requests = of_class(requests, only)
    outcomes = _run(setup, names, requests)
    reports = [report(outcome) for outcome in outcomes]
    arriving_s = requests[-1].arrival_s
    if json_output:
        typer.echo(
            as_json(reports, requests=len(requests), arriving_s=arriving_s, load=load or None, seed=seed)
        )
    else:
        console = Console()
        scaled = f", {load:g} of capacity" if load else ""
        console.print(f"{len(requests)} requests in {arriving_s:.0f} s{scaled}")
        print_tables(console, reports)
    if plot_path is not None:
        plot(plot_path, outcomes)


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


def _pairs(text: str, field: str) -> dict[str, str]:
    pairs = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"{part!r} is not of the form tenant=value", field=field)
        pairs[key.strip()] = value.strip()
    return pairs


def _weight(tenant: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ConfigError(
            f"the weight of tenant {tenant} is no number: {value!r}", field="weights"
        ) from error
