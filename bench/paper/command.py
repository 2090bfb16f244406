"""`python -m batond.bench paper` and `smoke`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import torch
import typer
from rich.console import Console

from batond.bench.gpu.run import DTYPES
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes.run import MIX_SEED
from batond.bench.paper import figures, files, smoke, tables
from batond.bench.paper import run as paper_bench
from batond.bench.paper.options import Options
from batond.bench.progress import TABLE_WIDTH, teller

#: Wider than the other benchmarks' tables: a cut table helps nobody.
_WIDTH = 150


def paper_command(  # noqa: PLR0917 - typer calls it by name
    table: Annotated[str, typer.Option(help="Of 1, 2, separated by commas.")] = "1,2",
    batch: Annotated[str, typer.Option(help="Only these of 4, 8 and 2, 4, 6, 8, 10.")] = "",
    device: Annotated[str, typer.Option(help='"auto" is a card if there is one; or cuda, cpu.')] = "auto",
    shape: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}; a card's is llama-2-7b.")] = "",
    layers: Annotated[
        int | None, typer.Option(help="Layers of it, 0 is all; a card's are 4, a CPU's are all.", min=0)
    ] = None,
    dtype: Annotated[
        str, typer.Option(help=f"Of {', '.join(DTYPES)}; bfloat16 on a card, float32 on a CPU.")
    ] = "",
    mix_shorter: Annotated[
        int, typer.Option(help="Divide all lengths of Table 1 by this; 0 is 1 on a card, 32 on a CPU.", min=0)
    ] = 0,
    short_shorter: Annotated[int, typer.Option(help="Divide all lengths of Table 2 by this.", min=1)] = 1,
    queries: Annotated[int, typer.Option(help="Of Table 1.", min=1)] = 120,
    seconds: Annotated[
        float,
        typer.Option(help="Of the methods of a column together: fewer queries run if need be.", min=0),
    ] = 300.0,
    plain_seconds: Annotated[
        float, typer.Option(help="Of plain transformers in a column; 0 leaves it out.", min=0)
    ] = 120.0,
    clock: Annotated[
        str,
        typer.Option(help='"wall", or "cpu": CPU time of this process, one thread. A CPU\'s is "cpu".'),
    ] = "",
    rounds: Annotated[
        int,
        typer.Option(
            help="Runs of each method, in turns; the median counts. 0 is 1 on a card, 3 on a CPU.", min=0
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of Table 2.")] = 0,
    mix_seed: Annotated[int, typer.Option(help="Of Table 1.")] = MIX_SEED,
    output: Annotated[
        Path | None, typer.Option(help="Folder for CSV, JSON and figures; written after each column.")
    ] = None,
    formats: Annotated[str, typer.Option(help="Of the figures, separated by commas.")] = ",".join(
        figures.FORMATS
    ),
    *,
    memory: Annotated[bool, typer.Option(help="Measure KV memory, on runs of its own.")] = True,
) -> None:
    """Reproduce the published tables and figures, all methods on the same kernels, beside the paper's."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_card = device != "cpu"
    clock = clock or ("wall" if on_card else "cpu")
    if clock == "cpu":
        torch.set_num_threads(1)  # CPU time adds up over threads.
    options = Options(
        tables=_numbers("--table", table),
        batches=_numbers("--batch", batch) if batch else None,
        shape=shape or ("llama-2-7b" if on_card else "tiny"),
        layers=(4 if on_card else None) if layers is None else layers or None,
        dtype=dtype or ("bfloat16" if on_card else "float32"),
        device=device,
        queries=queries,
        mix_shorter=mix_shorter or (1 if on_card else 32),
        short_shorter=short_shorter,
        seconds=seconds,
        memory=memory,
        plain_seconds=plain_seconds,
        seed=seed,
        mix_seed=mix_seed,
        clock=clock,
        rounds=rounds or (1 if on_card else 3),
    )
    if output is not None:
        files.require(output)
        figures.require(formats.split(","))
    report = None
    for report in paper_bench.run(options, teller()):
        if output is not None:
            files.write(output, report)
            figures.draw(output, report, formats.split(","))
    console = Console()
    console.width = max(console.width, _WIDTH)
    if report is not None:
        tables.show(console, report)


def smoke_command(
    *,
    accept: Annotated[
        bool, typer.Option("--accept", help="Take what is found as what is expected from now on.")
    ] = False,
) -> None:
    """Compare what the schedules of the published workloads cost, in steps, with what is expected."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    found = smoke.measure()
    if accept:
        smoke.store(found)
    verdict = smoke.compare(smoke.load(), found)
    console.print(smoke.table(verdict))
    for line in verdict.faults:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if verdict.faults:
        raise typer.Exit(1)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{name} is whole numbers with commas between, not {text!r}") from error
