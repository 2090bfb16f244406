"""The results as files: CSV for whoever draws them anew, JSON with everything."""

from __future__ import annotations

import csv
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from batond.bench.gpu.run import write as write_json
from batond.bench.paper.results import Line, lines
from batond.bench.paper.series import kept_points
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from batond.bench.paper.run import PaperReport
    from batond.bench.paper.series import Series


def require(folder: Path) -> None:
    """Make the folder, before hours of runs.

    Raises:
        ConfigError: It can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error}", field="output") from error


def write(folder: Path, report: PaperReport) -> list[Path]:
    """Write results.csv, progress.csv, memory.csv and paper.json; what was there is replaced.

    Args:
        folder: It is there.
        report: What is done so far.

    Raises:
        ConfigError: They can't be written.
    """
    try:
        names = [field.name for field in fields(Line)]
        _csv(folder / "results.csv", [*names, "error"], _results(report, names))
        _csv(folder / "progress.csv", ["case", "method", "seconds", "queries", "tokens"], _progress(report))
        _csv(
            folder / "memory.csv", ["case", "method", "seconds", "held_bytes", "live_bytes"], _memory(report)
        )
        write_json(folder / "paper.json", report)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error}", field="output") from error
    return [folder / name for name in ("results.csv", "progress.csv", "memory.csv", "paper.json")]


def _csv(path: Path, head: list[str], rows: Iterable[Iterable[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def _results(report: PaperReport, names: list[str]) -> Iterator[list[Any]]:
    for case in report.cases:
        for line in lines(case):
            yield [*(getattr(line, name) for name in names), line.error]


def _progress(report: PaperReport) -> Iterator[list[Any]]:
    for case in report.cases:
        curves: list[tuple[str, Series]] = [(one.mode, one.series) for one in case.methods if one.series]
        if case.plain is not None:
            curves.append(("transformers", case.plain.series))
        for method, series in curves:
            for point in zip(series.seconds, series.queries, series.tokens, strict=True):
                yield [case.case.name, method, *point]


def _memory(report: PaperReport) -> Iterator[list[Any]]:
    for case in report.cases:
        for curve in case.memory:
            for place in kept_points(len(curve.ends_s)):
                yield [
                    case.case.name,
                    curve.mode,
                    curve.ends_s[place],
                    curve.held_bytes[place],
                    curve.live_bytes[place],
                ]
