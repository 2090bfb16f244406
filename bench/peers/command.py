"""`python -m batond.bench peers`."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from batond.bench.gpu.run import DTYPES
from batond.bench.gpu.sizes import SHAPES
from batond.bench.peers import run as peers_bench
from batond.bench.peers import tables
from batond.bench.peers.run import DEFAULTS, PEERS, WORKLOADS
from batond.bench.peers.task import Urgency
from batond.bench.progress import TABLE_WIDTH, teller

_URGENCY = Urgency()
_GIB = 1 << 30


def peers_command(  # noqa: PLR0917 - typer calls it by name
    peer: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}, separated by commas.")] = ",".join(PEERS),
    what: Annotated[
        str, typer.Option(help="saturation, urgent, or both with a comma.")
    ] = "saturation,urgent",
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = DEFAULTS.shape,
    layers: Annotated[int, typer.Option(help="Layers of it; 0 is all.", min=0)] = 0,
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="A card, or cpu, where times mean nothing.")] = DEFAULTS.device,
    threads: Annotated[int, typer.Option(help="Of torch on a CPU; 0 leaves them.")] = DEFAULTS.threads,
    workload: Annotated[
        str, typer.Option(help=f"{', '.join(WORKLOADS)}, or the CSV of a trace.")
    ] = DEFAULTS.workload,
    window: Annotated[float, typer.Option(help="Busiest seconds of a trace; 0 is all.")] = DEFAULTS.window_s,
    requests: Annotated[int, typer.Option(help="Of the workload, evenly of a trace; 0 is all.")] = 0,
    most_tokens: Annotated[
        int, typer.Option(help="Longer requests of a trace are left out.")
    ] = DEFAULTS.most_tokens,
    shorter: Annotated[int, typer.Option(help="Divide all lengths by this.")] = 1,
    rows: Annotated[str, typer.Option(help="Requests that run at once, separated by commas.")] = ",".join(
        map(str, DEFAULTS.rows)
    ),
    repeats: Annotated[int, typer.Option(help="Runs of the workload for each.")] = 1,
    urgent_rows: Annotated[int, typer.Option(help="Less urgent requests, and rows.")] = _URGENCY.rows,
    fill_prompt: Annotated[int, typer.Option(help="Their prompts.")] = _URGENCY.fill_prompt_tokens,
    fill_output: Annotated[int, typer.Option(help="Their outputs.")] = _URGENCY.fill_output_tokens,
    urgent_prompt: Annotated[int, typer.Option(help="Prompt of an urgent request.")] = _URGENCY.prompt_tokens,
    urgent_output: Annotated[int, typer.Option(help="Output of it.")] = _URGENCY.output_tokens,
    urgents: Annotated[int, typer.Option(help="Urgent requests.")] = _URGENCY.count,
    memory_share: Annotated[
        float, typer.Option(help="Part of the card that a peer may take.")
    ] = DEFAULTS.memory_share,
    host_gib: Annotated[
        float, typer.Option(help="Host memory for KV that has lost its place.")
    ] = DEFAULTS.host_bytes / _GIB,
    limit: Annotated[float, typer.Option(help="Seconds of each peer's process.")] = DEFAULTS.limit_s,
    path: Annotated[
        list[str] | None, typer.Option(help="PEER=FOLDER put before its Python path; may be repeated.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="PEER.OPTION=JSON of a peer itself; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and token ids.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write every figure as JSON.")] = None,
) -> None:
    """Run batond and other engines on the same model shape and requests; who is not installed is skipped."""
    wanted = set(what.split(","))
    if not wanted or wanted - {"saturation", "urgent"}:
        raise typer.BadParameter(f"--what is of saturation, urgent, not {what!r}")
    urgency = Urgency(
        rows=urgent_rows,
        fill_prompt_tokens=fill_prompt,
        fill_output_tokens=fill_output,
        prompt_tokens=urgent_prompt,
        output_tokens=urgent_output,
        count=urgents,
    )
    options = peers_bench.Options(
        peers=tuple(peer.split(",")),
        shape=shape,
        layers=layers or None,
        dtype=dtype,
        device=device,
        threads=threads,
        workload=workload if "saturation" in wanted else "",
        window_s=window,
        requests=requests,
        most_tokens=most_tokens,
        shorter=shorter,
        rows=_numbers(rows),
        repeats=repeats,
        urgency=urgency if "urgent" in wanted else None,
        memory_share=memory_share,
        host_bytes=int(host_gib * _GIB),
        limit_s=limit,
        paths=_paths(path or []),
        settings=_settings(set_ or []),
        seed=seed,
    )
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    report = peers_bench.run(options, teller())
    tables.show(console, report)
    if output is not None:
        output.write_bytes(msgspec.json.encode(report) + b"\n")
    if any(one.failures for one in report.peers):
        raise typer.Exit(1)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--rows is whole numbers with commas between, not {text!r}") from error


def _paths(given: list[str]) -> dict[str, tuple[str, ...]]:
    paths: dict[str, tuple[str, ...]] = {}
    for one in given:
        peer, equals, folder = one.partition("=")
        if not (equals and folder):
            raise typer.BadParameter(f"--path is PEER=FOLDER, not {one!r}")
        paths[peer] = (*paths.get(peer, ()), folder)
    return paths


def _settings(given: list[str]) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {}
    for one in given:
        name, equals, value = one.partition("=")
        peer, dot, option = name.partition(".")
        try:
            parsed = json.loads(value)
        except ValueError as error:
            raise typer.BadParameter(f"--set is PEER.OPTION=JSON, not {one!r}") from error
        if not (equals and dot and option):
            raise typer.BadParameter(f"--set is PEER.OPTION=JSON, not {one!r}")
        settings.setdefault(peer, {})[option] = parsed
    return settings
