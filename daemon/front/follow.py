"""The events of one job from any token on, wherever it runs: Redis for the past, the hub for the present."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from batond.daemon.errors import UnavailableError
from batond.daemon.queue import Chunk, JobState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from batond.daemon.front.hub import Hub, LiveEvent, LiveJob
    from batond.daemon.queue import JobRecord, JobStore, Place

#: How often a job that waits, or runs on another daemon, is looked at.
POLL_S = 0.25


#: The expected start is told again when it has moved by so much, and by this part of the time left.
MOVED_MS = 1000
MOVED_PART = 0.1


@dataclass(frozen=True, slots=True)
class InLine:
    """The job waits, at a place if that is known."""

    record: JobRecord
    place: Place | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is final."""

    record: JobRecord


FollowEvent: TypeAlias = "InLine | Ended | LiveEvent"


class Follower:
    """Follows jobs for clients.

    Args:
        store: The queue.
        hub: Jobs that run here.
        stopping: Whether the daemon is about to end.
    """

    def __init__(self, store: JobStore, hub: Hub, stopping: Callable[[], bool]) -> None:
        self._store = store
        self._hub = hub
        self._stopping = stopping

    async def follow(
        self,
        tenant: str,
        job_id: str,
        from_index: int,
        *,
        choice_indexes: Mapping[int, int] | None = None,
        announce: bool = False,
    ) -> AsyncIterator[FollowEvent]:
        """Yield what happens to a job, each token once.

        Args:
            tenant: Whose.
            job_id: Which.
            from_index: First output token wanted of each choice.
            choice_indexes: First output token wanted of single choices.
            announce: Begin with the job's place in line even if it does not wait: it was accepted.

        Raises:
            NotFoundError: There is no such job of this tenant.
            UnavailableError: The daemon stops before the job ends; follow it again, perhaps elsewhere.
        """
        cursor = _Cursor(from_index, choice_indexes)
        if announce:
            record = await self._store.get(tenant, job_id)
            cursor.said = await self._place(record)
            yield InLine(record, cursor.said)
        while True:
            live = self._hub.get(tenant, job_id)
            if live is None or cursor.misses(live.base_indexes):
                async for past in self._past(tenant, job_id, cursor):
                    yield past
                    if isinstance(past, Ended):
                        return
            if live is not None:
                async for event in self._present(live, cursor):
                    yield event
            elif self._stopping():
                raise UnavailableError(
                    f"this daemon stops; watch the job again from token {cursor.lowest_index}",
                    reason="STOPPING",
                    next_token_index=cursor.lowest_index,
                )
            else:
                await self._hub.wait_for(tenant, job_id, POLL_S)

    async def _past(self, tenant: str, job_id: str, cursor: _Cursor) -> AsyncIterator[FollowEvent]:
        # The record comes first: if it is final, all output is there to be read.
        record = await self._store.get(tenant, job_id)
        from_indexes = [cursor.next_index(choice) for choice in range(record.choices)]
        for past in await self._store.read_choices(tenant, job_id, from_indexes):
            for chunk in past:
                if (wanted := cursor.take(chunk)) is not None:
                    yield wanted
        if record.state.final:
            yield Ended(record)
            return
        place = await self._place(record)
        if place is not None and _moved(cursor.said, place):
            cursor.said = place
            yield InLine(record, place)

    async def _present(self, live: LiveJob, cursor: _Cursor) -> AsyncIterator[LiveEvent]:
        position = 0
        while True:
            while position < len(live.events):
                event = live.events[position]
                position += 1
                if not isinstance(event, Chunk):
                    yield event
                elif (wanted := cursor.take(event)) is not None:
                    yield wanted
            if live.closed:
                return
            await live.wait_beyond(position)

    async def _place(self, record: JobRecord) -> Place | None:
        if record.state is not JobState.QUEUED:
            return None
        return await self._store.place(record.tenant, record.job_id)


def _moved(said: Place | None, place: Place) -> bool:
    """Whether a watcher wants to hear of a place anew."""
    if said is None or said.ahead != place.ahead or (said.start_ms > 0) != (place.start_ms > 0):
        return True
    return abs(place.start_ms - said.start_ms) > max(MOVED_MS, MOVED_PART * place.left_ms)


@dataclass(slots=True)
class _Seen:
    """How far a watcher has seen one choice."""

    next_index: int
    flushed: bool = False
    ended: bool = False


class _Cursor:
    """What a watcher has seen: the next token it has not, and its place in line as it was told last."""

    def __init__(self, from_index: int, choice_indexes: Mapping[int, int] | None = None) -> None:
        self._from_index = from_index
        self._choices = {choice: _Seen(index) for choice, index in (choice_indexes or {}).items()}
        self.said: Place | None = None

    def next_index(self, choice: int) -> int:
        """The first token of a choice that was not seen."""
        return self._seen(choice).next_index

    @property
    def lowest_index(self) -> int:
        """The first token that some choice was not seen of: nothing is missed from here."""
        return min((seen.next_index for seen in self._choices.values()), default=self._from_index)

    def misses(self, base_indexes: Sequence[int]) -> bool:
        """Whether tokens before these, by choice, are still to be seen."""
        return any(self.next_index(choice) < base for choice, base in enumerate(base_indexes))

    def take(self, chunk: Chunk) -> Chunk | None:
        """Return what is new in a chunk and move on; None if it is nothing.

        Text can't be cut at a token: the text of a chunk that is known in part comes whole.
        """
        seen = self._seen(chunk.choice)
        if not chunk.token_ids:
            # Text is flushed once an index, and a choice ends once.
            known = seen.ended if chunk.finish_reason else seen.flushed
            if chunk.first_index != seen.next_index or known:
                return None
            seen.flushed, seen.ended = True, chunk.finish_reason != ""
            return chunk
        known_tokens = max(0, seen.next_index - chunk.first_index)
        if known_tokens >= len(chunk.token_ids):
            return None
        seen.next_index = chunk.first_index + len(chunk.token_ids)
        seen.flushed, seen.ended = False, chunk.finish_reason != ""
        if not known_tokens:
            return chunk
        return msgspec.structs.replace(
            chunk,
            first_index=chunk.first_index + known_tokens,
            token_ids=chunk.token_ids[known_tokens:],
            logprobs=None if chunk.logprobs is None else chunk.logprobs[known_tokens:],
            prompt_logprobs=None,
        )

    def _seen(self, choice: int) -> _Seen:
        return self._choices.setdefault(choice, _Seen(self._from_index))
