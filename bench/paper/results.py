"""The lines of the tables, worked out once for console, CSV and figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.bench.paper.run import CaseReport, MethodRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One method in one column of a table; None is not run, or not known. Ratios are to run-to-completion.

    Attributes:
        table: 1 or 2.
        batch: Rows.
        method: Name of the mode, or "transformers".
        queries: That were run.
        seconds: They took; the median of all rounds.
        least_s: In the shortest round.
        most_s: In the longest round.
        predicted_s: They were predicted to take.
        tokens_per_s: Tokens emitted a second.
        steps: Decode steps.
        idle_row_steps: Rows times steps that computed nothing for anybody.
        ratio: Time of run-to-completion over this one's.
        predicted_ratio: The same of the predictions.
        published_ratio: The same in the paper.
        step_ratio: Decode steps of run-to-completion over this one's, in this run.
        published_length_step_ratio: The same of the whole workload at the published lengths, by arithmetic.
        whole_s: Predicted for the whole workload at the lengths of the run.
        whole_ratio: Ratio of these.
        padded_ratio: Time of run-to-completion over this one's, both on padded tensors.
    """

    table: int
    batch: int
    method: str
    queries: int
    seconds: float | None = None
    least_s: float | None = None
    most_s: float | None = None
    predicted_s: float | None = None
    tokens_per_s: float | None = None
    steps: int | None = None
    idle_row_steps: int | None = None
    ratio: float | None = None
    predicted_ratio: float | None = None
    published_ratio: float | None = None
    step_ratio: float | None = None
    published_length_step_ratio: float | None = None
    whole_s: float | None = None
    whole_ratio: float | None = None
    padded_ratio: float | None = None

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to the outcome."""
        if self.seconds is None or self.predicted_s is None:
            return None
        return self.predicted_s / self.seconds - 1


def lines(report: CaseReport) -> Iterator[Line]:
    """The lines of a column, plain transformers last."""
    base = report.methods[0]
    padded = {curve.mode: curve.seconds for curve in report.memory}
    for one in report.methods:
        outcome = one.outcome
        yield Line(
            table=report.case.table,
            batch=report.case.rows,
            method=one.mode,
            queries=report.run_queries,
            seconds=_seconds(one),
            least_s=one.spread_s and one.spread_s[0],
            most_s=one.spread_s and one.spread_s[1],
            predicted_s=one.predicted.seconds,
            tokens_per_s=None if outcome is None else outcome.output_tokens / outcome.seconds,
            steps=one.predicted.steps if outcome is None else outcome.steps,
            idle_row_steps=None if outcome is None else outcome.idle_row_steps,
            ratio=_ratio(_seconds(base), _seconds(one)),
            predicted_ratio=_ratio(base.predicted.seconds, one.predicted.seconds),
            published_ratio=_published(report, one),
            step_ratio=_ratio(base.predicted.steps, one.predicted.steps),
            published_length_step_ratio=_ratio(base.published_steps, one.published_steps),
            whole_s=one.whole.seconds,
            whole_ratio=_ratio(base.whole.seconds, one.whole.seconds),
            padded_ratio=_ratio(padded.get(base.mode), padded.get(one.mode)),
        )
    if report.plain is not None:
        plain = report.plain
        yield Line(
            table=report.case.table,
            batch=report.case.rows,
            method="transformers",
            queries=report.run_queries or report.case.queries,
            seconds=plain.seconds if plain.complete else None,
            predicted_s=None if plain.complete else plain.whole_s,
            tokens_per_s=plain.output_tokens / plain.seconds,
            steps=plain.steps if plain.complete else None,
            ratio=_ratio(_seconds(base), plain.whole_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OverInline:
    """Time of inline over decoupled; None is not run, or not known.

    Attributes:
        measured: On the same ring.
        predicted: For the same queries.
        padded: Measured on padded tensors.
        published: In the paper.
        whole: Predicted for the whole workload.
    """

    measured: float | None
    predicted: float | None
    padded: float | None
    published: float | None
    whole: float | None


def over_inline(report: CaseReport) -> OverInline:
    """What decoupling gains."""
    by_mode = {one.mode: one for one in report.methods}
    inline, last = by_mode["inline"], by_mode["decoupled"]
    padded = {curve.mode: curve.seconds for curve in report.memory}
    return OverInline(
        measured=_ratio(_seconds(inline), _seconds(last)),
        predicted=_ratio(inline.predicted.seconds, last.predicted.seconds),
        padded=_ratio(padded.get("inline"), padded.get("decoupled")),
        published=report.case.published.over_inline,
        whole=_ratio(inline.whole.seconds, last.whole.seconds),
    )


def over_plain(report: CaseReport) -> float | None:
    """Time of plain transformers over decoupled; None if either was not run."""
    last = next(one for one in report.methods if one.mode == "decoupled")
    if report.plain is None or last.outcome is None:
        return None
    return report.plain.whole_s / last.outcome.seconds


def _seconds(one: MethodRun) -> float | None:
    return None if one.outcome is None else one.outcome.seconds


def _published(report: CaseReport, one: MethodRun) -> float | None:
    return report.case.published.over_whole if one.mode == "decoupled" else None


def _ratio(first: float | None, second: float | None) -> float | None:
    return first / second if first and second else None
