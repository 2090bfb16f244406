"""What is known of output lengths: how long the answers to a tenant's queries of a class turned out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batond.policies.base import QueryView

#: A flow's counts are halved when it has so many, so that they follow its users.
_MOST: Final = 512.0


class OutputHistory:
    """Lengths of finished outputs by flow, a flow being the queries of one tenant in one class.

    A flow of which nothing finished yet is expected to use its `max_tokens`.
    """

    def __init__(self) -> None:
        self._flows: dict[tuple[str, str], _Flow] = {}

    def add(self, query: QueryView) -> None:
        """Learn from a query that ended with `output_tokens`."""
        self._flows.setdefault((query.tenant, query.sla_class), _Flow()).add(query.output_tokens)

    def total_tokens(self, query: QueryView) -> float:
        """Expected output as it looked before the first token; at most `max_tokens`."""
        flow = self._flows.get((query.tenant, query.sla_class))
        return query.max_tokens if flow is None else min(flow.mean, query.max_tokens)

    def remaining_tokens(self, query: QueryView) -> float:
        """Expected output still to come, given what was emitted; at least 1, unless nothing may come.

        Who outlived the flow's short outputs is compared with its long ones only.
        """
        emitted = query.output_tokens
        most = query.max_tokens - emitted
        flow = self._flows.get((query.tenant, query.sla_class))
        if flow is None:
            return most
        mean = flow.mean_above(emitted) if emitted else flow.mean
        return most if mean is None else min(max(mean - emitted, 1.0), most)


class _Flow:
    """Number of queries and of tokens, in all and in buckets that double in width."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._queries = self._tokens = 0.0
        self._buckets: dict[int, tuple[float, float]] = {}

    def add(self, length: int) -> None:
        queries, tokens = self._buckets.get(length.bit_length(), (0.0, 0.0))
        self._buckets[length.bit_length()] = (queries + 1, tokens + length)
        self._queries += 1
        self._tokens += length
        if self._queries >= _MOST:
            self._queries /= 2
            self._tokens /= 2
            self._buckets = {key: (q / 2, t / 2) for key, (q, t) in self._buckets.items()}
        self.mean = self._tokens / self._queries

    def mean_above(self, length: int) -> float | None:
        """Mean of the outputs in buckets whose own mean is longer; None if there is none."""
        longer = [(q, t) for q, t in self._buckets.values() if t > length * q]
        queries = sum(q for q, _ in longer)
        return sum(t for _, t in longer) / queries if queries else None
