"""The same queries under four ways of batching, on the same kernels: what is left is scheduling.

run_to_completion   a static batch: prompts padded together, rows idle until the longest is done
pd                  prefill apart, grouped by prompt length; decode batches run to completion
inline              a free row is taken at once, the newcomer's prompt goes through the batch step
                    (vector shaping; equal to iteration-level batching, Orca)
decoupled           a free row is taken at once by a slice that is already prefilled (vector embedding)
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from batond.bench.schedule import list_schedule_steps
from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.scheduler.plan import Gate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from batond.bench.workloads import Request
    from batond.daemon.engine.model.causal import CausalModel

MODES: dict[str, dict[str, Any]] = {
    "run_to_completion": {"prefill": "inline", "gate": Gate.BATCH},
    "pd": {"prefill": "decoupled", "gate": Gate.BATCH, "chunk_tokens": None},
    "inline": {"prefill": "inline"},
    "decoupled": {"prefill": "decoupled", "chunk_tokens": None},
}
#: Published time of run-to-completion over Baton with prefill and decode decoupled, by batch size.
PUBLISHED_RATIOS = {2: 1.94, 4: 1.89, 6: 1.66, 8: 1.61, 10: 1.31}


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    Attributes:
        mode: How it was batched.
        rows: Batch size.
        seconds: Wall clock from the first submit to the last token.
        decode_steps: Forward passes of the batch.
        row_steps: decode_steps x rows.
        idle_row_steps: Row-steps that computed nothing for anybody.
        waiting_idle_share: Part of the row-steps that were idle while a query waited for a row.
        padded_columns: Sum over steps of the columns every row carries: what padding costs.
        output_tokens: Tokens emitted.
    """

    mode: str
    rows: int
    seconds: float
    decode_steps: int
    row_steps: int
    idle_row_steps: int
    waiting_idle_share: float
    padded_columns: int
    output_tokens: int


def run(model: CausalModel, requests: Sequence[Request], mode: str, rows: int) -> Result:
    """Run all requests, submitted at once, in one mode.

    Args:
        model: The model.
        requests: The queries, in order of arrival.
        mode: Key of `MODES`.
        rows: Batch size.
    """
    options = {"ready_limit": rows, **MODES[mode]}
    engine = LocalEngine(model, rows=rows, batch="padded", policy="fcfs", **options)
    ordered = sorted(requests, key=lambda r: len(r.prompt_token_ids)) if mode == "pd" else requests
    started_s = time.perf_counter()
    queries = [
        engine.submit(
            request.prompt_token_ids, SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        )
        for request in ordered
    ]
    padded_columns = 0
    while engine.queries:
        engine.step()
        padded_columns += engine.residency.batch.columns
    seconds = time.perf_counter() - started_s
    counters = engine.counters
    return Result(
        mode=mode,
        rows=rows,
        seconds=seconds,
        decode_steps=counters["decode_steps"],
        row_steps=counters["row_steps"],
        idle_row_steps=counters["idle_row_steps"],
        waiting_idle_share=counters["waiting_idle_row_steps"] / max(counters["waiting_row_steps"], 1),
        padded_columns=padded_columns,
        output_tokens=sum(len(query.output_token_ids) for query in queries),
    )


def ideal_steps(requests: Sequence[Request], rows: int) -> int:
    """Decode steps of ideal list scheduling: a query's first token comes from its prefill."""
    return list_schedule_steps([request.output_tokens - 1 for request in requests], rows)


def run_all(
    model: CausalModel, requests: Sequence[Request], sizes: Sequence[int], console: Console
) -> list[Result]:
    """Run every mode at every batch size, with a progress bar."""
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(sizes) * len(MODES))
        for rows in sizes:
            for mode in MODES:
                progress.update(task, description=f"{mode}, batch {rows}")
                results.append(run(model, requests, mode, rows))
                progress.advance(task)
    return results


def report(results: Sequence[Result], requests: Sequence[Request]) -> Table:
    """The table: times and steps, each as a ratio to run-to-completion of the same batch size."""
    table = Table(title=f"{len(requests)} queries, {sum(r.output_tokens for r in requests)} output tokens")
    table.add_column("batch", justify="right")
    table.add_column("mode")
    for name in (
        "time s",
        "time ratio",
        "published",
        "decode steps",
        "step ratio",
        "over ideal",
        "idle row-steps",
        "idle while waiting",
    ):
        table.add_column(name, justify="right")
    base = {result.rows: result for result in results if result.mode == "run_to_completion"}
    for result in results:
        first, last = base[result.rows], result.mode == "decoupled"
        ideal = ideal_steps(requests, result.rows)
        table.add_row(
            str(result.rows),
            result.mode,
            f"{result.seconds:.2f}",
            f"{first.seconds / result.seconds:.2f}",
            f"{PUBLISHED_RATIOS[result.rows]:.2f}" if last and result.rows in PUBLISHED_RATIOS else "",
            str(result.decode_steps),
            f"{first.decode_steps / result.decode_steps:.2f}",
            f"{result.decode_steps / ideal - 1:+.1%}" if last else "",
            str(result.idle_row_steps),
            f"{result.waiting_idle_share:.2%}",
            end_section=last,
        )
    return table
