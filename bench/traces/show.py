"""A replay's figures for people, and as files."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from batond.bench.traces.watch import plain
from batond.daemon.simulator.report import e2e_s, tpot_s, ttft_s, within_target
from batond.daemon.simulator.show import as_json, print_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rich.console import Console

    from batond.bench.traces.options import Options
    from batond.bench.traces.replay import Replayed, Throughput
    from batond.bench.traces.run import Result, Run
    from batond.daemon.simulator.report import Report

MOST_DRIFT: Final = (
    0.15  # Of step times during the runs; beyond, figures say more of the machine than of policies.
)
MOST_LATENESS_S: Final = 0.5  # Beyond, the clients' machine did not keep up, and the loop was not open.
CSV_COLUMNS: Final = (
    "run",
    "tenant",
    "class",
    "arrival_s",
    "sent_s",
    "first_token_s",
    "end_s",
    "prompt_tokens",
    "output_tokens",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "parks",
    "in_target",
    "end",
)


def show(console: Console, options: Options, result: Result) -> None:
    """Print the tables and what they come to."""
    for line in _head(options, result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_tables(console, reports(result))
    for line in _foot(options, result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def reports(result: Result) -> list[Report]:
    """Of each run the daemon's, then the simulator's if there is one."""
    both = ((one.report, one.predicted_report) for one in result.runs)
    return [one for pair in both for one in pair if one is not None]


def _head(options: Options, result: Result) -> Iterator[str]:
    info, fit = result.info, result.fit
    versions = ", ".join(f"{name} {version}" for name, version in sorted(info.library_versions.items()))
    yield f"{info.model} on {info.device}, {info.rows} rows, batch {info.batch_kind}; {versions}"
    yield f"{options.trace.name}: {result.workload.described()}"
    yield f"classes: {_classes(options)}; targets {_targets(result)}"
    if fit is not None:
        costs = fit.costs
        yield (
            f"{'given' if options.costs else 'measured'}: a step {costs.step_s * 1e3:.1f} ms"
            f" + {costs.row_s * 1e3:.2f} a row + {costs.cached_token_s * 1e6:.2f} us a cached token;"
            f" prompts {costs.prefill_s * 1e3:.1f} ms + {costs.prefill_token_s * 1e3:.3f} a token;"
            f" {fit.overhead_s * 1e3:.1f} ms around them, not simulated; fitted within {fit.error:.0%}"
        )
    late = f"sent {result.lateness_s * 1e3:.0f} ms late at worst"
    arrivals = f"{_arrivals(options, result)}, lengths / {options.shrink:g}"
    yield f"{len(result.requests):,} requests, {arrivals}; {late}"
    if result.lateness_s > MOST_LATENESS_S:
        yield "the clients' machine did not keep up: requests came later than they should"
    if result.one_tenant:
        yield "all tenants of the trace go by one token: the daemon can't be fair among them"
    if fit is not None:
        drifts = {one.name: one.drift for one in result.runs if not math.isnan(one.drift)}
        told = ", ".join(f"{name} {factor:.2f}" for name, factor in drifts.items())
        yield f"steps after each run, over those measured before: {told}"
        if any(abs(factor - 1) > MOST_DRIFT + fit.error for factor in drifts.values()):
            yield "the machine did not keep its speed: compare nothing below"
    for one in result.runs:
        if one.stopped:
            yield (
                f"{one.name} was stopped: {one.unfinished:,} requests have no end and count nowhere,"
                " more long ones than short ones"
            )


def _classes(options: Options) -> str:
    if options.share:
        return "by lot, " + ", ".join(f"{name} {part:g}" for name, part in options.share.items())
    if options.classes:
        return ", ".join(f"{tenant} is {name}" for tenant, name in options.classes.items())
    return "as in the trace, else standard"


def _targets(result: Result) -> str:
    setup = result.runs[0].outcome.setup
    used = [one for one in setup.classes if any(request.sla_class == one.name for request in result.requests)]
    return ", ".join(
        f"{one.name} {one.ttft_target_s:g} s and {one.tpot_target_s:g} s a token" for one in used
    )


def _arrivals(options: Options, result: Result) -> str:
    arriving_s = result.requests[-1].arrival_s
    if options.saturate:
        return "all there at once"
    if options.effective_load is None:
        return f"in {arriving_s:.0f} s, {options.rate or 1.0:g} times as fast as in the trace"
    return f"in {arriving_s:.0f} s, {options.effective_load:g} of capacity"


def _foot(options: Options, result: Result) -> Iterator[str]:
    at_saturation = "throughput at saturation" if options.saturate else "throughput"
    for one in result.runs:
        yield f"{one.name}: {at_saturation} {throughput_line(one.throughput)}"
    for one in result.runs:
        yield f"{one.name}: {_utilisation(one)}"
    for one in result.runs:
        if one.failures:
            counts = ", ".join(f"{reason} {count:,}" for reason, count in one.failures.items())
            yield f"{one.name}: not served, counted as refused: {counts}"
        lesser = sum(bool(request.lesser_class) for request in one.replayed)
        if lesser:
            yield f"{one.name}: {lesser:,} requests were served in a less urgent class than they asked for"
    yield from summary(result)


def throughput_line(done: Throughput) -> str:
    """The figure that is compared with other systems, in words."""
    requests, output, tokens = done.per_s
    busy = done.busy_output_tokens / done.busy_s
    return (
        f"{requests:.2f} requests/s, {output:,.1f} output tokens/s, {tokens:,.1f} tokens/s with prompts"
        f" ({done.requests:,} requests, {done.output_tokens:,} output tokens in {done.seconds:.1f} s);"
        f" until the last one got its row, {done.busy_s:.1f} s, {busy:,.1f} output tokens/s"
    )


def _utilisation(one: Run) -> str:
    use = one.batch
    if use is None:
        return "how full the batch was is not known: the daemon does not show it to us"
    words = f"{_percent(use.rows_taken)} of the rows of {use.decode_steps:,} decode steps were taken"
    words += f" ({_percent(use.rows_taken_waiting)} while somebody waited)"
    kv_mib, pool_mib = (nbytes / (1 << 20) for nbytes in (use.kv_peak_bytes, use.host_pool_peak_bytes))
    return f"{words}; at most {kv_mib:,.1f} MiB of KV in rows, {pool_mib:,.1f} MiB in the host pool"


def _percent(part: float) -> str:
    return "-" if math.isnan(part) else f"{part:.0%}"


def summary(result: Result) -> list[str]:
    """The two figures that choose a policy, daemon and simulator; none where nothing is compared."""
    alone, full = result.alone, result.full
    if alone is None or not full:
        return []
    lines = [_compared("daemon", alone.report, [one.report for one in full])]
    predicted = [one.predicted_report for one in full if one.predicted_report is not None]
    if alone.predicted_report is not None and len(predicted) == len(full):
        lines.append(_compared("simulated", alone.predicted_report, predicted))
    return lines


def _compared(where: str, alone: Report, full: list[Report]) -> str:
    first, lone = full[0], alone.groups[0]
    urgent = next((one for one in first.groups if one.sla_class == lone.sla_class), lone)
    line = (
        f"{where}: {urgent.sla_class} TTFT p99 {urgent.ttft_s.p99:.2f} s under {first.policy},"
        f" {urgent.ttft_s.p99 / max(lone.ttft_s.p99, math.ulp(1.0)):.2f} times its {lone.ttft_s.p99:.2f} s"
        " with nothing else on the machine"
    )
    for other in full[1:]:
        tokens, theirs = (
            next((group.tokens_per_s for group in reversed(one.groups) if not group.tenant), math.nan)
            for one in (first, other)
        )
        if theirs:
            line += f"; {_last_class(first)} {tokens / theirs - 1:+.1%} tokens/s against {other.policy}"
    return line


def _last_class(one: Report) -> str:
    return one.groups[-1].sla_class


def write_json(path: Path, options: Options, result: Result) -> None:
    """Write every figure.

    Raises:
        OSError: The file can't be written.
    """
    fit = result.fit
    path.write_text(
        as_json(
            reports(result),
            options=options.about(),
            versions=dict(result.info.library_versions),
            daemon={
                name: getattr(result.info, name)
                for name in ("version", "model", "device", "rows", "batch_kind", "kv_bytes_per_token")
            },
            workload={
                name: getattr(result.workload, name)
                for name in ("trace_rows", "too_long", "begins_s", "window_rows")
            },
            costs=None if fit is None else asdict(fit.costs),
            overhead_s=None if fit is None else fit.overhead_s,
            fit_error=None if fit is None else fit.error,
            lateness_s=result.lateness_s,
            arriving_s=result.requests[-1].arrival_s,
            stopped=result.stopped,
            runs={one.name: _of_run(one) for one in result.runs},
        )
        + "\n",
        encoding="utf-8",
    )


def _of_run(one: Run) -> Mapping[str, Any]:
    requests, output, tokens = one.throughput.per_s
    return {
        "requests": len(one.replayed),
        "unfinished": one.unfinished,
        "failures": one.failures,
        "throughput": asdict(one.throughput)
        | {"requests_per_s": requests, "output_tokens_per_s": output, "tokens_per_s": tokens},
        "batch": plain(one.batch),
        "drift": one.drift,
        "stopped": one.stopped,
    }


def write_csv(path: Path, result: Result) -> None:
    """Write a row for each request of each run, as the daemon served it; times are from the run's start.

    Raises:
        OSError: The file can't be written.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(CSV_COLUMNS)
        for run in result.runs:
            rows.writerows(_row(run.name, one) for one in run.replayed)


def _row(run: str, one: Replayed) -> list[object]:
    query = one.query
    request = query.request
    times = [ttft_s(query), tpot_s(query), e2e_s(query)] if one.ended and query.served else [math.nan] * 3
    end = "late" if query.late else one.failure or ("served" if one.ended else "stopped")
    return [
        run,
        request.tenant,
        request.sla_class,
        _cell(request.arrival_s),
        *(_cell(value) for value in (one.sent_s, query.first_token_s, query.end_s)),
        request.prompt_tokens,
        query.output_tokens,
        *(_cell(value) for value in times),
        query.parks,
        int(one.ended and within_target(query)),
        end,
    ]


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"
