"""How batonctl prints jobs and streams: text or tables for people, JSON for programs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from batond.clients import cli_output, outcome
from batond.clients.errors import CallCancelledError
from batond.clients.model import Chunk, Finished, JobInfo

if TYPE_CHECKING:
    from rich.console import RenderableType

    from batond.clients.stream import JobStream


#: Columns of a table that goes to a pipe or a file, where there is no edge to cut it at.
PIPE_COLUMNS = 400


def console() -> Console:
    """Where tables go."""
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, soft_wrap=False, width=None if narrow else PIPE_COLUMNS)


def table(drawn: RenderableType) -> None:
    """Prints a table. In a pipe or a file nothing follows the last cell of a line: no padding to its edge."""
    out = console()
    if out.is_terminal:
        out.print(drawn)
        return
    with out.capture() as captured:
        out.print(drawn)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def follow(stream: JobStream, *, as_json: bool, verbose: bool = False) -> None:
    """Prints a stream as it comes; raises if the job does not succeed.

    As text, choice 0 is printed as it grows; other choices and log-probabilities follow at the end.
    With `verbose`, what else happens goes to standard error, one line each.
    """
    job: JobInfo | None = None
    for event in stream:
        if isinstance(event, Finished):
            job = event.job
        if as_json:
            typer.echo(cli_output.to_json(event))
        elif isinstance(event, Chunk) and event.choice == 0:
            typer.echo(event.text, nl=False)
            sys.stdout.flush()
        if verbose and (line := cli_output.event_line(event)):
            typer.echo(line, err=True)
    if job is None:
        raise CallCancelledError("the stream was closed before its end")
    if not as_json:
        typer.echo()
        for choice in job.choices[1:]:
            typer.echo(f"-- choice {choice.index}\n{choice.text}")
        _show_logprobs(job)
    outcome.succeeded(job)


def show(job: JobInfo, *, as_json: bool) -> None:
    """Prints a job."""
    if as_json:
        typer.echo(cli_output.to_json(job))
        return
    table(cli_output.job_table(job))
    _show_logprobs(job)


def brief(job: JobInfo, *, as_json: bool) -> None:
    """Prints a job in one line."""
    typer.echo(cli_output.to_json(job) if as_json else f"{job.job_id} {job.state}")


def _show_logprobs(job: JobInfo) -> None:
    if job.prompt_logprobs or job.logprobs or any(choice.logprobs for choice in job.choices):
        table(cli_output.logprobs_table(job))
