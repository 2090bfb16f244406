"""The requests of a replay: rows of a trace that fit, of a window, thinned, with classes. Pure."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batond.daemon.errors import ConfigError
from batond.daemon.simulator.options import known_classes
from batond.daemon.simulator.trace import busiest_from_s, read_trace, rebased, window, with_classes
from batond.policies.classes import DEFAULT_CLASSES, SlaClass, SlaClasses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from batond.bench.traces.options import Options
    from batond.clients.model import SlaClass as Offered
    from batond.daemon.simulator.trace import Request


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and where they are from.

    Attributes:
        requests: By arrival, from 0 on; as far apart as in the trace.
        trace_rows: Rows of the trace.
        too_long: Of them left out for their length.
        begins_s: Where the window begins in the trace.
        window_rows: Rows of the window, before they were thinned.
    """

    requests: list[Request]
    trace_rows: int
    too_long: int
    begins_s: float
    window_rows: int

    def described(self) -> str:
        """One line for people."""
        first, last = self.requests[0], self.requests[-1]
        prompts, outputs = (
            sum(getattr(one, name) for one in self.requests) for name in ("prompt_tokens", "output_tokens")
        )
        left_out = f" that fit ({self.too_long:,} are too long)" if self.too_long else ""
        return (
            f"{len(self.requests):,} of {self.window_rows:,} rows{left_out} from {self.begins_s:.0f} s on, of"
            f" {self.trace_rows:,}; {last.arrival_s - first.arrival_s:.0f} s of the trace;"
            f" {prompts:,} prompt and {outputs:,} output tokens"
        )


def choose(options: Options, classes: SlaClasses, most_tokens: int = 0) -> Workload:
    """Read the trace and choose.

    Args:
        options: What is wanted.
        classes: Those there are.
        most_tokens: Prompt and output tokens the daemon takes, after lengths were divided; 0 is no bound.

    Raises:
        ConfigError: The trace can't be read, names what there is not, or nothing is left of it.
    """
    rows = read_trace(options.trace)
    rows_left = [row for row in rows if not options.fit_tokens or _tokens(row) <= options.fit_tokens]
    shrunk = [_shrunk(row, options.shrink) for row in rows_left]
    fitting = [row for row in shrunk if not most_tokens or _tokens(row) <= most_tokens]
    if not fitting:
        most = most_tokens or options.fit_tokens
        raise ConfigError(f"no row of {options.trace} has at most {most:,} tokens", field="fit_tokens")
    classed = with_classes(_by_lot(fitting, options, classes), classes, options.classes)
    begins_s, chosen = _window(classed, options)
    kept = chosen
    if 0 < options.requests < len(chosen):
        kept = [chosen[number * len(chosen) // options.requests] for number in range(options.requests)]
    return Workload(rebased(kept, 1.0), len(rows), len(rows) - len(fitting), begins_s, len(chosen))


def _tokens(row: Request) -> int:
    return row.prompt_tokens + row.output_tokens


def _window(requests: Sequence[Request], options: Options) -> tuple[float, list[Request]]:
    """When it begins in the trace, and its requests."""
    length_s = options.window_s or float("inf")
    if options.start_s is not None:
        return options.start_s, window(requests, options.start_s, length_s)
    begins_s = busiest_from_s(requests, options.window_s) if options.window_s else requests[0].arrival_s
    return begins_s, window(requests, begins_s, length_s)


def _by_lot(requests: Sequence[Request], options: Options, classes: SlaClasses) -> list[Request]:
    """Classes by lot, where they are wanted; a row draws the same one whatever window it is seen in."""
    if not options.share:
        return list(requests)
    known_classes(options.share, classes, "share")
    dice = random.Random(options.seed)  # noqa: S311 - a repeatable workload, no secret
    drawn = dice.choices(list(options.share), list(options.share.values()), k=len(requests))
    return [replace(one, sla_class=name) for one, name in zip(requests, drawn, strict=True)]


def _shrunk(request: Request, factor: float) -> Request:
    prompt, output = (
        max(1, round(tokens / factor)) for tokens in (request.prompt_tokens, request.output_tokens)
    )
    return replace(request, prompt_tokens=prompt, output_tokens=output)


def with_targets(classes: Sequence[SlaClass], options: Options) -> SlaClasses:
    """The classes with the targets that are asked for.

    Raises:
        ConfigError: A target is of a class that there is not.
    """
    known = SlaClasses(classes)
    for field in ("ttft_s", "tpot_s"):
        targets: Mapping[str, float] = getattr(options, field)
        known_classes(targets, known, field)
    return SlaClasses(
        replace(
            one,
            ttft_target_s=options.ttft_s.get(one.name, one.ttft_target_s),
            tpot_target_s=options.tpot_s.get(one.name, one.tpot_target_s),
        )
        for one in classes
    )


def offered_classes(offered: Sequence[Offered], options: Options) -> SlaClasses:
    """The classes of a running daemon, which does not say their targets.

    Raises:
        ConfigError: A class that the trace might use has no target.
    """
    usual = {one.name: one for one in DEFAULT_CLASSES}
    for field, targets in (("ttft", options.ttft_s), ("tpot", options.tpot_s)):
        for one in offered:
            if one.name not in usual and one.name not in targets:
                raise ConfigError(
                    f"the daemon does not say the {field} target of its class {one.name}:"
                    f" give --{field} {one.name}=...",
                    field=field,
                )
    classes = [
        SlaClass(
            name=one.name,
            order=one.order,
            preemptible=one.preemptible,
            ttft_target_s=usual[one.name].ttft_target_s if one.name in usual else options.ttft_s[one.name],
            tpot_target_s=usual[one.name].tpot_target_s if one.name in usual else options.tpot_s[one.name],
        )
        for one in offered
    ]
    return with_targets(classes, options)


def prompts(requests: Sequence[Request], vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids below `vocab_size`, as many as each prompt has; the same for the same seed."""
    dice = random.Random(seed)  # noqa: S311 - prompts, no secret
    return [[dice.randrange(vocab_size) for _ in range(one.prompt_tokens)] for one in requests]


def write_requests(path: Path, requests: Sequence[Request]) -> None:
    """Write what is replayed as JSON, for others to run the same: lengths, arrivals, classes, tenants.

    Raises:
        OSError: The file can't be written.
    """
    rows: list[dict[str, Any]] = [
        {
            "arrival_s": one.arrival_s,
            "prompt_len": one.prompt_tokens,
            "output_len": one.output_tokens,
            "class": one.sla_class,
            "tenant": one.tenant,
        }
        for one in requests
    ]
    path.write_text(json.dumps(rows) + "\n", encoding="utf-8")
