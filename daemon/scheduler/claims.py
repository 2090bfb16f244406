"""What the claims to a row are, and what they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.policies.base import Phase

if TYPE_CHECKING:
    from batond.policies.base import QueryView


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


def chunk_tokens(query: QueryView, most: float, grid: int | None) -> int:
    """Tokens of a claim's next chunk; 0 if it has to wait.

    Args:
        query: Has prompt tokens to compute.
        most: That may still be computed in this step.
        grid: Chunks end at multiples of it, and wait if they don't fit whole; None cuts anywhere.
    """
    left = query.to_prefill_tokens
    if grid is None:
        return int(min(left, most))
    whole = min(left, grid - query.prefilled_tokens % grid)
    return whole if whole <= most else 0


def chunk_bytes(query: QueryView, tokens: int) -> int:
    """An upper bound of the bytes that so many prompt tokens of a claim write."""
    # What is computed and not on the device, of a session or parked half done, comes with the first chunk.
    comes = 0 if holds_device_bytes(query) else query.park_bytes
    rest = max(0, needed_bytes(query) - comes)
    return comes - (-rest * tokens // query.to_prefill_tokens)
