"""Does the planned prompt work of a step: short whole prompts together, everything else one by one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from batond.daemon.engine.model.causal import MODEL_ERRORS
from batond.daemon.engine.step.faults import breaks_device
from batond.daemon.engine.step.relief import NoMemoryError
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from batond.daemon.engine.queries.lifecycle import Lifecycle
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.sampling.sampler import Sampler
    from batond.daemon.engine.step.choosing import Choosing
    from batond.daemon.engine.step.packing import Packer
    from batond.daemon.engine.step.relief import Relief
    from batond.daemon.scheduler.plan import Chunk

#: Smaller chunks need hardly less: a forward has its fixed part.
LEAST_CHUNK_TOKENS: Final = 16

_log = logging.getLogger(__name__)


class Prompts:
    """Computes prompts apart from the batch, and gives finished ones their first token.

    Args:
        residency: Where the queries' KV is.
        sampler: Notes log-probabilities of prompts.
        choosing: Chooses the first tokens.
        life: Is told what was computed, and of failures.
        relief: Gives memory back where a forward finds none.
        packer: Computes short prompts together; None where the model can't.
        divisible: A prompt may be computed in chunks of any size.
        grid_tokens: A prompt is cut at multiples of this and nowhere else, whatever is planned; None is
            anywhere.
        sizes: Tokens that a forward is captured for, ascending: one of fewer takes as long.
    """

    def __init__(
        self,
        residency: Residency,
        sampler: Sampler,
        choosing: Choosing,
        life: Lifecycle,
        relief: Relief,
        *,
        packer: Packer | None,
        divisible: bool,
        grid_tokens: int | None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._residency, self._sampler, self._choosing = residency, sampler, choosing
        self._life, self._relief, self._packer = life, relief, packer
        self._divisible, self._grid_tokens = divisible, grid_tokens
        self._sizes = sizes if divisible and grid_tokens is None else ()

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Compute the planned parts of prompts; after a shortage, what is left of them is planned anew."""
        for pack in self._packs(chunks):
            if len(pack) > 1 and self._run_together([self._life.queries[chunk.query_id] for chunk in pack]):
                continue
            for chunk in pack:
                self._run_alone(self._life.queries[chunk.query_id], chunk.tokens)
                if self._relief.struck:
                    return

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
        except (*MODEL_ERRORS, MemoryError) as error:
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
        survive = partial(self._relief.survive, spare=query, victims=partial(self._relief.less_urgent, query))
        chunk = _Chunk(query, count, most_tokens=count)
        try:
            logits = survive(partial(self._run_chunk, chunk), smaller=partial(self._halve, chunk))
            if not query.to_prefill_tokens:
                query.kv, query.prefill = survive(self._residency.prefill_of(query).slice), None
        except NoMemoryError:
            # Whole without a slice, it would get a row and have no first token.
            _drop_prefill(query, may_stay=query.to_prefill_tokens > 0)
            self._relief.put_off(query)
            return
        except MODEL_ERRORS as error:
            if breaks_device(error):
                raise
            self._life.fail(query, error)
            return
        if query.kv is not None:
            self._finish([query], logits[None])

    def _run_chunk(self, chunk: _Chunk) -> torch.Tensor:
        """Can be repeated after a shortage: goes on where it failed, or from the start if that is lost."""
        query = chunk.query
        _drop_prefill(query)
        prefill = self._residency.prefill_of(query)
        first = prefill.done_tokens
        if chunk.end is None:
            # Its session may bring more than when the step was planned: another turn has just ended.
            chunk.end = self._end_of(first, chunk.count, len(query.to_prefill_token_ids))
        chunk.first = first if chunk.first is None else min(chunk.first, first)
        while (first := prefill.done_tokens) < chunk.end:
            count = self._piece(chunk, first)
            token_ids = query.to_prefill_token_ids[first : first + count]
            if query.lacks_given_logprobs:
                logits = prefill.run_noting(token_ids, partial(self._sampler.record_given, query))
            else:
                logits = prefill.run(token_ids)
        self._life.count_prefill(query, chunk.first, chunk.end - chunk.first)
        return logits

    def _end_of(self, first: int, count: int, length: int) -> int:
        """Where a chunk of up to `count` tokens ends: with the prompt, or so that its forward is full."""
        if first + count >= length:
            return length
        return first + max((size for size in self._sizes if size <= count), default=count)

    def _piece(self, chunk: _Chunk, first: int) -> int:
        """Tokens to compute at once from `first` on: more than one piece only after a shortage."""
        left = (chunk.end or 0) - first
        if not self._divisible:
            return left
        if self._grid_tokens is not None:
            return min(left, self._grid_tokens - first % self._grid_tokens)
        return min(left, chunk.most_tokens)

    def _halve(self, chunk: _Chunk) -> bool:
        """Compute the chunk in smaller pieces, and no prompt in larger ones for a while."""
        if not self._divisible or self._grid_tokens is not None or chunk.most_tokens <= LEAST_CHUNK_TOKENS:
            return False
        chunk.most_tokens = max(chunk.most_tokens // 2, LEAST_CHUNK_TOKENS)
        self._relief.chunk.lower(chunk.most_tokens)
        return True

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
            chosen = self._choosing.choose(logits, new, [queries[place] for place in new])
            self._relief.culprits.succeeded([query.query_id for query, _ in chosen])
            for query, choice in chosen:
                self._life.append(query, choice)


@dataclass(slots=True)
class _Chunk:
    """A planned part of a prompt, while it is computed.

    Attributes:
        query: Whose.
        count: Tokens planned.
        most_tokens: Tokens computed at once.
        first: Index of the first token that had to be computed.
        end: Index behind the last one.
    """

    query: Query
    count: int
    most_tokens: int
    first: int | None = None
    end: int | None = None


def _begin(query: Query) -> None:
    if query.state is QueryState.WAITING:
        query.transition(QueryState.PREFILLING)


def _drop_prefill(query: Query, *, may_stay: bool = True) -> None:
    """Begin a prompt anew that can't be gone on from.

    Args:
        query: Whose.
        may_stay: If it can be gone on from.
    """
    if query.prefill is not None and not (may_stay and query.prefill.intact):
        query.computed_tokens = max(query.computed_tokens, query.prefill.done_tokens)
        query.prefill = None


def _is_whole(query: Query, chunk: Chunk) -> bool:
    """Whether the chunk is a whole prompt, of which nothing but the logits behind it is wanted."""
    return (
        chunk.tokens == len(query.prompt_token_ids) == query.to_prefill_tokens
        and not query.prefilled_tokens
        and not query.lacks_given_logprobs
    )
