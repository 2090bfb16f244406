"""What batonctl prints: JSON for programs, tables for people, one line for an error; and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from batond.clients import errors
from batond.clients.model import Event, JobInfo, Preempted, Queued, Resumed, ServerInfo, Started

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Exit codes by kind of error, the first that fits; 0 is success, 2 wrong usage, 130 interrupted.
EXIT_CODES: Final[tuple[tuple[type[errors.BatondClientError], int], ...]] = (
    (errors.JobEndedError, 1),
    (errors.NotFoundError, 4),
    (errors.AlreadyExistsError, 5),
    (errors.WrongStateError, 5),
    (errors.RequestError, 3),
    (errors.AccessError, 6),
    (errors.RetryLaterError, 7),
    (errors.TimeoutExpiredError, 8),
    (errors.BatondClientError, 9),
)
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_CODES_HELP: Final = (
    "Exit codes: 0 success, 1 the job failed or was cancelled, 2 wrong usage, 3 wrong request, 4 not found,"
    " 5 conflict, 6 access denied, 7 unavailable or exhausted, 8 time over, 9 other errors, 130 interrupted."
)
#: Longer waits are told in minutes.
SHORT_S: Final = 180


def exit_code(error: errors.BatondClientError) -> int:
    """Gives the exit code for an error."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def error_line(error: errors.BatondClientError) -> str:
    """Puts an error into one line: what happened, what to do, the daemon's constant."""
    fields = "; ".join(f"{name}: {what}" for name, what in error.fields.items() if what not in error.message)
    parts = [str(error), fields, f"[{error.reason}]" if error.reason else ""]
    if error.retry_after_s is not None:
        parts.append(f"retry in {error.retry_after_s:g} s")
    return " ".join(" ".join(part for part in parts if part).split())


def usage_line(error: Exception) -> str:
    """Puts an error of usage into one line."""
    return f"{_usage(error)} (see batonctl --help)"


def error_object(error: Exception) -> dict[str, Any]:
    """Gives an error as `--json` has it on standard error, and `bulk` beside a line's job; docs/batonctl.md.

    Args:
        error: One of the clients', or else one of usage.
    """
    if not isinstance(error, errors.BatondClientError):
        known = errors.BatondClientError(_usage(error))
        return _error("usage", known, "see batonctl --help", EXIT_USAGE)
    return _error(error_kind(type(error)), error, error.hint, exit_code(error))


def error_kind(kind: type[errors.BatondClientError]) -> str:
    """Names a class of errors as JSON has it: `NotFoundError` is "not_found"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Error")).lower()


def _error(kind: str, error: errors.BatondClientError, hint: str, code: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "message": error.message,
        "hint": hint,
        "reason": error.reason,
        "status": error.code.name if error.code is not None else "",
        "details": error.details,
        "fields": error.fields,
        "retry_after_s": error.retry_after_s,
        "exit_code": code,
    }


def _usage(error: Exception) -> str:
    # format_message names the option; not every exception that may come here has it.
    format_message = getattr(error, "format_message", lambda: str(error))
    return " ".join(format_message().split())


def to_json(value: object) -> str:
    """Gives one line of JSON; an event says in "event" what it is. JSON knows no infinity: it is null."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def event_line(event: Event) -> str:
    """Says in a line what became of a job's place; empty for output and the end, printed anyway."""
    match event:
        case Queued():
            place = f"place {event.position}" if event.position else "waiting"
            start = f", start {_about(event.estimated_start_time)}" if event.estimated_start_time else ""
            return f"-- queued in {event.effective_sla_class}: {place}{start}"
        case Started():
            return f"-- started after {event.queue_time_s:.3f} s{_because(event.reason)}"
        case Preempted():
            kept = "KV kept" if event.kept else "to be computed again"
            return f"-- {_choice(event.choice)}preempted, {kept}{_because(event.reason)}"
        case Resumed():
            return f"-- {_choice(event.choice)}resumed{_because(event.reason)}"
        case _:
            return ""


def _about(start: datetime) -> str:
    """Gives an expected start as far as it deserves: in whole seconds or minutes."""
    left_s = max(0.0, (start - datetime.now(UTC)).total_seconds())
    return f"in about {left_s:.0f} s" if left_s < SHORT_S else f"in about {left_s / 60:.0f} min"


def _because(reason: str) -> str:
    """Gives the daemon's constant as it is: it may be newer than this program."""
    return f": {reason}" if reason else ""


def _choice(choice: int) -> str:
    return f"choice {choice} " if choice else ""


