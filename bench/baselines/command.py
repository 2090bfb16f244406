"""`python -m batond.bench baselines`: one workload under every method."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Final

import torch
import typer
from rich.console import Console
from rich.table import Table

from batond.bench import workloads
from batond.bench.baselines.groups import Job
from batond.bench.baselines.methods import BY_NAME, Method
from batond.bench.baselines.play import Played, Stage, play
from batond.bench.gpu.run import DTYPES
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes.run import build
from batond.bench.progress import TABLE_WIDTH, teller
from batond.daemon.simulator.costs import PRESETS, load_costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.simulator.costs import StepCosts

_NAMES: Final = ",".join(BY_NAME)


def baselines_command(  # noqa: PLR0917 - typer calls it by name
    method: Annotated[str, typer.Option(help="Separated by commas.")] = _NAMES,
    requests: Annotated[int, typer.Option(help="Of the mix of long and short ones.", min=1)] = 32,
    rate: Annotated[float, typer.Option(help="Arrivals a second; 0: all at once.", min=0)] = 24.0,
    urgent: Annotated[float, typer.Option(help="Part of them that is urgent.", min=0, max=1)] = 0.1,
    rows: Annotated[int, typer.Option(help="Of the batch.", min=1)] = 4,
    shorter: Annotated[int, typer.Option(help="Divide all lengths by this.", min=1)] = 32,
    costs: Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}, or a JSON file.")] = "h100",
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}; it tells no times.")] = "tiny",
    layers: Annotated[int, typer.Option(help="Layers of it; 0 is all.", min=0)] = 0,
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the engine runs.")] = "cpu",
    second: Annotated[
        str, typer.Option(help="Where prompts of a second device do; nothing: there too.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and tokens.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write every figure as JSON.")] = None,
) -> None:
    """Play one workload under published methods on the engine; times follow from costs, not this machine."""
    names = method.split(",")
    if unknown := [name for name in names if name not in BY_NAME]:
        raise typer.BadParameter(f"--method is of {_NAMES}, not {', '.join(unknown)}")
    spent = load_costs(costs)
    jobs = workload(SHAPES[shape].vocab_size, requests, rate=rate, urgent=urgent, shorter=shorter, seed=seed)
    longest = max(job.prompt_tokens + job.output_tokens for job in jobs)
    made = [
        build(shape, layers or None, DTYPES[dtype], longest, torch.device(place))
        for place in (device, second)
        if place
    ]
    stage, tell = Stage(made[0], rows, longest, made[-1]), teller()
    try:
        results = []
        for one in (BY_NAME[name] for name in names):
            tell(one.name)
            results.append(
                play(stage, dataclasses.replace(one, chunk_tokens=_chunk(one, shorter)), jobs, spent)
            )
    finally:
        stage.close()
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    show(console, results, spent)
    if output is not None:
        output.write_text(json.dumps([figures(one) for one in results]) + "\n", encoding="utf-8")


def workload(
    vocab_size: int, requests: int, *, rate: float, urgent: float, shorter: int, seed: int
) -> list[Job]:
    """The published mix with random arrivals; some of it urgent, drawn as well."""
    dice, now_s, jobs = random.Random(seed), 0.0, []  # noqa: S311 - a repeatable workload
    for number, one in enumerate(workloads.mix(vocab_size, queries=requests, seed=seed)):
        prompt, answer = (max(1, n // shorter) for n in (len(one.prompt_token_ids), one.output_tokens))
        jobs.append(Job(f"j{number}", now_s, prompt, answer, urgent=dice.random() < urgent))
        now_s += dice.expovariate(rate) if rate else 0.0
    return jobs


def _chunk(method: Method, shorter: int) -> int | None:
    return None if method.chunk_tokens is None else max(1, method.chunk_tokens // shorter)


def figures(one: Played) -> dict[str, float | str]:
    """Of one method, times in seconds."""
    urgent = [served.completion_s for served in one.served.values() if served.job.urgent]
    return {
        "method": one.method,
        "seconds": one.seconds,
        "output_tokens_per_s": one.output_rate,
        "mean_completion_s": one.mean_completion_s,
        "mean_first_token_s": one.mean_first_token_s,
        "worst_urgent_completion_s": max(urgent, default=0.0),
        "worst_gap_s": one.worst_gap_s,
        "steps": one.steps,
        "idle_row_steps": one.idle_row_steps,
        "parks": one.parks,
        "waited_for_copies_s": one.waited_s,
    }


def show(console: Console, results: Sequence[Played], costs: StepCosts) -> None:
    """Print the table and the sources."""
    table = Table(
        title="One workload under each method, virtual seconds",
        caption=(
            "done, first, urgent: from arrival; waits: for copies; by costs: step"
            f" {1e3 * costs.step_s:g} ms, prompt token {1e6 * costs.prefill_token_s:g} us"
        ),
    )
    table.add_column("method")
    heads = "all s, tokens/s, done mean, first mean, urgent worst, gap worst, steps, idle, parks, waits"
    for name in heads.split(", "):
        table.add_column(name, justify="right")
    for one in results:
        _, *numbers = figures(one).values()
        table.add_row(one.method, *(f"{float(number):,.4g}" for number in numbers))
    table.columns[0].no_wrap = True
    console.print(table)
    for played in results:
        source = BY_NAME[played.method].source
        console.print(f"{played.method}: {source}", markup=False, highlight=False, soft_wrap=True)
