"""`python -m batond.bench`: the measurements."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from batond.bench import (
    chaos,
    demo,
    families,
    load,
    memory,
    model_support,
    models,
    neighbour,
    neighbour_show,
    neighbour_stand,
    planner,
    soak,
    spill,
    steps,
    support_table,
    workloads,
)
from batond.bench import engine as engine_bench
from batond.bench.baselines.command import baselines_command
from batond.bench.gpu.command import gpu_command
from batond.bench.mixes.command import mixes_command, parked_command
from batond.bench.paper.command import paper_command, smoke_command
from batond.bench.peers.command import peers_command
from batond.bench.progress import TABLE_WIDTH
from batond.bench.traces.command import trace_command
from batond.daemon.errors import BatondError, ConfigError
from batond.daemon.telemetry.logging import configure_logging

app = typer.Typer(
    help="Measurements of batond.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


app.command("baselines")(baselines_command)
app.command("gpu")(gpu_command)
app.command("mixes")(mixes_command)
app.command("paper")(paper_command)
app.command("smoke")(smoke_command)
app.command("parked")(parked_command)
app.command("peers")(peers_command)
app.command("trace")(trace_command)


@app.callback()
def _root() -> None:
    """Measurements of batond."""


@app.command("engine")
def engine_command(
    workload: Annotated[str, typer.Option(help=f"One of: {', '.join(workloads.WORKLOADS)}.")] = "short",
    model: Annotated[str, typer.Option(help='"tiny" (random), "small" (SmolLM2-135M), or a path.')] = "tiny",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "2,4,6,8,10",
    output: Annotated[Path | None, typer.Option(help="Also write the results as JSON lines.")] = None,
) -> None:
    """Run the same queries as run_to_completion, pd, inline and decoupled; print times, steps and ratios."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)  # A cut table helps nobody.
    if workload not in workloads.WORKLOADS:
        raise typer.BadParameter(f"{workload!r} is not one of {', '.join(workloads.WORKLOADS)}")
    sizes = [int(size) for size in batch.split(",")]
    with console.status(f"loading {model}"):
        loaded = models.load(model)
    requests = workloads.WORKLOADS[workload](loaded.vocab_size)
    results = engine_bench.run_all(loaded, requests, sizes, console)
    console.print(engine_bench.report(results, requests))
    if output is not None:
        output.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))