def job_table(job: JobInfo) -> Table:
    """Draws one job."""
    table = Table.grid(padding=(0, 2))
    rows: list[tuple[str, object]] = [
        ("job", job.job_id),
        ("tenant", job.tenant),
        ("state", job.state),
        ("class", job.effective_sla_class),
        ("finish reason", job.finish_reason if job.state.final else ""),
        ("error", f"{job.error_message} [{job.error_reason}]" if job.error_reason else ""),
        ("position", job.queue_position or ""),
        ("start", _about(job.estimated_start_time) if job.estimated_start_time else ""),
        ("queued for", f"{job.queue_time_s:.3f} s"),
        ("tokens", f"{job.prompt_tokens} + {job.output_tokens}"),
        ("cached", f"{job.cached_prompt_tokens} tokens of the prompt" if job.cached_prompt_tokens else ""),
        ("preemptions", job.preemptions),
        ("recomputed", job.recomputed_tokens),
        ("attempts", job.attempts),
        ("created", _when(job.created_time)),
        ("started", _when(job.started_time)),
        ("finished", _when(job.finished_time)),
        ("deadline", _when(job.deadline)),
        *((f"label {name}", value) for name, value in job.labels.items()),
        ("text", job.text),
        *((f"choice {choice.index}", choice.text) for choice in job.choices[1:]),
    ]
    return _filled(table, rows)


def logprobs_table(job: JobInfo) -> Table:
    """Draws the log-probabilities of a job: one line a token, those of the prompt first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("place", "token", "logprob"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("likeliest")
    several = len(job.choices) > 1
    parts = [("prompt ", job.prompt_logprobs)]
    if several:
        parts += [(f"{choice.index}: ", choice.logprobs) for choice in job.choices]
    else:
        parts += [("", job.logprobs)]
    for name, tokens in parts:
        for place, one in enumerate(tokens):
            logprob = "" if one.logprob is None else f"{one.logprob:.4f}"
            likeliest = "  ".join(f"{top.token_id} {top.logprob:.4f}" for top in one.top)
            table.add_row(f"{name}{place}", str(one.token_id), logprob, likeliest)
    return table


def jobs_table(jobs: Iterable[JobInfo]) -> Table:
    """Draws a listing."""
    jobs = list(jobs)
    table = Table(box=None, pad_edge=False, header_style="bold")
    # Ids are what the other commands are given: on a narrow terminal something else is cut.
    table.add_column("job", no_wrap=True, min_width=max((len(job.job_id) for job in jobs), default=0))
    for name in ("state", "class"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "preemptions"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("created", no_wrap=True)
    for job in jobs:
        cells = (
            job.job_id,
            job.state,
            job.effective_sla_class,
            str(job.output_tokens),
            str(job.preemptions),
            _when(job.created_time),
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def info_table(info: ServerInfo) -> Table:
    """Draws what a daemon says of itself."""
    classes = ", ".join(
        one.name if one.preemptible else f"{one.name} (never parked)" for one in info.sla_classes
    )
    rows: list[tuple[str, object]] = [
        ("version", info.version),
        ("state", f"{info.state} {info.state_message}".strip()),
        ("model", info.model),
        ("device", info.device),
        ("batch", f"{info.batch_kind}, {info.rows} rows ({info.batch_reason})"),
        ("preemption", info.preemption_mode),
        ("policy", info.policy),
        ("classes", classes),
        ("default class", info.default_sla_class),
        ("longest query", f"{info.max_query_tokens} tokens (prompt + max_tokens)"),
        ("KV", f"{info.kv_bytes_per_token} bytes a token"),
        ("host pool", f"{info.host_pool_bytes / (1 << 20):.1f} MiB"),
        ("largest request", f"{info.max_message_bytes} bytes"),
        ("up for", f"{info.uptime_s:.0f} s"),
        ("you are", info.tenant),
        ("libraries", ", ".join(f"{name} {version}" for name, version in info.library_versions.items())),
    ]
    return _filled(Table.grid(padding=(0, 2)), rows)


def _filled(table: Table, rows: Iterable[tuple[str, object]]) -> Table:
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value != "":
            # Text: what tenants write is never taken for markup.
            table.add_row(name, Text(str(value)))
    return table


def _when(time: datetime | None) -> str:
    return time.astimezone().isoformat(sep=" ", timespec="seconds") if time else ""


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"event": type(value).__name__.lower(), **plain} if isinstance(value, Event) else plain
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
