"""Chooses the tokens of a step, where there is memory for it; else those of one row after the other."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.model.shortage import SHORTAGE_TYPES
from batond.daemon.engine.sampling.tensors import on_device
from batond.daemon.engine.step.relief import NoMemoryError
from batond.daemon.scheduler.plan import ParkMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.sampling.sampler import Choice, Sampler
    from batond.daemon.engine.step.relief import Relief


class Choosing:
    """Lets the sampler choose. What it chooses depends on a query's own row and record, never on its mates.

    Args:
        sampler: Chooses.
        relief: Gives memory back.
    """

    def __init__(self, sampler: Sampler, relief: Relief) -> None:
        self._sampler, self._relief = sampler, relief

    def choose(
        self, logits: torch.Tensor, rows: Sequence[int], queries: Sequence[Query]
    ) -> list[tuple[Query, Choice]]:
        """The next token of every query; those without memory are left out.

        Args:
            logits: Raw float32 logits, shape [rows, vocabulary].
            rows: Of the logits, one by query.
            queries: Each once.
        """
        try:
            choices = self._relief.survive(
                partial(self._try, logits, rows, queries), final_wait=len(queries) == 1
            )
        except NoMemoryError:
            if len(queries) == 1:
                self._give_up(queries[0])
                return []
            alone = zip(rows, queries, strict=True)
            return [pair for row, query in alone for pair in self.choose(logits, [row], [query])]
        return list(zip(queries, choices, strict=True))

    def _try(self, logits: torch.Tensor, rows: Sequence[int], queries: Sequence[Query]) -> list[Choice]:
        try:
            return self._sampler.choose(logits[on_device(rows, torch.int64, logits.device)], queries)
        except SHORTAGE_TYPES:
            for query in queries:
                self._sampler.forget(query)  # Counts may be half done; they are made anew from the record.
            raise

    def record_given(self, query: Query, first: int, logits: torch.Tensor) -> bool:
        """Note log-probabilities of given tokens, see `Sampler.record_given`; False took its row."""
        try:
            self._relief.survive(partial(self._sampler.record_given, query, first, logits))
        except NoMemoryError:
            self._give_up(query)
            return False
        return True

    def _give_up(self, query: Query) -> None:
        # Its KV is of no use without the logits behind it: a token more than its record, or all its prompt.
        self._relief.give_up(query, ParkMode.RECOMPUTE)
