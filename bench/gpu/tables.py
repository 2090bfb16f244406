"""The tables of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType

    from batond.bench.gpu.ceilings import Ceilings
    from batond.bench.gpu.decode import Attention, DecodeStep
    from batond.bench.gpu.machine import CardState
    from batond.bench.gpu.parking import Parking
    from batond.bench.gpu.prompts import PromptTime
    from batond.bench.gpu.run import GpuReport, ShapeReport
    from batond.bench.gpu.timing import Spread
    from batond.bench.gpu.urgent import Answers, Urgent
    from batond.bench.gpu.witness import Seen

_NO_CARD = "No card: these times say that the bench runs, and nothing about speed."


def show(console: Console, report: GpuReport) -> None:
    """Print everything."""
    for line in heading(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(ceilings_table(report.ceilings, report.options.dtype))
    for shape in report.shapes:
        for part in shape_parts(shape):
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    if report.before is None:
        console.print(_NO_CARD)


def heading(report: GpuReport) -> list[str]:
    """On what, and how it was measured."""
    lines = [", ".join(f"{name} {value}" for name, value in report.machine.items())]
    for when, state in (("before", report.before), ("after", report.after)):
        if state is not None:
            lines.append(f"card {when}: {state_text(state)}")
    lines.append(
        f"{report.options.dtype}, {report.options.rounds} rounds; median (10th-90th percentile);"
        " of floor = floor / measured"
    )
    return lines


def state_text(state: CardState) -> str:
    """Clocks and power in one line."""
    return (
        f"SM {state.sm_mhz} MHz, memory {state.memory_mhz} MHz, {state.power_w} W, {state.state},"
        f" {state.temperature_c} C, {state.other_processes} other process(es)"
    )


def ceilings_table(ceilings: Ceilings, dtype: str) -> Table:
    """What the device reaches at best."""
    table = _table("Ceilings, measured in this run", ("what", "size", "rate"))
    mib, side = 1 << 20, ceilings.matmul_side
    copies: tuple[tuple[str, int, Spread], ...] = (
        ("copy on the device, read + written", ceilings.copy_bytes, ceilings.copy_gb_s),
        ("device to page-locked host", ceilings.host_copy_bytes, ceilings.to_host_gb_s),
        ("page-locked host to device", ceilings.host_copy_bytes, ceilings.to_device_gb_s),
    )
    for what, nbytes, rate in copies:
        table.add_row(what, f"{nbytes / mib:,.0f} MiB", f"{rate.text(1)} GB/s")
    table.add_row(f"matrix product, {dtype}", f"{side}^3", f"{ceilings.matmul_tflop_s.text(1)} TFLOP/s")
    return table


def shape_parts(shape: ShapeReport) -> list[RenderableType]:
    """Lines and tables of one shape."""
    sizes = shape.sizes
    parts: list[RenderableType] = [
        (
            f"\n{shape.shape}: {sizes.weight_bytes / 1e9:.2f} GB of weights,"
            f" {sizes.step_weight_bytes / 1e9:.2f} read a step, {sizes.kv_token_bytes / 1024:.0f} KiB of KV a"
            f" token; made in {shape.build_s:.1f} s, engine ready in {shape.engine_s:.1f} s, all in"
            f" {shape.seconds:.0f} s"
        ),
        f"batch {shape.batch}",
        *(f"left out: {one.what}: {one.why}" for one in shape.left_out),
        f"decode step: {path_text([step.seen for step in shape.steps])}",
        f"prompt: {path_text([one.seen for one in shape.prompts])}",
        steps_table(shape.steps),
    ]
    if shape.attention:
        parts.append(attention_table(shape.attention))
    parts.append(prompts_table(shape.prompts))
    if shape.parking is not None:
        parts.append(parking_table(shape.parking))
    if shape.urgent is not None:
        parts.append(urgent_table(shape.urgent))
    return parts


def path_text(seen: Sequence[Seen | None]) -> str:
    """What ran, of the last that was watched."""
    watched = [one for one in seen if one is not None]
    return watched[-1].text() if watched else "not watched"


def steps_table(steps: Iterable[DecodeStep]) -> Table:
    """Decode steps against their floor."""
    table = _table(
        "Decode step",
        (
            "rows x tokens",
            "floor, ms",
            "step, ms",
            "of floor",
            "kernels busy, ms",
            "attention, ms",
            "ready, s",
        ),
    )
    for step in steps:
        table.add_row(
            f"{step.rows} x {step.context:.0f}",
            f"{step.floor_ms:.2f}",
            step.step_ms.text(),
            f"{step.of_floor:.2f}",
            f"{step.seen.busy_ms:.2f}" if step.seen else "",
            f"{step.seen.attention_ms:.2f}" if step.seen and step.seen.attention else "",
            f"{step.ready_s:.1f}",
        )
    return table


def attention_table(attention: Iterable[Attention]) -> Table:
    """Decode attention alone."""
    table = _table(
        "Decode attention alone, all layers in one graph",
        ("rows x tokens", "KV read, MB", "ms", "GB/s", "of copy"),
    )
    for one in attention:
        table.add_row(
            f"{one.rows} x {one.context}",
            f"{one.kv_bytes / 1e6:,.0f}",
            one.time_ms.text(3),
            f"{one.gb_s:,.0f}",
            f"{one.of_copy:.2f}",
        )
    return table


def prompts_table(prompts: Iterable[PromptTime]) -> Table:
    """Prompts against their floors."""
    table = _table(
        "Prompt in one chunk, apart from the batch; times in ms",
        ("tokens", "compute floor", "weights floor", "time", "of floor", "kernels busy", "its slice"),
    )
    for one in prompts:
        table.add_row(
            f"{one.tokens}",
            f"{one.compute_floor_ms:.2f}",
            f"{one.weights_floor_ms:.2f}",
            one.time_ms.text(),
            f"{one.of_floor:.2f}",
            f"{one.seen.busy_ms:.2f}" if one.seen else "",
            one.slice_ms.text(),
        )
    return table


def parking_table(parking: Parking) -> Table:
    """A row's copies."""
    table = _table(f"Parking {parking.tokens} tokens, {parking.nbytes / 1e6:,.0f} MB", ("what", "figure"))
    for name, way in (("device to host", parking.out), ("host to device", parking.back)):
        table.add_row(f"{name}, ms", way.time_ms.text())
        table.add_row(f"{name}, GB/s", f"{way.gb_s:.1f}")
        table.add_row(f"{name}, of a page-locked copy", f"{way.of_copy:.2f}")
        table.add_row(f"{name}, checksum and books behind it, ms", way.finish_ms.text())
    table.add_row("row to slice on the device, ms", parking.extract_ms.text())
    table.add_row("slice into a row on the device, ms", parking.embed_ms.text())
    table.add_row(f"step of {parking.rows} rows alone, ms", parking.step_ms.text())
    table.add_row("the same beside copies out and in, ms", parking.beside_ms.text())
    table.add_row("longer by", f"{parking.slowdown:+.1%}")
    return table


