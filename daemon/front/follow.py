"""The events of one job from any token on, wherever it runs.

Redis has the past, and the present of jobs that run on other daemons: there a watcher reads on when it hears
that there is more. The hub has the present of jobs that run here.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from batond.daemon.errors import UnavailableError
from batond.daemon.front.lookout import Lookout
from batond.daemon.queue import Chunk, JobState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

    from batond.daemon.front.hub import Hub, LiveEvent, LiveJob
    from batond.daemon.queue import JobRecord, JobStore, Place

#: How often a job that runs on another daemon is looked at, in case its news got lost.
POLL_S = 2.0
#: The same while no news can come.
DEAF_POLL_S = 0.25
#: How often a waiting job's place is looked up.
PLACE_S = 0.5
#: With many watchers each looks less often: so many looks a second, all together, that nothing asked for.
LOOKS_PER_S = 100.0

#: The expected start is told again when it has moved by so much, and by this part of the time left.
MOVED_MS = 1000
MOVED_PART = 0.1
#: Tokens that a watcher who is behind gets in one message, at most.
MOST_JOINED_TOKENS = 512


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
        hub: Jobs that run here, and news of the others.
        stopping: Whether the daemon is about to end.
        deaf: Whether no news of jobs that run elsewhere can come at present.
    """

    def __init__(
        self,
        store: JobStore,
        hub: Hub,
        stopping: Callable[[], bool],
        deaf: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._hub = hub
        self._stopping = stopping
        self._deaf = deaf
        self._lookout = Lookout(store)

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
            cursor.choices = record.choices
            cursor.said = await self._place(record)
            yield InLine(record, cursor.said)
        while not cursor.over:
            live = self._hub.get(tenant, job_id)
            if live is None:
                async with aclosing(self._elsewhere(tenant, job_id, cursor)) as events:
                    async for event in events:
                        yield event
                continue
            if cursor.misses(live.base_indexes):
                async for past in self._past(tenant, job_id, cursor):
                    yield past
            if not cursor.over:
                async for present in self._present(live, cursor):
                    yield present

    async def _elsewhere(
        self, tenant: str, job_id: str, cursor: _Cursor
    ) -> AsyncGenerator[FollowEvent, None]:
        """What happens to a job until it ends or runs here."""
        watch = self._hub.watch(tenant, job_id)
        try:
            while True:
                watch.clear()
                async for past in self._past(tenant, job_id, cursor):
                    yield past
                if cursor.over or self._hub.get(tenant, job_id) is not None:
                    return
                if self._stopping():
                    raise UnavailableError(
                        f"this daemon stops; watch the job again from token {cursor.lowest_index}",
                        reason="STOPPING",
                        next_token_index=cursor.lowest_index,
                    )
                await watch.wait(self._patience_s(cursor))
        finally:
            watch.close()

    def _patience_s(self, cursor: _Cursor) -> float:
        """How long a watcher waits for news before it looks by itself."""
        wish_s = PLACE_S if cursor.waits else DEAF_POLL_S if self._deaf() else POLL_S
        return max(wish_s, self._hub.waiting / LOOKS_PER_S)

    async def _past(self, tenant: str, job_id: str, cursor: _Cursor) -> AsyncIterator[FollowEvent]:
        if not cursor.choices:
            cursor.choices = (await self._store.get(tenant, job_id)).choices
        more = True
        while more:  # A page at a time: a watcher who reads slowly keeps no more of a long job in memory.
            from_indexes = cursor.next_indexes
            sight = await self._lookout.look(tenant, job_id, from_indexes)
            for chunks in sight.outputs:
                for chunk in chunks:
                    if (wanted := cursor.take(chunk)) is not None:
                        yield wanted
            # What a hand wrote may fill a page without a token.
            more = sight.more and cursor.next_indexes != from_indexes
        cursor.waits = sight.state is JobState.QUEUED
        if sight.state is not None and sight.state.final:
            record = await self._store.get(tenant, job_id)
            cursor.over = record.state.final  # Or an operator lets a dead job run again just now.
            if cursor.over:
                yield Ended(record)
        elif cursor.waits:
            place = await self._store.place(tenant, job_id)
            if place is not None and _moved(cursor.said, place):
                cursor.said = place
                yield InLine(await self._store.get(tenant, job_id), place)

    async def _present(self, live: LiveJob, cursor: _Cursor) -> AsyncIterator[LiveEvent]:
        position = 0
        while True:
            while position < len(live.events):
                event = live.events[position]
                position += 1
                if not isinstance(event, Chunk):
                    yield event
                    continue
                wanted = cursor.take(event)
                # A watcher that is behind gets what has come meanwhile in one message: it catches up.
                while wanted is not None and position < len(live.events):
                    following = live.events[position]
                    if not isinstance(following, Chunk) or not _joins(wanted, following):
                        break
                    position += 1
                    wanted = _joined(wanted, cursor.take(following))
                if wanted is not None:
                    yield wanted
            if live.closed:
                return
            await live.wait_beyond(position)

    async def _place(self, record: JobRecord) -> Place | None:
        if record.state is not JobState.QUEUED:
            return None
        return await self._store.place(record.tenant, record.job_id)


def _joins(chunk: Chunk, following: Chunk) -> bool:
    """Whether a chunk goes on where another ends, with nothing that is told once between them."""
    return (
        chunk.choice == following.choice
        and not chunk.finish_reason
        # Of text that comes without a token a client must see by itself whether it has had it.
        and bool(chunk.token_ids and following.token_ids)
        and following.first_index == chunk.first_index + len(chunk.token_ids)
        and (chunk.logprobs is None) == (following.logprobs is None)
        and following.prompt_logprobs is None
        and len(chunk.token_ids) + len(following.token_ids) <= MOST_JOINED_TOKENS
    )


def _joined(chunk: Chunk, following: Chunk | None) -> Chunk:
    """Both as one. It ends where the second does, so a watcher can come back to its end."""
    if following is None:  # Known already.
        return chunk
    return msgspec.structs.replace(
        chunk,
        token_ids=[*chunk.token_ids, *following.token_ids],
        text=chunk.text + following.text,
        logprobs=None if chunk.logprobs is None else [*chunk.logprobs, *(following.logprobs or ())],
        finish_reason=following.finish_reason,
    )


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
    """What a watcher has seen.

    Attributes:
        choices: How many the job has; 0 is not known yet.
        said: The job's place in line, as it was told last.
        waits: Whether the job waited when it was looked at last.
        over: Whether it has ended, and the watcher knows.
    """

    def __init__(self, from_index: int, choice_indexes: Mapping[int, int] | None = None) -> None:
        self._from_index = from_index
        self._choices = {choice: _Seen(index) for choice, index in (choice_indexes or {}).items()}
        self.choices = 0
        self.said: Place | None = None
        self.waits = self.over = False

    def next_index(self, choice: int) -> int:
        """The first token of a choice that was not seen."""
        return self._seen(choice).next_index

    @property
    def next_indexes(self) -> list[int]:
        """The same of each choice that the job has."""
        return [self.next_index(choice) for choice in range(self.choices)]

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
