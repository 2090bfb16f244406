"""`python -m batond.bench gpu`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import typer
from rich.console import Console

from batond.bench.gpu import run as gpu_bench
from batond.bench.gpu import tables as gpu_tables
from batond.bench.gpu.sizes import SHAPES
from batond.bench.progress import TABLE_WIDTH, teller


def gpu_command(  # noqa: PLR0917 - typer calls it by name
    shape: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}, separated by commas.")] = ",".join(
        gpu_bench.DEFAULTS.shapes
    ),
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(gpu_bench.DTYPES)}.")] = gpu_bench.DEFAULTS.dtype,
    batch: Annotated[str, typer.Option(help="Rows, separated by commas.")] = ",".join(
        map(str, gpu_bench.DEFAULTS.batches)
    ),
    context: Annotated[str, typer.Option(help="Tokens of each row, separated by commas.")] = ",".join(
        map(str, gpu_bench.DEFAULTS.contexts)
    ),
    device: Annotated[
        str, typer.Option(help="A card, or cpu, where times mean nothing.")
    ] = gpu_bench.DEFAULTS.device,
    output: Annotated[Path | None, typer.Option(help="Also write every figure as JSON.")] = None,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="One shape, fewer cells and rounds, where nothing else is said.")
    ] = False,
) -> None:
    """Measure decode, prompts, parks and urgent answers on a card against what it reaches at best."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    options = gpu_bench.Options(
        shapes=tuple(shape.split(",")),
        dtype=dtype,
        batches=_numbers("batch", batch),
        contexts=_numbers("context", context),
        device=device,
    )
    report = gpu_bench.run(options.quick() if quick else options, teller())
    gpu_tables.show(console, report)
    if output is not None:
        gpu_bench.write(output, report)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--{name} is whole numbers with commas between, not {text!r}") from error
