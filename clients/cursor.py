"""How far a stream has come, over any number of reconnections. Pure: shared by both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.clients import convert
from batond.clients.errors import ServerError
from batond.clients.model import Chunk, Event, Finished, Queued, Started

if TYPE_CHECKING:
    from batond.v1 import types_pb2


class StreamCursor:
    """Lets each token, each text and each life-cycle step through once.

    A stream that breaks is taken up with WatchJob at `next_token_index`, where the daemon goes on with tokens
    and text exactly where it had stopped. What may come twice all the same: the flush of held-back text (a
    chunk without tokens, at most one an index), and where the job stands (queued, started).

    Attributes:
        next_token_index: Index of the first token not seen yet.
        finished: Whether the final event was seen.
        started: Whether any event was seen.
    """

    def __init__(self, from_token_index: int = 0) -> None:
        self.next_token_index = from_token_index
        self.finished = False
        self.started = False
        self._flushed_at = -1
        self._queued: Queued | None = None
        self._has_run = False

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
        gap = chunk.first_token_index - self.next_token_index
        if gap > 0:
            raise ServerError(
                f"the stream skipped {gap} tokens after index {self.next_token_index}", reason="STREAM_GAP"
            )
        if not chunk.token_ids:
            if gap < 0 or self._flushed_at == self.next_token_index:
                return None
            self._flushed_at = self.next_token_index
            return chunk
        fresh = chunk.token_ids[-gap:] if gap else chunk.token_ids
        if not fresh:
            return None
        first_token_index, self.next_token_index = self.next_token_index, self.next_token_index + len(fresh)
        return Chunk(first_token_index, fresh, chunk.text)