@app.command("spill")
def spill_command(
    directory: Annotated[Path, typer.Argument(help="Made if it is missing; emptied of what this writes.")],
    slice_mib: Annotated[int, typer.Option(help="MiB of a slice.", min=1)] = 256,
    slices: Annotated[int, typer.Option(help="Slices a turn.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="Turns of each way.", min=1)] = 5,
) -> None:
    """Write slices to a spill directory and read them back, against plain calls on the same disk."""
    console = Console()
    rates = spill.run(directory.absolute(), slice_bytes=slice_mib << 20, slices=slices, rounds=rounds)
    console.print(spill.table(rates))


@app.command("steps")
def steps_command(
    model: Annotated[str, typer.Option(help='"tiny" (random), "small" (SmolLM2-135M), or a path.')] = "small",
    short: Annotated[int, typer.Option(help="Tokens of a short row.")] = 16,
    long: Annotated[int, typer.Option(help="Tokens of a long row.")] = 1024,
    rounds: Annotated[int, typer.Option(help="Turns of each kind of batch.")] = 5,
) -> None:
    """Time a decode step on the ring and on padded tensors, rows of equal and of mixed lengths."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    with console.status(f"loading {model}"):
        loaded = models.load(model)
    cases = steps.mixes(short, long)
    with console.status("measuring"):
        steps.measure(loaded, cases, rounds)
    console.print(steps.report(cases, f"{model}, {torch.get_num_threads()} threads"))


@app.command("memory")
def memory_command(
    workload: Annotated[str, typer.Option(help=f"One of: {', '.join(workloads.WORKLOADS)}.")] = "short",
    model: Annotated[str, typer.Option(help='"tiny" (random), "small" (SmolLM2-135M), or a path.')] = "tiny",
    rows: Annotated[int, typer.Option(help="Rows of the batch.", min=1)] = 8,
    output: Annotated[Path | None, typer.Option(help="Also write figures and curves as JSON lines.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves, such as file.svg (matplotlib).")] = None,
) -> None:
    """Measure the memory of keys and values over time: run to completion, padded, and on the ring."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    if workload not in workloads.WORKLOADS:
        raise typer.BadParameter(f"{workload!r} is not one of {', '.join(workloads.WORKLOADS)}")
    with console.status(f"loading {model}"):
        loaded = models.load(model)
    requests = workloads.WORKLOADS[workload](loaded.vocab_size)
    curves = []
    for mode in memory.MODES:
        with console.status(mode):
            curves.append(memory.run(loaded, requests, mode, rows))
    console.print(memory.report(curves))
    if output is not None:
        output.write_text("".join(json.dumps(curve.figures()) + "\n" for curve in curves))
    if plot is not None:
        try:
            memory.plot(plot, curves)
        except ConfigError as error:
            raise typer.BadParameter(error.message) from error


@app.command("neighbour")
def neighbour_command(
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1, ... or cpu, where neighbour and time are a script.")
    ],
    queries: Annotated[int, typer.Option(help="Number of queries.", min=8)] = 200,
    seed: Annotated[int, typer.Option(help="Of their lengths and tokens.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write all moments as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the timeline, such as file.svg (matplotlib).")
    ] = None,
) -> None:
    """Run queries while a neighbour takes up to 60 % of the memory and leaves; 1 where it shows."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    with console.status("two runs of all queries"):
        stand = neighbour_stand.make_stand(device, queries, seed)
        alone, beside, seconds = neighbour.measure(stand, console.print)
    found = neighbour_show.checks(alone, beside)
    console.print(neighbour_show.timeline(beside), neighbour_show.verdict(found, beside))
    console.print(
        f"{alone.seconds:.1f} s undisturbed, {beside.seconds:.1f} s beside it, {seconds:.1f} s in all"
    )
    if output is not None:
        output.write_text(json.dumps(neighbour_show.figures(alone, beside)) + "\n")
    if plot is not None:
        try:
            neighbour_show.plot(plot, alone, beside)
        except ConfigError as error:
            raise typer.BadParameter(error.message) from error
    if not all(check.holds for check in found):
        raise typer.Exit(1)


@app.command("demo")
def demo_command() -> None:
    """Show a preemption on the real daemon: park, urgent answer, resume, equal tokens. Needs no GPU."""
    console = Console()
    if not demo.report(console, demo.run(console)):
        raise typer.Exit(1)


@app.command("models")
def models_command(
    family: Annotated[str, typer.Option(help="Only these families, separated by commas; prints them.")] = "",
    output: Annotated[Path, typer.Option(help="Page to write.")] = Path("docs/model-support.md"),
) -> None:
    """Serve a tiny model of every causal-LM family of transformers and write what came of it."""
    console = Console()
    torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.
    names = family.split(",") if family else families.family_names()
    supports = []
    for name in names:
        with console.status(name):
            supports.append(model_support.check_family(name))
    if family:
        for support in supports:
            console.print(support)
        return
    output.write_text(support_table.render(supports))
    if bad := [support.family for support in supports if support.outcome not in {"exact", "refused"}]:
        raise SystemExit(f"served otherwise than exactly: {', '.join(bad)}")


@app.command("soak")
def soak_command(  # noqa: PLR0917 - typer calls it by name
    schedules: Annotated[int, typer.Option(help="How many to play.")] = 200,
    seed: Annotated[int, typer.Option(help="Number of the first schedule; the others count on.")] = 0,
    batch: Annotated[str, typer.Option(help='"auto", "padded" or "ring".')] = "auto",
    family: Annotated[str, typer.Option(help="Families, separated by commas.")] = ",".join(soak.FAMILIES),
    rows: Annotated[int, typer.Option(help="Rows of the larger batches.")] = 3,
    dtype: Annotated[
        str, typer.Option(help='"float32", or "bfloat16" on a deterministic engine.')
    ] = "float32",
    device: Annotated[str, typer.Option(help="Where the models run.")] = "cpu",
    workers: Annotated[int, typer.Option(help="Processes that play.")] = os.cpu_count() or 1,
) -> None:
    """Play random schedules of submit, park, resume and cancel; every query must equal its solo run."""
    console = Console()
    torch.set_num_threads(1)  # Tiny tensors: more threads only wait for each other.
    options = soak.Options(schedules, seed, batch, tuple(family.split(",")), rows, dtype, device, workers)
    report = soak.run(
        options, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
    )
    for name, why in report.skipped.items():
        console.print(f"refused {name}: {why}", markup=False, soft_wrap=True)
    batches = ", ".join(f"{name} {kind}" for name, kind in report.batches.items())
    console.print(f"batches: {batches}", soft_wrap=True)
    console.print(report.summary(), markup=False, highlight=False, soft_wrap=True)
    if not report.passed:
        raise typer.Exit(1)


@app.command("chaos")
def chaos_command(  # noqa: PLR0917 - typer calls it by name
    duration: Annotated[float, typer.Option(help="Seconds in which things die.")] = 600.0,
    jobs: Annotated[int, typer.Option(help="Submitted over that time.")] = 2000,
    daemons: Annotated[int, typer.Option(help="Daemons that share the queue.")] = 4,
    rows: Annotated[int, typer.Option(help="Rows of each.")] = 4,
    step: Annotated[float, typer.Option(help="Seconds of an engine's step.")] = 0.02,
    lease: Annotated[float, typer.Option(help="Seconds of a lease.")] = 2.0,
    every: Annotated[float, typer.Option(help="Mean seconds between two faults.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of jobs and faults.")] = 0,
) -> None:
    """Kill daemons, engines and Redis while jobs run and are watched; nothing may be lost or doubled."""
    console = Console()
    options = chaos.Options(
        duration_s=duration,
        jobs=jobs,
        daemons=daemons,
        rows=rows,
        step_s=step,
        lease_s=lease,
        every_s=every,
        seed=seed,
    )

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    configure_logging("error", "auto")
    tally = chaos.run(options, say)
    for line in tally.lines():
        say(line)
    if not tally.passed:
        raise typer.Exit(1)


@app.command("planner")
def planner_command(
    policy: Annotated[str, typer.Option(help="Registered policies, separated by commas.")] = "priority",
    waiting: Annotated[str, typer.Option(help="Queries in line, separated by commas.")] = ",".join(
        map(str, planner.WAITING)
    ),
    rows: Annotated[str, typer.Option(help="Rows, separated by commas.")] = ",".join(map(str, planner.ROWS)),
    steps: Annotated[int, typer.Option(help="Plans timed in each case.", min=2)] = 300,
) -> None:
    """Time a plan by waiting queries and rows, from scratch and from a line that is kept; needs no model."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    timings = []
    for name in policy.split(","):
        for queued in waiting.split(","):
            for count in rows.split(","):
                with console.status(f"{name}, {queued} waiting, {count} rows"):
                    timings.append(planner.measure(name, int(queued), int(count), steps))
    console.print(planner.report(timings))


@app.command("load")
def load_command(  # noqa: PLR0917 - typer calls it by name
    jobs: Annotated[int, typer.Option(help="Jobs of each kind of work of the queue.")] = 12_000,
    window: Annotated[int, typer.Option(help="Jobs a claim, and a pipeline.")] = 60,
    waiting: Annotated[int, typer.Option(help="Jobs submitted over gRPC that nobody runs.")] = 20_000,
    at_once: Annotated[int, typer.Option(help="Submits under way at any time.")] = 64,
    rounds: Annotated[int, typer.Option(help="Turns of each measurement and its floor.")] = 4,
    streams: Annotated[int, typer.Option(help="Open at once.")] = 1000,
    rows: Annotated[str, typer.Option(help="Of the batch: so many streams get a token a step.")] = "1000,250",
    tokens: Annotated[int, typer.Option(help="A second, of all streams together.")] = 5000,
    seconds: Annotated[float, typer.Option(help="How long tokens are timed.")] = 10.0,
    output: Annotated[Path | None, typer.Option(help="Also write every figure as JSON.")] = None,
) -> None:
    """Measure queue and front on an engine that computes nothing, each against the bare thing in turn."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    options = load.Options(
        jobs=jobs,
        window=window,
        waiting=waiting,
        at_once=at_once,
        rounds=rounds,
        streams=streams,
        rows=tuple(int(number) for number in rows.split(",")),
        tokens_per_s=tokens,
        window_s=seconds,
    )
    configure_logging("warning", "console")
    with console.status("starting") as status:
        report = load.run(options, status.update)
    load.show(console, report)
    if output is not None:
        load.write(output, report)


def main() -> None:
    """Entry point; errors of batond are one line."""
    try:
        app()
    except BatondError as error:
        raise SystemExit(f"batond.bench: {error.message}") from error


if __name__ == "__main__":
    main()
