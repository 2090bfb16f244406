"""How far a stream has come, over any number of reconnections. Pure: shared by both clients."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING

from batond.clients import convert
from batond.clients.errors import ServerError
from batond.clients.model import Chunk, Event, Finished, FinishReason, Queued, Started

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batond.v1 import types_pb2


class StreamCursor:
    """Lets each token, each text and each life-cycle step through once.

    A stream that breaks is taken up with WatchJob at the next token of each choice, where the daemon goes on
    with tokens and text exactly where it had stopped. What may come twice all the same: the end of a choice
    with held-back text (a chunk without tokens, at most one an index), and where the job stands (queued,
    started).

    Args:
        from_token_index: First token wanted of each choice.
        starts: First token wanted of single choices.
        choices: How many there are; None if that isn't known.

    Attributes:
        next_token_indexes: Index of the first token not seen yet, of each choice seen or known to be.
        finished: Whether the final event was seen.
        started: Whether any event was seen.
    """

    def __init__(
        self,
        from_token_index: int = 0,
        *,
        starts: Mapping[int, int] | None = None,
        choices: int | None = None,
    ) -> None:
        self._from_token_index = from_token_index
        self.next_token_indexes: defaultdict[int, int] = defaultdict(lambda: from_token_index, starts or {})
        for choice in range(choices or 0):
            self.next_token_indexes.setdefault(choice, from_token_index)
        self._single = choices == 1
        self.finished = False
        self.started = False
        self._flushed_at: dict[int, int] = {}
        self._ended: set[int] = set()
        self._queued: Queued | None = None
        self._has_run = False

    @property
    def next_token_index(self) -> int:
        """Index of the first token not seen yet; of several choices the one that is furthest behind."""
        return min(self.next_token_indexes.values(), default=self._from_token_index)

    def resume_at(self) -> tuple[int, dict[int, int]]:
        """Where a new stream must begin: with which token of each choice, and of single ones."""
        if self._single:
            return self.next_token_index, {}
        return self._from_token_index, dict(self.next_token_indexes)

    def accept(self, message: types_pb2.StreamEvent) -> Event | None:
        """Gives the event to hand to the caller, or None if there is nothing new in it.

        Raises:
            ServerError: Tokens are missing between the last chunk and this one.
        """
        event = convert.event(message)
        self.started = True
        if isinstance(event, Chunk):
            return self._accept_chunk(event)
        known = False
        if isinstance(event, Finished):
            self.finished = True
        elif isinstance(event, Queued):
            known, self._queued = event == self._queued, event
        elif isinstance(event, Started):
            known, self._has_run = self._has_run, True
        return None if known else event

    def _accept_chunk(self, chunk: Chunk) -> Chunk | None:
        next_index = self.next_token_indexes[chunk.choice]
        gap = chunk.first_token_index - next_index
        if gap > 0:
            raise ServerError(
                f"the stream skipped {gap} tokens after index {next_index}", reason="STREAM_GAP"
            )
        ends = chunk.finish_reason is not FinishReason.UNKNOWN
        if not chunk.token_ids:
            seen = chunk.choice in self._ended if ends else self._flushed_at.get(chunk.choice) == next_index
            if gap < 0 or seen:
                return None
            self._flushed_at[chunk.choice] = next_index
            self._ended |= {chunk.choice} if ends else set()
            return chunk
        known = -gap
        if known >= len(chunk.token_ids):
            return None
        self._ended |= {chunk.choice} if ends else set()
        self.next_token_indexes[chunk.choice] = chunk.first_token_index + len(chunk.token_ids)
        if not known:
            return chunk
        return dataclasses.replace(
            chunk,
            first_token_index=next_index,
            token_ids=chunk.token_ids[known:],
            logprobs=chunk.logprobs[known:],
            prompt_logprobs=(),
        )
