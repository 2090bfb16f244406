"""Who stands in line for a row, in which order, and what that takes."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING

from batond.policies.base import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batond.policies.base import Policy, QueryView, Rank


def order_claims(queries: Iterable[QueryView], policy: Policy, now_s: float) -> list[QueryView]:
    """Sort the claims: level, parked before fresh, park order, rest of the rank, seq.

    The level is the first component of the rank. A parked query takes over the level of the most urgent
    fresh query of its class where that is the better one: otherwise a fresh query that was submitted
    earlier, and aged for longer, would overtake it (rule 3 of the design, behaviour S3).

    Args:
        queries: Queries without a row that are not held.
        policy: Gives the ranks.
        now_s: Same clock as the arrivals.
    """
    keyed: list[tuple[Rank, QueryView]] = []
    parked: list[tuple[Rank, QueryView]] = []
    best: dict[int, float] = {}  # Level of the most urgent fresh query, by class order.
    rank_of = policy.rank
    for query in queries:
        rank = rank_of(query, now_s)
        if in_parked_line(query):
            parked.append((rank, query))
            continue
        level, order = rank[0], query.class_order
        if level < best.get(order, math.inf):
            best[order] = level
        keyed.append(((level, 1, 0, *rank[1:], query.seq), query))
    for rank, query in parked:
        level = min(rank[0], best.get(query.class_order, math.inf))
        keyed.append(((level, 0, query.park_seq, *rank[1:], query.seq), query))
    keyed.sort(key=itemgetter(0))
    return [query for _, query in keyed]


def in_parked_line(query: QueryView) -> bool:
    """Whether the query lost a row and has not had one since.

    A parked query whose KV is computed again may be reported as PREFILLING or READY; as long as it keeps
    its `park_seq` it keeps its place.
    """
    return query.phase is Phase.PARKED or query.park_seq > 0


def needed_bytes(query: QueryView) -> int:
    """Device bytes a claim still needs for prompt and reserved output (rule 2).

    What is already on the device counts as taken: the KV of prefilled and half prefilled queries, but not
    that of a parked query with a copy in the host pool.
    """
    return query.reserved_bytes - (query.kv_bytes if holds_device_bytes(query) else 0)


def holds_device_bytes(query: QueryView) -> bool:
    """Whether a claim has KV on the device: the KV of parked ones with a host copy is not there."""
    return query.kv_bytes > 0 and not has_host_copy(query)


def has_host_copy(query: QueryView) -> bool:
    """Whether a claim waits in the host pool, ready to be resumed."""
    return query.phase is Phase.PARKED and query.to_prefill_tokens == 0


def ends_with_prefill(query: QueryView) -> bool:
    """Whether the token that the last chunk yields is the last one: such a query needs no row."""
    return query.to_prefill_tokens > 0 and query.max_tokens - query.output_tokens <= 1
