"""Traces of requests: read from CSV, cut to a window, given classes, scaled to a rate."""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from batond.policies.classes import SlaClasses

NEEDED: Final = ("arrival_s", "prompt_tokens", "output_tokens")
DEFAULT_TENANT: Final = "default"


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace.

    Attributes:
        arrival_s: Seconds from the start of the trace.
        prompt_tokens: At least 1.
        output_tokens: Tokens it emits, at least 1; also the most it asks for.
        tenant: Who pays.
        sla_class: Name of its class.
        time_limit_s: Seconds from its arrival in which its last token must be out; infinity is no limit.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = DEFAULT_TENANT
    sla_class: str = "standard"
    time_limit_s: float = math.inf


def read_trace(path: Path) -> list[Request]:
    """Read `arrival_s,prompt_tokens,output_tokens[,tenant][,class][,time_limit_s]`; sorted by arrival.

    Raises:
        ConfigError: The file can't be read, lacks a column, has no rows, or a value makes no sense; the
            message names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path} lacks the columns {', '.join(missing)}; a trace has {','.join(NEEDED)}"
                    " and may have tenant, class and time_limit_s",
                    field="trace",
                )
            requests = [_request(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace {path} can't be read: {error}", field="trace") from error
    if not requests:
        raise ConfigError(f"trace {path} has no rows", field="trace")
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(path: Path, line: int, row: Mapping[str, str | None]) -> Request:
    try:
        arrival_s = float(row["arrival_s"] or "")
        prompt, output = int(row["prompt_tokens"] or ""), int(row["output_tokens"] or "")
        limit_s = float(row.get("time_limit_s") or math.inf)
    except ValueError as error:
        raise ConfigError(f"{path}, line {line}: {error}", field="trace") from error
    if not (math.isfinite(arrival_s) and arrival_s >= 0 and prompt > 0 and output > 0):
        raise ConfigError(
            f"{path}, line {line}: arrival_s must not be negative, prompt_tokens and output_tokens must be"
            f" at least 1, not {arrival_s:g}, {prompt}, {output}",
            field="trace",
        )
    if not limit_s > 0:
        raise ConfigError(
            f"{path}, line {line}: time_limit_s must be above 0, not {limit_s:g}", field="trace"
        )
    tenant, sla_class = row.get("tenant") or DEFAULT_TENANT, row.get("class") or "standard"
    return Request(arrival_s, prompt, output, tenant, sla_class, limit_s)


def busiest_from_s(requests: Sequence[Request], window_s: float) -> float:
    """When the `window_s` seconds begin in which most requests arrive.

    Raises:
        ConfigError: The window is not above 0.
    """
    if not window_s > 0:
        raise ConfigError(f"the window must be above 0 s, not {window_s}", field="window")
    arrivals = [request.arrival_s for request in requests]
    counts = (bisect_left(arrivals, start + window_s) - place for place, start in enumerate(arrivals))
    _, first = max((count, -place) for place, count in enumerate(counts))
    return arrivals[-first]


def window(requests: Sequence[Request], start_s: float, window_s: float) -> list[Request]:
    """The requests that arrive within `window_s` seconds from `start_s` on, with arrivals from 0.

    Raises:
        ConfigError: There are none.
    """
    arrivals = [request.arrival_s for request in requests]
    kept = requests[bisect_left(arrivals, start_s) : bisect_left(arrivals, start_s + window_s)]
    if not kept:
        raise ConfigError(
            f"no request arrives in the {window_s:g} s from {start_s:g} s on; the trace has arrivals from"
            f" {arrivals[0]:g} to {arrivals[-1]:g} s",
            field="window",
        )
    return rebased(kept, 1.0)


def busiest(requests: Sequence[Request], window_s: float) -> list[Request]:
    """The requests of the `window_s` seconds in which most arrive, with arrivals from 0.

    Raises:
        ConfigError: The window is not above 0.
    """
    return window(requests, busiest_from_s(requests, window_s), window_s)


def rebased(requests: Sequence[Request], speed: float) -> list[Request]:
    """The same requests from 0 on, arriving `speed` times as fast."""
    start = requests[0].arrival_s
    return [replace(request, arrival_s=(request.arrival_s - start) / speed) for request in requests]


def with_classes(
    requests: Sequence[Request], classes: SlaClasses, by_tenant: Mapping[str, str]
) -> list[Request]:
    """Give the requests of named tenants a class.

    Raises:
        ConfigError: The trace or the mapping names an unknown class, or the mapping an unknown tenant.
    """
    tenants = {request.tenant for request in requests}
    for tenant in by_tenant:
        if tenant not in tenants:
            raise ConfigError(
                f"no tenant {tenant!r} in the trace; it has {', '.join(sorted(tenants))}", field="classes"
            )
    mapped = [
        replace(request, sla_class=by_tenant.get(request.tenant, request.sla_class)) for request in requests
    ]
    for name in {request.sla_class for request in mapped}:
        if name not in classes:
            raise ConfigError(
                f"unknown class {name!r} in trace or mapping; known are {', '.join(classes.names)}",
                field="classes",
            )
    return mapped


def with_time_limits(requests: Sequence[Request], by_class: Mapping[str, float]) -> list[Request]:
    """Give the requests of named classes a time limit, in seconds, where they have none."""
    return [
        replace(request, time_limit_s=by_class[request.sla_class])
        if request.sla_class in by_class and request.time_limit_s == math.inf
        else request
        for request in requests
    ]


def of_class(requests: Sequence[Request], name: str) -> list[Request]:
    """The requests of one class, arriving when they did.

    Raises:
        ConfigError: There are none.
    """
    kept = [request for request in requests if request.sla_class == name]
    if not kept:
        raise ConfigError(f"no request is of the class {name!r}", field="only")
    return kept
