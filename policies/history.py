"""What is known of output lengths: how long the answers to a tenant's queries of a class turned out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batond.policies.base import QueryView

#: A flow's counts are halved when it has so many, so that they follow its users.
_MOST: Final = 512.0


class OutputHistory:
    """Lengths of finished outputs by flow, a flow being the queries of one tenant in one class.

    Lengths are kept in buckets that double in width, the number of queries and of tokens in each. A flow of
    which nothing finished yet is expected to use its `max_tokens`.
    """

    def __init__(self) -> None:
        self._flows: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}

    def add(self, query: QueryView) -> None:
        """Learn from a query that ended with `output_tokens`."""
        flow = self._flows.setdefault((query.tenant, query.sla_class), {})
        bucket = query.output_tokens.bit_length()
        queries, tokens = flow.get(bucket, (0.0, 0.0))
        flow[bucket] = (queries + 1, tokens + query.output_tokens)
        if sum(queries for queries, _ in flow.values()) >= _MOST:
            for key, (queries, tokens) in flow.items():
                flow[key] = (queries / 2, tokens / 2)

    def total_tokens(self, query: QueryView) -> float:
        """Expected output as it looked before the first token; at most `max_tokens`."""
        return min(self._mean(query, -1), query.max_tokens)

    def remaining_tokens(self, query: QueryView) -> float:
        """Expected output still to come, given what was emitted; at least 1, unless nothing may come.

        Who outlived the flow's short outputs is compared with its long ones only.
        """
        most = query.max_tokens - query.output_tokens
        return min(max(self._mean(query, query.output_tokens) - query.output_tokens, 1.0), most)

    def _mean(self, query: QueryView, above: int) -> float:
        """Mean length of the flow's outputs longer than `above`; `max_tokens` if there is none."""
        flow = self._flows.get((query.tenant, query.sla_class), {})
        longer = [(q, t) for q, t in flow.values() if t > above * q]
        queries = sum(q for q, _ in longer)
        return sum(t for _, t in longer) / queries if queries else query.max_tokens
