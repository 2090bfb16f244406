"""Kept slices of finished turns: the next turn of a chat computes only what is new.

    kept      [ prompt of turn 1 | its output but the newest token ]
    turn 2    [ prompt of turn 1 | its output | new words of the user ]
              [ reused, from the host pool    | computed as usual     ]

A session is a hint. The client sends the whole conversation as the prompt of every turn, so a slice that was
evicted, replaced or damaged costs computation and never a token. Idle sessions take what parking leaves of
the host pool: a parked query that needs the room gets it, the least recently used session goes first. Where
there is a second tier it goes to a file, if there is time for that.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batond.daemon.engine.model.shortage import SHORTAGE_TYPES, is_shortage
from batond.daemon.errors import InvalidRequestError
from batond.daemon.requests.params import MAX_CLIENT_ID_CHARS
from batond.offload.errors import CopyFailedError, HostPoolFullError, SliceCorruptError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt
    import torch

    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.engine.queries.outgoing import Outgoing
    from batond.offload.entries import LoadTicket
    from batond.offload.slice import KVSlice
    from batond.offload.store import ParkedStore

DEFAULT_TTL_S = 3600.0
DEFAULT_SHARE = 4  # Idle sessions may take this part of host pool and files: a quarter.
OWNER_MARK = "\0"  # Begins the names of sessions in the store; no query id has it.


class SessionKey(NamedTuple):
    """Whose conversation. The tenant is part of it: nobody reaches another tenant's slices."""

    tenant: str
    session_id: str


@dataclass(frozen=True, slots=True, eq=False)
class KeptSlice:
    """The slice of a session's newest finished turn.

    Attributes:
        owner_id: Its name in the store.
        token_ids: The tokens it stands for, int64 of shape [n].
        nbytes: Bytes in the host pool, or of a file.
        used_s: When it was last used.
    """

    owner_id: str
    token_ids: npt.NDArray[np.int64]
    nbytes: int
    used_s: float


def check_session_id(session_id: object) -> str:
    """Return the id, if it can name a session.

    Raises:
        InvalidRequestError: It is no text, empty, or too long.
    """
    if not isinstance(session_id, str) or not 0 < len(session_id) <= MAX_CLIENT_ID_CHARS:
        raise InvalidRequestError(
            f"session_id must be a text of 1 to {MAX_CLIENT_ID_CHARS} characters",
            field="session_id",
            limit=MAX_CLIENT_ID_CHARS,
        )
    return session_id


def reusable_tokens(kept: npt.NDArray[np.int64], prompt: Sequence[int], *, divisible: bool) -> int:
    """How many tokens at the start of a prompt a kept slice stands for.

    The last token of the prompt is always computed anew: the first output token is drawn from its logits.

    Args:
        kept: Tokens of the slice, shape [n].
        prompt: Token ids of the new turn.
        divisible: Whether the beginning of the slice is of use alone. With recurrent state it is not.
    """
    most = min(len(kept), len(prompt) - 1)
    if most <= 0 or (not divisible and most < len(kept)):
        return 0
    differ = kept[:most] != np.fromiter(itertools.islice(prompt, most), dtype=np.int64, count=most)
    common = int(differ.argmax()) if differ.any() else most
    return common if divisible or common == len(kept) else 0


