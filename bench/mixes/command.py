"""`python -m batond.bench mixes` and `parked`: whole workloads on the engine."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import typer
from rich.console import Console

from batond.bench import parked
from batond.bench.gpu.run import DTYPES, write
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes import run as mixes_bench
from batond.bench.mixes import tables as mixes_tables
from batond.bench.progress import TABLE_WIDTH, teller


def mixes_command(  # noqa: PLR0917 - typer calls it by name
    mix: Annotated[
        str, typer.Option(help=f"Of {', '.join(mixes_bench.MIXES)}, separated by commas.")
    ] = ",".join(mixes_bench.DEFAULTS.mixes),
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = mixes_bench.DEFAULTS.shape,
    layers: Annotated[int, typer.Option(help="Layers of it; 0 is all.", min=0)] = 4,
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = mixes_bench.DEFAULTS.dtype,
    device: Annotated[
        str, typer.Option(help="A card, or cpu, where times mean nothing.")
    ] = mixes_bench.DEFAULTS.device,
    queries: Annotated[int, typer.Option(help="Of a workload.", min=1)] = mixes_bench.DEFAULTS.queries,
    mode: Annotated[str, typer.Option(help="To run, separated by commas; others are predicted.")] = ",".join(
        mixes_bench.DEFAULTS.modes
    ),
    seconds: Annotated[
        float,
        typer.Option(help="Run as many of them as these modes take so long for; 0 only predicts.", min=0),
    ] = mixes_bench.DEFAULTS.seconds,
    shorter: Annotated[int, typer.Option(help="Divide all lengths by this.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of lengths, order and tokens.")] = mixes_bench.MIX_SEED,
    output: Annotated[Path | None, typer.Option(help="Also write every figure as JSON.")] = None,
) -> None:
    """Run the published mixes in all modes on the same kernels, and predict what each takes."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    options = mixes_bench.Options(
        mixes=tuple(mix.split(",")),
        shape=shape,
        layers=layers or None,
        dtype=dtype,
        device=device,
        queries=queries,
        modes=tuple(mode.split(",")),
        seconds=seconds,
        seed=seed,
        shorter=shorter,
    )
    report = mixes_bench.run(options, teller())
    mixes_tables.show(console, report)
    if output is not None:
        write(output, report)


def parked_command(  # noqa: PLR0917 - typer calls it by name
    queries: Annotated[int, typer.Option(help="How many.", min=1)] = parked.DEFAULTS.queries,
    rows: Annotated[int, typer.Option(help="Of the batch.", min=1)] = parked.DEFAULTS.rows,
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = parked.DEFAULTS.shape,
    layers: Annotated[int, typer.Option(help="Layers of it; 0 is all.", min=0)] = 4,
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = parked.DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="A card, or cpu.")] = parked.DEFAULTS.device,
    shorter: Annotated[int, typer.Option(help="Divide all lengths by this.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and parks.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write every figure as JSON.")] = None,
) -> None:
    """Run greedy queries without and with forced parks, on the same rows: every token must be the same."""
    options = parked.Options(
        queries=queries,
        rows=rows,
        shape=shape,
        layers=layers or None,
        dtype=dtype,
        device=device,
        seed=seed,
        shorter=shorter,
    )
    report = parked.run(options, teller())
    console = Console()
    for line in report.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        write(output, report)
    if not report.passed:
        raise typer.Exit(1)
