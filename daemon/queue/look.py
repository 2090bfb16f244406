"""What watchers of many jobs read of them, in one round trip."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import RedisError, ResponseError

from batond.daemon.queue.connection import domain_error
from batond.daemon.queue.records import Chunk, GarbageError, JobState, decode_chunk

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Chunks that one look sees, of all choices: many looks share a round trip, whose answer is read at once.
LOOK_CHUNKS: Final = 512
#: Of one choice at least: more than lie at one index.
_FEWEST_CHUNKS: Final = 16


@dataclass(frozen=True, slots=True)
class Look:
    """What one watcher wants to see.

    Attributes:
        tenant: Whose job.
        job_id: Which.
        from_indexes: First output token wanted of each choice, from 0.
    """

    tenant: str
    job_id: str
    from_indexes: Sequence[int]

    @property
    def limit(self) -> int:
        """Most chunks of each choice that are seen."""
        return max(_FEWEST_CHUNKS, LOOK_CHUNKS // max(1, len(self.from_indexes)))


@dataclass(frozen=True, slots=True)
class Sight:
    """What it sees.

    Attributes:
        state: Of the job; None if it is gone, or can't be read.
        outputs: Committed chunks of each choice from the token wanted on; see `JobReader.read_chunks`.
        more: There may be more of a choice: look again from where they end. If the state is final and this is
            not set, `outputs` has all there is.
    """

    state: JobState | None
    outputs: list[list[Chunk]] = field(default_factory=list)
    more: bool = False


GONE = Sight(None)


def ask_output(pipe: Any, key: str, from_index: int, limit: int | None = None) -> None:
    """Asks for the chunks of one choice from a token on: the one that may reach over it, and all after."""
    pipe.xrevrange(key, f"{from_index}-0", "-", count=1)
    pipe.xrange(key, f"{from_index}-0", "+", count=limit)


def read_output(before: Any, after: Any, from_index: int) -> list[Chunk]:
    """Reads the two replies to `ask_output`.

    Raises:
        GarbageError: Somebody wrote into the stream by hand.
    """
    try:
        chunks = [decode_chunk(fields[b"c"]) for _, fields in [*before, *after]]
    except KeyError as error:
        raise GarbageError("an entry of the output has no chunk") from error
    if before and chunks[0].first_index + len(chunks[0].token_ids) <= from_index:
        del chunks[0]
    return chunks


def read_state(raw: bytes | None) -> JobState | None:
    """Reads the field; None if there is no such job, or none of ours."""
    try:
        return None if raw is None else JobState(raw.decode())
    except ValueError:  # Also what is no text at all.
        return None


def read_sight(state: Any, outputs: list[tuple[Any, Any]], look: Look) -> Sight:
    """Reads the replies to a look: state and, of each choice, those to `ask_output`.

    Raises:
        BatondError: What the server said, if that is not of the job itself.
    """
    for reply in (state, *(part for pair in outputs for part in pair)):
        if isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE"):
            return GONE
        if isinstance(reply, RedisError):
            raise domain_error(reply) from reply
    try:
        chunks = [read_output(*pair, index) for pair, index in zip(outputs, look.from_indexes, strict=True)]
    except GarbageError:
        return GONE
    return Sight(read_state(state), chunks, more=any(len(page) >= look.limit for _, page in outputs))