class Sessions:
    """Keeps the slices of finished turns in the host pool, the least recently used first to go.

    Args:
        store: Holds the bytes, beside those of parked queries.
        outgoing: What is on its way there.
        layout: Of the slices.
        device: Where slices are loaded to.
        counters: Counts what is kept, evicted and reused.
        most_bytes: Most bytes of all idle sessions together; 0 keeps none.
        ttl_s: A session unused for so long is dropped in the next step.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: ParkedStore,
        outgoing: Outgoing,
        layout: RecordLayout,
        device: torch.device,
        counters: Counter[str],
        *,
        most_bytes: int,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_bytes = most_bytes
        self._store, self._layout, self._device = store, layout, device
        self._outgoing = outgoing
        self._counters, self._ttl_s, self._clock = counters, ttl_s, clock
        self._kept: dict[SessionKey, KeptSlice] = {}  # Least recently used first.
        self._numbers = itertools.count(1)
        self._nbytes = 0
        #: By owner: in the pool, and in no file nor on the way to one.
        self._alone: dict[str, SessionKey] = {}
        self._changed: set[SessionKey] = set()
        self._coming: dict[SessionKey, LoadTicket] = {}  # On their way to the device.
        self._given_up: set[SessionKey] = set()

    @property
    def nbytes(self) -> int:
        """Bytes that idle sessions take, in the host pool and in files."""
        return self._nbytes

    @property
    def pool_bytes(self) -> int:
        """What of that lies in the host pool."""
        return sum(self._store.spiller.pool_bytes(kept.owner_id) for kept in self._kept.values())

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the host pool that idle sessions alone keep from being room; a park may have them all."""
        if self._store.spiller.tier is None:
            return self._nbytes
        return sum(self._kept[key].nbytes for key in self._alone.values())

    @property
    def count(self) -> int:
        """Number of sessions."""
        return len(self._kept)

    @property
    def divisible(self) -> bool:
        """Whether the beginning of a slice is of use alone."""
        return not self._layout.state_slots

    def take_changed(self) -> set[SessionKey]:
        """Sessions of which something else is kept since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def get(self, key: SessionKey) -> KeptSlice | None:
        """What is kept of a session; None if nothing is."""
        return self._kept.get(key)

    def reusable_tokens(self, key: SessionKey, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt `load` would bring; changes nothing."""
        kept = self._kept.get(key)
        return 0 if kept is None else reusable_tokens(kept.token_ids, prompt, divisible=self.divisible)

    def load(self, key: SessionKey, prompt: Sequence[int]) -> KVSlice | None:
        """Bring what the prompt begins with to the device; the session stays.

        Returns:
            A slice of at least one and fewer than `len(prompt)` tokens; None if there is nothing of use. A
            damaged session is dropped.
        """
        count = self.reusable_tokens(key, prompt)
        if not count:
            return None
        self._outgoing.finish(self._kept[key].owner_id)
        if key not in self._kept:
            return None  # Its copy has failed just now.
        self._given_up.discard(key)
        coming = self._coming.get(key)
        if coming is not None and coming.kv.n_tokens != count:
            self._give_up(key)
        self._begin(key, count)
        ticket = self._coming.pop(key, None)
        if ticket is None:
            return None
        try:
            kv = self._store.finish_load(ticket)
        except SliceCorruptError:
            self._drop(key)
            return None
        except CopyFailedError:
            return None
        self.touch(key)
        self._counters["session_hits"] += 1
        self._counters["session_tokens_reused"] += count
        return kv

    def bring(self, turns: Mapping[SessionKey, Sequence[int]]) -> None:
        """Begin to bring what prompts begin with, beside the decode; give up what was begun for others.

        Args:
            turns: Prompts that are about to be computed, by their session.
        """
        self._given_up.intersection_update(turns)
        for key in self._coming.keys() - turns.keys():
            self._give_up(key)
        for key, prompt in turns.items():
            count = self.reusable_tokens(key, prompt)
            if count and key not in self._given_up and self._kept[key].owner_id not in self._outgoing:
                self._begin(key, count)

    def give_up(self) -> None:
        """Give up what is on its way: its memory is needed. Whoever wants it waits for it the next time."""
        self._given_up.update(self._coming)
        for key in list(self._coming):
            self._give_up(key)

    def landed(self, key: SessionKey) -> bool:
        """Whether `load` would wait for no copy, in either direction; or for one that could not be begun."""
        ticket, kept = self._coming.get(key), self._kept.get(key)
        if ticket is not None:
            return self._store.ready(ticket)
        return kept is None or kept.owner_id not in self._outgoing

    def touch(self, key: SessionKey) -> None:
        """Make a session the most recently used."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._kept[key] = KeptSlice(kept.owner_id, kept.token_ids, kept.nbytes, self._clock())
            self._changed.add(key)

    def keep(self, key: SessionKey, token_ids: Sequence[int], kv: KVSlice) -> bool:
        """Begin to copy a finished turn's slice to the host pool, in place of the session's older one.

        Args:
            key: The session.
            token_ids: What the slice stands for, one a record.
            kv: The slice; must not be used afterwards.

        Returns:
            Whether it is kept. One that is too large leaves the older one as it is.
        """
        if len(token_ids) != kv.n_tokens:
            raise ValueError(f"{len(token_ids)} token ids for a slice of {kv.n_tokens}")
        if kv.nbytes > min(self.most_bytes, self._store.room_bytes + self.evictable_bytes):
            return False
        if kv.nbytes > min(self.most_bytes - self._nbytes, self._store.room_bytes):
            self._drop(key)
        while kv.nbytes > self.most_bytes - self._nbytes:
            self._evict()
        self.make_room(kv.nbytes)
        owner_id = f"{OWNER_MARK}session {next(self._numbers)}"
        try:
            self._outgoing.start(
                owner_id, kv, self._layout.digest, on_lost=partial(self._lost, key, owner_id)
            )
        except (HostPoolFullError, CopyFailedError, MemoryError):
            return False
        self._drop(key)
        self._kept[key] = KeptSlice(owner_id, np.asarray(token_ids, dtype=np.int64), kv.nbytes, self._clock())
        self._changed.add(key)
        self._alone[owner_id] = key
        self._nbytes += kv.nbytes
        self._counters["sessions_kept"] += 1
        return True

    def make_room(self, nbytes: int) -> None:
        """Evict until `nbytes` are room in the host pool; nobody, if that can't be reached."""
        if nbytes > self._store.room_bytes + self.evictable_bytes:
            return
        while self._alone and self._store.room_bytes < nbytes:
            self._evict(self._alone[self.in_pool_alone()[0]])

    def make_disk_room(self, nbytes: int) -> None:
        """Evict sessions with files until the second tier will soon have `nbytes` free, or there are none."""
        tier = self._store.spiller.tier
        written = [key for key, kept in self._kept.items() if kept.owner_id not in self._alone]
        for key in written:
            if tier is None or tier.free_bytes + tier.dropped_bytes >= nbytes:
                return
            self._evict(key)

    def in_pool_alone(self) -> list[str]:
        """Owners of slices that lie in the pool alone, the least recently used first."""
        return [kept.owner_id for kept in self._kept.values() if kept.owner_id in self._alone]

    def note_writing(self, owner_id: str) -> None:
        """A slice is on its way to a file, if it is a session's: it can't make room before it is there."""
        self._alone.pop(owner_id, None)

    def note_writes(self, ended: Iterable[tuple[str, bool]]) -> None:
        """Take in which writes are over, and whether they have left a file."""
        failed = {owner_id for owner_id, written in ended if not written}
        if failed:
            self._alone |= {kept.owner_id: key for key, kept in self._kept.items() if kept.owner_id in failed}

    def expire(self) -> None:
        """Drop what was not used for the time to live."""
        oldest = self._clock() - self._ttl_s
        while self._kept and next(iter(self._kept.values())).used_s < oldest:
            self._evict()

    def clear(self) -> None:
        """Drop everything."""
        for key in list(self._kept):
            self._drop(key)

    def check_integrity(self) -> None:
        """Raise AssertionError where sessions, their bound and the store contradict each other."""
        held = {kept.owner_id: self._store.parked_bytes(kept.owner_id) for kept in self._kept.values()}
        stray = {owner for owner in self._store.owners if owner.startswith(OWNER_MARK)} - set(held)
        if stray:
            raise AssertionError(f"the store has slices of sessions that are not kept: {stray}")
        for key, kept in self._kept.items():
            if held[kept.owner_id] != kept.nbytes or self._layout.nbytes(len(kept.token_ids)) != kept.nbytes:
                raise AssertionError(f"{key}: {kept} has {held[kept.owner_id]} bytes in the store")
        astray = [owner for owner in self._alone if not self._store.spiller.in_pool_alone(owner)]
        if astray or not set(self._alone.values()) <= set(self._kept):
            raise AssertionError(f"sessions are counted as in the pool alone, and are not: {astray}")
        if stray_keys := {
            key for key, ticket in self._coming.items() if ticket.forgotten or key not in self._kept
        }:
            raise AssertionError(f"copies are under way of sessions that are not kept: {stray_keys}")
        if not sum(held.values()) == self._nbytes <= self.most_bytes:
            raise AssertionError(f"sessions hold {held}, counted {self._nbytes} of {self.most_bytes} bytes")

    def _begin(self, key: SessionKey, count: int) -> None:
        """Begin to bring so many tokens, unless they are on their way; what is lost is dropped."""
        if key in self._coming:
            return
        try:
            self._coming[key] = self._store.begin_load(
                self._kept[key].owner_id, self._device, layout_hash=self._layout.digest, first_tokens=count
            )
        except SliceCorruptError:
            self._drop(key)
        except (CopyFailedError, HostPoolFullError):
            return
        except SHORTAGE_TYPES as error:
            if not is_shortage(error):
                raise

    def _give_up(self, key: SessionKey) -> None:
        self._store.abort(self._coming.pop(key))

    def _lost(self, key: SessionKey, owner_id: str) -> None:
        """Its copy failed: what it replaced is gone, too."""
        kept = self._kept.get(key)
        if kept is not None and kept.owner_id == owner_id:
            self._drop(key)

    def _evict(self, key: SessionKey | None = None) -> None:
        self._drop(next(iter(self._kept)) if key is None else key)
        self._counters["sessions_evicted"] += 1

    def _drop(self, key: SessionKey) -> None:
        if key in self._kept:
            # Bytes that a copy still writes or reads would be no room for whoever wants them now.
            self._outgoing.finish(self._kept[key].owner_id)
            self._store.wait_copies(self._kept[key].owner_id)
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._changed.add(key)
            self._alone.pop(kept.owner_id, None)
            self._coming.pop(key, None)  # The store lets go of its copy.
            self._given_up.discard(key)
            self._store.forget(kept.owner_id)
            self._nbytes -= kept.nbytes