def urgent_table(urgent: Urgent) -> Table:
    """Urgent queries, and what parks take from the batch."""
    table = _table(
        f"Whole engine of {urgent.rows} rows; urgent prompts of {urgent.prompt_tokens} tokens",
        ("what", "figure"),
    )
    table.add_row(f"step of the engine, rows of {urgent.row_tokens} tokens, ms", urgent.engine_step_ms.text())
    table.add_row(f"batch waits for a park of {urgent.parked_tokens} tokens, ms", urgent.park_ms.text())
    table.add_row("batch waits for its resume, ms", urgent.resume_ms.text())
    answers: tuple[tuple[str, Answers], ...] = (("idle", urgent.idle), ("full", urgent.full))
    for name, one in answers:
        table.add_row(
            f"first token, {name} engine, ms", f"{one.first_ms.text()}, worst {one.first_ms.worst:.2f}"
        )
        together = (
            f"{one.same_step} of {one.second_ms.rounds} with the first"  # The row is there in its step.
        )
        table.add_row(f"second token, {name} engine, ms", f"{one.second_ms.text()}, {together}")
    table.add_row(
        "rows taken for them", f"{urgent.full.parks} in {urgent.full.first_ms.rounds} urgent queries"
    )
    table.add_row("worst first token / (step + 1.3 x idle)", f"{urgent.of_bound:.2f}")
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    return table
