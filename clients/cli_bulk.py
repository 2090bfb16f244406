"""The command `batonctl bulk`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from batond.clients import cli_output
from batond.clients.bulk import RETRY, Bulk, own_stdin
from batond.clients.bulk_output import Results, Stream, UnusableOutputError
from batond.clients.cli_input import (
    ClassOption,
    IgnoreEosOption,
    JsonOption,
    LabelOption,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    Settings,
    StopOption,
    TemperatureOption,
    TimeLimitOption,
    TopKOption,
    TopPOption,
    job_options,
)
from batond.clients.errors import BatondClientError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.clients.bulk_output import Output

DEFAULT_PARALLEL = 64
MOST_PARALLEL = 4096
DEFAULT_PATIENCE_S = 600.0
DRAW_EVERY_S = 0.25


class BulkFileError(BatondClientError):
    """The input can't be read any more, or the output not be written."""

    hint = "mend that; the same command goes on"


def bulk(
    ctx: typer.Context,
    jobs: Annotated[
        str, typer.Argument(metavar="JOBS", help="File of JSON lines, a job each; '-' is standard input.")
    ],
    *,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="Where results go; '-' is standard output."),
    ],
    parallel: Annotated[
        int, typer.Option(min=1, max=MOST_PARALLEL, help="Most jobs submitted and not ended.")
    ] = DEFAULT_PARALLEL,
    patience_s: Annotated[
        float,
        typer.Option("--patience", min=0.0, metavar="SECONDS", help="End after so long without an answer."),
    ] = DEFAULT_PATIENCE_S,
    sla_class: ClassOption = None,
    model: ModelOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    time_limit_s: TimeLimitOption = None,
    label: LabelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a file of jobs, and write a line for each as it ends; the same command again goes on.

    A line is an object such as {"prompt": "...", "max_tokens": 64}; the options here are for what lines leave
    out. After an interrupt or a crash the same command goes on where it was: no job runs, and no line is
    written, twice. It waits while a queue or quota is full. Exit code 1 says that a line has an error.
    """
    defaults = job_options(
        label,
        sla_class=sla_class,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        time_limit_s=time_limit_s,
    )
    chosen: Settings = ctx.obj
    with _opened(jobs, output) as (source, results):
        run = _Run(chosen, source, results, shown=not as_json and sys.stderr.isatty())
        complete = False
        try:
            asyncio.run(run.go(defaults=defaults, parallel=parallel, patience_s=patience_s))
            complete = True
        except BatondClientError:  # Some are of the kinds below, too.
            raise
        except ValueError as error:  # What `Settings.client` says of a token.
            raise typer.BadParameter(str(error)) from error
        except OSError as error:
            raise BulkFileError(f"{error.filename or f'{jobs} or {output}'}: {error.strerror}") from error
        except UnusableOutputError as error:
            raise typer.BadParameter(str(error)) from error
        finally:
            _tell(results, complete=complete, as_json=as_json, to_file=output != "-")
    if results.counts.failed or results.counts.rejected:
        raise typer.Exit(1)


class _Run:
    """A run, and its picture on standard error."""

    def __init__(self, settings: Settings, source: BinaryIO, results: Output, *, shown: bool) -> None:
        self._settings, self._source, self._results, self._shown = settings, source, results, shown
        self._size_bytes = os.fstat(source.fileno()).st_size

    async def go(self, **how: Any) -> None:
        async with self._settings.async_client(RETRY) as client:
            await client.server_info()  # Who isn't let in, or has the wrong address, is told before all else.
            bulk = Bulk(client, self._results, **how)
            drawing = asyncio.create_task(self._draw(bulk)) if self._shown else None
            try:
                await bulk.run(self._source)
            finally:
                if drawing is not None:
                    drawing.cancel()
                    await asyncio.gather(drawing, return_exceptions=True)

    async def _draw(self, bulk: Bulk) -> None:
        columns = (
            SpinnerColumn(),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as picture:
            task = picture.add_task("", total=self._size_bytes or None)
            while True:
                counts, progress = self._results.counts, bulk.progress
                words = f"{counts.total} done, {progress.in_flight} under way"
                if wrong := counts.failed + counts.rejected:
                    words += f", {wrong} with errors"
                if bulk.pause:
                    words += f"; waiting: {bulk.pause}"
                picture.update(
                    task, completed=progress.skipped_bytes + progress.done_bytes, description=words
                )
                await asyncio.sleep(DRAW_EVERY_S)


@contextlib.contextmanager
def _opened(jobs: str, output: str) -> Iterator[tuple[BinaryIO, Output]]:
    """Opens both ends."""
    with contextlib.ExitStack() as stack:
        try:
            source = own_stdin() if jobs == "-" else open(jobs, "rb")  # noqa: SIM115, PTH123 -- its reader closes it
            if output != "-" and _is_open(Path(output), source):
                raise typer.BadParameter("--output must be another file than the input")
            results: Output = Stream() if output == "-" else Results(Path(output))
        except OSError as error:
            raise typer.BadParameter(f"{error.filename}: {error.strerror}") from error
        except UnusableOutputError as error:
            raise typer.BadParameter(str(error)) from error
        stack.callback(results.close)
        yield source, results


def _is_open(path: Path, file: BinaryIO) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))


def _tell(results: Output, *, complete: bool, as_json: bool, to_file: bool) -> None:
    """Sums it up: as JSON on standard output, unless results are there; else on standard error."""
    counts = results.counts
    if as_json:
        summary = {
            "lines": counts.total,
            "succeeded": counts.succeeded,
            "failed": counts.failed,
            "rejected": counts.rejected,
            "earlier": results.earlier,
            "complete": complete,
        }
        typer.echo(cli_output.to_json(summary), err=not to_file)
        return
    words = f"-- {counts.total} lines: {counts.succeeded} succeeded, {counts.failed} failed"
    words += f", {counts.rejected} rejected"
    if results.earlier:
        words += f" ({results.earlier} of them before)"
    if not complete and to_file:
        words += "; not all are done: the same command goes on"
    typer.echo(words, err=True)
