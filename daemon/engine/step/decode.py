"""Does the decode step of the batch: one more token for every occupied row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.engine.sampling.sampler import Choice

if TYPE_CHECKING:
    import torch

    from batond.daemon.engine.queries.lifecycle import Lifecycle
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.sampling.sampler import Sampler


class Decode:
    """Runs the batch one step and gives each row's query what came out.

    A row either decodes, and its query gets a new token, or replays: its query emitted tokens before, whose
    KV must be computed one by one, as it was the first time.

    Args:
        residency: Whose batch.
        sampler: Chooses the tokens.
        life: Is told what was computed, and takes the tokens.
    """

    def __init__(self, residency: Residency, sampler: Sampler, life: Lifecycle) -> None:
        self._residency, self._sampler, self._life = residency, sampler, life

    def run(self) -> bool:
        """One step; False if every row is idle."""
        occupied = self._residency.occupied
        if not occupied:
            return False
        batch = self._residency.batch
        cached = list(batch.lengths)
        inputs = {row: query.uncached_token_ids(cached[row]) for row, query in occupied}
        for row, query in occupied:
            if not cached[row]:  # Inline: this step prefills the newcomer (vector shaping).
                self._life.count_prefill(query, 0, len(inputs[row]))
        logits = batch.step(inputs)
        self._life.count_decode(
            batch.rows, idle=batch.rows - len(occupied), waiting=len(self._life.queries) > len(occupied)
        )
        decoding = [(row, query) for row, query in occupied if not query.replay_left]
        for row, query in occupied:
            if query.replay_left:
                self._note_replayed(query, cached[row], logits[row])
        if decoding:
            self._append(decoding, logits)
        return True

    def _note_replayed(self, query: Query, index: int, logits: torch.Tensor) -> None:
        """The KV of a token emitted before exists again; what follows it is known."""
        query.replay_left -= 1
        query.since_admission_tokens += (
            1  # Counts for the quantum: an urgent query doesn't wait for a replay.
        )
        if query.lacks_given_logprobs:
            self._sampler.record_given(query, index, logits[None])
        self._life.count_prefill(query, index, 1)

    def _append(self, decoding: list[tuple[int, Query]], logits: torch.Tensor) -> None:
        """Choose a token for every decoding row at once; where all want the likeliest, a step may know it."""
        queries = [query for _, query in decoding]
        known = self._residency.batch.likeliest
        if known is not None and self._sampler.takes_likeliest(queries):
            token_ids = known.tolist()
            choices = [Choice(token_ids[row]) for row, _ in decoding]
        else:
            choices = self._sampler.choose(logits[[row for row, _ in decoding]], queries)
        for query, choice in zip(queries, choices, strict=True):
            self._life.count_output(query)
            self._life.append(query, choice)
