"""Metrics that the engine's snapshots carry: the batch, its memory, and what the engine counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from batond.daemon.wire.messages import GovernorState, ParkCause, QueryState, RowReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric

    from batond.daemon.wire.messages import MemorySnapshot, Snapshot

#: The engine's own counters, with what they count. Shown from zero on: a rate sees the first one too.
ENGINE_COUNTERS: Final = {
    "corrupt_slices": "Parked copies that were found damaged.",
    "decode_steps": "Steps that decoded.",
    "failed_copies": "Copies between card and host that did not happen.",
    "failed_packs": "Packed forwards that failed; their prompts were computed alone.",
    "idle_row_steps": "Rows without a query, summed over decode steps.",
    "late_completions": "Copies that ended after their query.",
    "loads_ahead": "Copies of parked KV begun before the row was free.",
    "loads_ahead_used": "Copies begun ahead that were wanted.",
    "out_of_memory": "Computations that found no memory and were repeated with more.",
    "out_of_memory_failures": "Jobs that failed because there was no memory even alone.",
    "output_tokens": "Tokens emitted.",
    "packed_prompts": "Short prompts computed together with others in one forward.",
    "parked_bytes": "Bytes copied to the host pool by parks.",
    "parks_dropped": "Parks that kept no copy: the KV is computed again.",
    "parks_lost": "Parked queries whose copy failed after their row was given away.",
    "placements_put_off": "Rows that could not be given because no memory was found.",
    "policy_changes": "Exchanges of the policy by hand.",
    "policy_errors": "Errors that a policy raised; `priority` took its place for the step.",
    "prefetch_hints": "Parked queries named as likely to resume soon, counted each step.",
    "prefill_tokens": "Tokens of prompts computed.",
    "prompts_put_off": "Prompts that found no memory and nobody to take it from.",
    "recomputed_tokens": "Tokens whose KV had to be computed again.",
    "resumes": "Parked queries that got a row again.",
    "resumes_from_device": "Resumes that needed no copy: the KV had not left the card.",
    "row_steps": "Rows of the batch, summed over decode steps.",
    "session_hits": "Turns that began with kept KV.",
    "session_tokens_reused": "Prompt tokens that kept KV spared.",
    "sessions_evicted": "Sessions dropped for room or age.",
    "sessions_kept": "Finished turns whose KV was kept.",
    "steps": "Steps of the engine.",
    "unknown_query_ids": "Commands for queries that had ended.",
    "waiting_idle_row_steps": "As idle_row_steps, only while somebody had no row.",
    "waiting_row_steps": "As row_steps, only while somebody had no row.",
    "waits_for_copy": "Steps in which somebody lacked only KV that was not on the card yet.",
    "waits_for_disk": "Steps in which somebody waited for KV from the spill directory.",
}
#: Counters that the engine names by prefix and value: metric, label, text and the values there are.
COUNTER_FAMILIES: Final = {
    "queries_": (
        "queries",
        "outcome",
        "Queries by their end.",
        (QueryState.FINISHED, QueryState.CANCELLED, QueryState.FAILED),
    ),
    "parks_for_": ("parks", "cause", "Queries that lost their row.", tuple(ParkCause)),
    "rows_": ("rows_given", "reason", "Rows given to queries.", tuple(RowReason)),
    "blocked_": (
        "blocked",
        "reason",
        "Queries that were next and got nothing, counted each step.",
        ("row", "kv_bytes", "quantum", "park_cap", "prefill", "held"),
    ),
}
#: Shown by cause.
_SUMS: Final = frozenset({"parks"})


class EngineCollector(Collector):
    """Shows the engine's latest snapshot. Its counters restart with the engine, which Prometheus expects."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the latest snapshot, if there was one."""
        shot = self.snapshot
        if shot is None:
            return
        busy = sum(1 for row in shot.rows if row.query_id)
        yield GaugeMetricFamily("batond_rows", "Rows of the batch.", len(shot.rows))
        yield GaugeMetricFamily("batond_rows_busy", "Rows with a query.", busy)
        states = GaugeMetricFamily("batond_queries", "Queries without a row, by state.", labels=["state"])
        for state in (QueryState.WAITING, QueryState.PREFILLING, QueryState.READY, QueryState.PARKED):
            states.add_metric([state], sum(1 for query in shot.queries if query.state is state))
        yield states
        yield GaugeMetricFamily("batond_columns", "Length of the batch's time axis.", shot.columns)
        yield GaugeMetricFamily("batond_host_pool_bytes", "Host RAM for parked KV.", shot.host_pool_bytes)
        yield GaugeMetricFamily("batond_host_pool_used_bytes", "Used part of it.", shot.host_pool_used_bytes)
        yield GaugeMetricFamily("batond_sessions", "Chat sessions with kept KV.", shot.sessions)
        yield GaugeMetricFamily("batond_session_bytes", "Host RAM for their KV.", shot.session_bytes)
        yield from _memory(shot.memory)
        yield from _counters(shot.counters)


def _memory(memory: MemorySnapshot) -> Iterator[Metric]:
    """Where KV lies, and what the governor makes of it."""
    gauges = [
        ("batond_kv_committed_bytes", "KV in pages of rows.", memory.committed_bytes),
        ("batond_kv_pooled_bytes", "Pages of the batch that no row owns.", memory.pooled_bytes),
        ("batond_kv_reserved_bytes", "What the batch could ever hold.", memory.reserved_bytes),
        ("batond_kv_parked_bytes", "KV of parked queries in host RAM.", memory.parked_bytes),
        ("batond_kv_spilled_bytes", "KV on disk.", memory.spilled_bytes),
        ("batond_row_limit", "Rows that may be used.", memory.row_limit),
    ]
    if memory.kv_budget_bytes is not None:
        text = "KV the batch may hold; absent without a bound."
        gauges.append(("batond_kv_budget_bytes", text, memory.kv_budget_bytes))
    if memory.total_bytes:
        gauges += [
            ("batond_memory_size_bytes", "Memory that the batch lives in.", memory.total_bytes),
            ("batond_memory_free_bytes", "Free part of it.", memory.free_bytes),
            ("batond_memory_own_bytes", "What this engine holds of it.", memory.own_bytes),
        ]
    for name, text, value in gauges:
        yield GaugeMetricFamily(name, text, value)
    states = GaugeMetricFamily("batond_governor_state", "What the memory governor does.", labels=["state"])
    for state in GovernorState:
        states.add_metric([state], memory.governor is state)
    yield states


def _counters(counted: Mapping[str, float]) -> Iterator[Metric]:
    """What the engine counts; what an engine of another release counts besides is shown as it is named."""
    left = dict.fromkeys(ENGINE_COUNTERS, 0.0) | dict(counted)
    for prefix, (metric, label, text, values) in COUNTER_FAMILIES.items():
        family = CounterMetricFamily(f"batond_engine_{metric}", text, labels=[label])
        known = [str(value) for value in values]
        others = [name.removeprefix(prefix) for name in left if name.startswith(prefix)]
        for value in dict.fromkeys([*known, *others]):
            family.add_metric([value], left.pop(prefix + value, 0.0))
        yield family
    for name, count in sorted(left.items()):
        if name not in _SUMS:
            text = ENGINE_COUNTERS.get(name, "Counted by the engine since its start.")
            yield CounterMetricFamily(f"batond_engine_{name}", text, count)
