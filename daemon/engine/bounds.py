"""What the next step may take: rows, bytes of keys and values, prompt tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter

    from batond.daemon.engine.governing import Governing
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.step.relief import Relief
    from batond.daemon.scheduler.chunks import ChunkBudget


class Bounds:
    """Joins what was configured, what the governor allows, and what a shortage or the pace has taught.

    Args:
        residency: Whose rows.
        relief: Knows what chunk a step was done with.
        governor: Follows the memory there is; None is nobody.
        counters: Of the engine: how often no memory was found.

    Attributes:
        kv_budget_bytes: Bytes of KV the batch may hold, whatever a governor allows; None is no bound.
        chunk_tokens: Prompt tokens of a step, as configured; None is no bound.
        chunk_budget: Learns them from the steps instead; None is nobody.
    """

    def __init__(
        self,
        residency: Residency,
        relief: Relief,
        *,
        governor: Governing | None,
        counters: Counter[str],
        kv_budget_bytes: int | None,
        chunk_tokens: int | None,
        chunk_budget: ChunkBudget | None,
    ) -> None:
        self.kv_budget_bytes = kv_budget_bytes
        self.chunk_tokens, self.chunk_budget = chunk_tokens, chunk_budget
        self._residency, self._relief, self._governor = residency, relief, governor
        self._counters = counters

    def limits(self, taken_bytes: int = 0) -> tuple[int, int | None]:
        """Rows, and bytes of KV (None is no bound), that the batch may take now.

        Args:
            taken_bytes: The whole reserve of running queries and the present KV of all others.
        """
        rows = self._residency.batch.rows
        if self._governor is None:
            return rows, self.kv_budget_bytes
        running = sum(owner is not None for owner in self._residency.by_row)
        shortages = self._counters["out_of_memory"]
        limits = self._governor.limits(running, self._least_bytes, taken_bytes, shortages=shortages)
        if limits is None:
            return rows, self.kv_budget_bytes
        budgets = (self.kv_budget_bytes, limits.kv_budget_bytes)
        return limits.rows, min((budget for budget in budgets if budget is not None), default=None)

    def step_tokens(self) -> int | None:
        """Prompt tokens that the next step may compute; None is no bound."""
        tokens = self.chunk_tokens
        if self.chunk_budget is not None:
            tokens = self.chunk_budget.tokens(query.sla_class for _, query in self._residency.occupied)
        most = self._relief.chunk.most
        return tokens if most is None else min(most, most if tokens is None else tokens)

    def note_step(self, step_s: float, prompt_tokens: int) -> None:
        """Learn from a step that decoded, and parked or resumed nobody.

        Args:
            step_s: What it took.
            prompt_tokens: Computed in it.
        """
        if self.chunk_budget is not None:
            self.chunk_budget.note(step_s, prompt_tokens)

    def _least_bytes(self) -> int:
        """KV of the longest row after its next token: whatever others take, one row goes on."""
        batch = self._residency.batch
        longest = max(batch.lengths)
        return batch.layout.nbytes(longest + 1) if longest else 0
