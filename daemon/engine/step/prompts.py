"""Does the planned prompt work of a step: short whole prompts together, everything else one by one."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from batond.daemon.engine.model.causal import MODEL_ERRORS
from batond.daemon.engine.step.faults import breaks_device
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from batond.daemon.engine.queries.lifecycle import Lifecycle
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.sampling.sampler import Sampler
    from batond.daemon.engine.step.packing import Packer
    from batond.daemon.scheduler.plan import Chunk

_log = logging.getLogger(__name__)


class Prompts:
    """Computes prompts apart from the batch, and gives finished ones their first token.

    Args:
        residency: Where the queries' KV is.
        sampler: Chooses the first tokens.
        life: Is told what was computed, and of failures.
        packer: Computes short prompts together; None where the model can't.
    """

    def __init__(
        self, residency: Residency, sampler: Sampler, life: Lifecycle, packer: Packer | None
    ) -> None:
        self._residency, self._sampler, self._life, self._packer = residency, sampler, life, packer

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Compute the planned parts of prompts."""
        for pack in self._packs(chunks):
            if len(pack) > 1 and self._run_together([self._life.queries[chunk.query_id] for chunk in pack]):
                continue
            for chunk in pack:
                self._run_alone(self._life.queries[chunk.query_id], chunk.tokens)

    def _packs(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Chunks that share a forward, before those that don't."""
        packer = self._packer
        if packer is None:
            return [[chunk] for chunk in chunks]
        whole = [chunk for chunk in chunks if _is_whole(self._life.queries[chunk.query_id], chunk)]
        packs = [[whole[index] for index in pack] for pack in packer.packs([chunk.tokens for chunk in whole])]
        shared = {chunk.query_id for chunk in whole}
        return packs + [[chunk] for chunk in chunks if chunk.query_id not in shared]

    def _run_together(self, queries: Sequence[Query]) -> bool:
        """Compute whole prompts in one forward; False if that failed and nothing has changed."""
        if self._packer is None:
            return False
        try:
            packed = self._packer.run([query.prompt_token_ids for query in queries])
        except MODEL_ERRORS as error:
            if breaks_device(error):
                raise
            # One by one, only the culprit fails.
            _log.warning("a pack of %d prompts failed, each is computed alone: %s", len(queries), error)
            self._life.counters["failed_packs"] += 1
            return False
        self._life.counters["packed_prompts"] += len(queries)
        for query, kv in zip(queries, packed.slices, strict=True):
            _begin(query)
            query.kv = kv
            self._life.count_prefill(query, 0, kv.n_tokens)
        self._finish(queries, packed.logits)
        return True

    def _run_alone(self, query: Query, count: int) -> None:
        """Compute the next `count` tokens of a prompt (and of replayed output)."""
        _begin(query)
        try:
            logits = self._run_chunk(query, count)
        except MODEL_ERRORS as error:
            if breaks_device(error):
                raise
            self._life.fail(query, error)
            return
        if not query.to_prefill_tokens:
            query.kv, query.prefill = self._residency.prefill_of(query).slice(), None
            self._finish([query], logits[None])

    def _run_chunk(self, query: Query, count: int) -> torch.Tensor:
        prefill = self._residency.prefill_of(query)
        first = prefill.done_tokens
        token_ids = query.to_prefill_token_ids[first : first + count]
        if query.lacks_given_logprobs:
            logits = prefill.run_noting(token_ids, partial(self._sampler.record_given, query))
        else:
            logits = prefill.run(token_ids)
        self._life.count_prefill(query, first, len(token_ids))
        return logits

    def _finish(self, queries: Sequence[Query], logits: torch.Tensor) -> None:
        """The whole prompts are there: new queries get their first token.

        Args:
            queries: Their slices are in place.
            logits: float32, shape [len(queries), vocabulary].
        """
        for query in queries:
            if query.state is QueryState.PREFILLING:
                query.transition(QueryState.READY)
        new = [place for place, query in enumerate(queries) if not query.output_token_ids]
        if new:
            choices = self._sampler.choose(logits[new], [queries[place] for place in new])
            for place, choice in zip(new, choices, strict=True):
                self._life.append(queries[place], choice)


def _begin(query: Query) -> None:
    if query.state is QueryState.WAITING:
        query.transition(QueryState.PREFILLING)


def _is_whole(query: Query, chunk: Chunk) -> bool:
    """Whether the chunk is a whole prompt, of which nothing but the logits behind it is wanted."""
    return (
        chunk.tokens == len(query.prompt_token_ids) == query.to_prefill_tokens
        and not query.prefilled_tokens
        and not query.lacks_given_logprobs
    )
