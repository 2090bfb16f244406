"""Figures of a run, by class and tenant."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batond.daemon.simulator.world import WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.simulator.engine import Query
    from batond.daemon.simulator.world import Outcome


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in seconds; not a number where there is nothing."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Group:
    """Figures of a class, or of a tenant in it.

    Attributes:
        sla_class: Name of the class.
        tenant: Name; empty is the whole class.
        requests: That got all their tokens; latencies, parks and the last end are theirs.
        late: That failed, past their time limit or longest queue time.
        refused: That were not accepted: too large, or the queue or the tenant's part of it was full.
        ttft_s: Arrival to first token.
        tpot_s: One token to the next, mean of a request; of those with two tokens or more.
        e2e_s: Arrival to last token.
        met: Part of all requests, late and refused ones too, within both targets of the class.
        goodput_per_s: Such requests a second, over the whole run.
        tokens_per_s: Output tokens a second while requests arrive; until the end if they do for less than
            ten seconds.
        parks: All together.
        starved_s: Longest time that a request got nowhere.
        last_end_s: When the last one ended.
    """

    sla_class: str
    tenant: str
    requests: int
    late: int
    refused: int
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    met: float
    goodput_per_s: float
    tokens_per_s: float
    parks: int
    starved_s: float
    last_end_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of a run.

    Attributes:
        policy: Name.
        groups: Every class, each followed by its tenants if there are several.
        late: Requests that failed, past their time limit or longest queue time.
        refused: Requests that were not accepted.
        parks: Rows taken.
        recomputes: Parks without room in the host pool.
        jain: Fairness of token shares over weights among tenants of a class that waited on, 1 is equal; not a
            number if no two tenants did.
        starved_s: Longest time that any request got nowhere.
        busy: Part of the time in which the daemons computed.
        rows_taken: Part of the row-seconds that were taken.
        duration_s: Until the last end.
        tokens_per_s: Prompt and output tokens a second, those computed again left in.
    """

    policy: str
    groups: tuple[Group, ...]
    late: int
    refused: int
    parks: int
    recomputes: int
    jain: float
    starved_s: float
    busy: float
    rows_taken: float
    duration_s: float
    tokens_per_s: float


def spread(values: Sequence[float]) -> Spread:
    """Percentiles by linear interpolation."""
    ordered = sorted(values)

    def at(part: float) -> float:
        if not ordered:
            return math.nan
        place = part * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return Spread(at(0.5), at(0.9), at(0.99))


def ttft_s(query: Query) -> float:
    """Arrival to first token."""
    return query.first_token_s - query.request.arrival_s


def tpot_s(query: Query) -> float:
    """Mean time from one token to the next; not a number for a single token."""
    steps = query.request.output_tokens - 1
    return (query.end_s - query.first_token_s) / steps if steps else math.nan


def e2e_s(query: Query) -> float:
    """Arrival to last token."""
    return query.end_s - query.request.arrival_s


def within_target(query: Query) -> bool:
    """Whether it was served within both targets of its class."""
    sla = query.sla
    return query.served and ttft_s(query) <= sla.ttft_target_s and not tpot_s(query) > sla.tpot_target_s


def report(outcome: Outcome) -> Report:
    """Sum up a run."""
    by_class: dict[str, list[Query]] = defaultdict(list)
    by_line: dict[tuple[str, str], list[Query]] = defaultdict(list)
    for query in outcome.queries:
        by_class[query.sla.name].append(query)
        by_line[query.sla.name, query.request.tenant].append(query)
    groups: list[Group] = []
    for name in outcome.setup.classes.names:
        if name not in by_class:
            continue
        groups.append(_group(outcome, name, "", by_class[name]))
        tenants = sorted(tenant for sla_class, tenant in by_line if sla_class == name)
        if len(tenants) > 1:
            groups += [_group(outcome, name, tenant, by_line[name, tenant]) for tenant in tenants]
    usage, duration_s = outcome.usage, max(outcome.end_s, math.ulp(1.0))
    fleet_s = duration_s * len(usage)
    return Report(
        policy=outcome.policy,
        groups=tuple(groups),
        late=sum(query.late for query in outcome.queries),
        refused=sum(query.refused for query in outcome.queries),
        parks=sum(one.parks for one in usage),
        recomputes=sum(one.recomputes for one in usage),
        jain=jain(outcome),
        starved_s=max((query.starved_s for query in outcome.queries), default=0.0),
        busy=sum(one.busy_s for one in usage) / fleet_s,
        rows_taken=sum(one.row_s for one in usage) / (fleet_s * outcome.setup.rows),
        duration_s=duration_s,
        tokens_per_s=sum(one.computed_tokens for one in usage) / duration_s,
    )


def jain(outcome: Outcome) -> float:
    """Jain's index of token shares, averaged over the windows in which tenants of a class compete.

    Counted are tenants with a request without a row at both ends of a window of ten seconds: who wants less
    than its share is not treated unfairly by getting less. (Jain, Chiu, Hawe 1984, DEC-TR-301.)
    """
    found: list[float] = []
    for before, window in zip(outcome.windows, outcome.windows[1:], strict=False):
        competing = before.waiting & window.waiting
        for name in {sla_class for sla_class, _ in competing}:
            shares = [
                window.served[line] / outcome.setup.weight(line[1]) for line in competing if line[0] == name
            ]
            if len(shares) > 1 and sum(shares) > 0:
                squares = sum(share * share for share in shares)
                found.append(sum(shares) ** 2 / (len(shares) * squares))
    return sum(found) / len(found) if found else math.nan


def _group(outcome: Outcome, name: str, tenant: str, queries: Sequence[Query]) -> Group:
    served = [query for query in queries if query.served]
    met = sum(within_target(query) for query in queries)
    duration_s = max(outcome.end_s, math.ulp(1.0))
    # Windows that lie wholly in the time of arrivals; all of them where that is short.
    arriving = int(outcome.queries[-1].request.arrival_s // WINDOW_S)
    windows = outcome.windows[:arriving] or outcome.windows
    counted_s = WINDOW_S * arriving if arriving else duration_s
    return Group(
        sla_class=name,
        tenant=tenant,
        requests=len(served),
        late=sum(query.late for query in queries),
        refused=sum(query.refused for query in queries),
        ttft_s=spread([ttft_s(query) for query in served]),
        tpot_s=spread([tpot_s(query) for query in served if query.request.output_tokens > 1]),
        e2e_s=spread([e2e_s(query) for query in served]),
        met=met / len(queries),
        goodput_per_s=met / duration_s,
        tokens_per_s=sum(
            tokens
            for window in windows
            for line, tokens in window.output.items()
            if line[0] == name and tenant in {"", line[1]}
        )
        / counted_s,
        parks=sum(query.parks for query in queries),
        starved_s=max(query.starved_s for query in queries),
        last_end_s=max((query.end_s for query in served), default=math.nan),
    )
