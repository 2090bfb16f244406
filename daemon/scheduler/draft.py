"""A plan in the making: what is still to be had in this step, and what has been decided."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from batond.daemon.scheduler.claims import (
    chunk_bytes,
    chunk_tokens,
    ends_with_prefill,
    has_host_copy,
    holds_device_bytes,
    needed_bytes,
)
from batond.daemon.scheduler.lanes import Kind
from batond.daemon.scheduler.parks import Parks
from batond.daemon.scheduler.plan import Chunk, Plan
from batond.daemon.scheduler.victims import Choice, VictimPool
from batond.policies.base import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from batond.daemon.scheduler.line import Line
    from batond.daemon.scheduler.plan import BatchView
    from batond.policies.base import QueryView

#: Reasons are given for the head of the line only: the rest waits for the same things.
MAX_BLOCKED: Final = 8

#: Fresh claims of a class that are looked at in vain before the rest of it is left for this step.
LOOK_AHEAD: Final = 64


class Draft:
    """Serves claims one after the other, the most urgent first, out of rows, bytes and chunk tokens.

    Bytes are handed out strictly in order. A claim that holds KV on the device or lacks bytes *earmarks*
    what it needs, so nobody behind it can take that. Hence a prefill is only begun when everything it may
    come to need is free, and a begun one can always be finished: slices never lock each other out.

        [ ............ kv_free_bytes ............ ]
        [ given away | earmarked | open to the next ]

    A strictly more urgent class than that of the first claim that lacks bytes may still pass it, but only on
    bytes that its own victims give back.

    Promised is more than written. A budget that was lowered, or queries that outgrew their reserve, can leave
    more promised than there is: then nobody new gets bytes, but nobody loses any before memory itself,
    what is written with the tokens of this step, is over the budget.

    Attributes:
        overdue: The first claim that needs more than the whole budget, and has waited `pass_over_s`.
    """

    def __init__(self, view: BatchView, line: Line, pass_over_s: float = math.inf) -> None:
        self._view, self._line = view, line
        self._victims = VictimPool(line, view.now_s)
        self._free_rows = view.rows - len(line.running)
        self._free_bytes = math.inf if view.kv_free_bytes is None else view.kv_free_bytes
        self._budget_bytes = self._free_bytes + line.taken_bytes
        self._earmarked_bytes: float = 0
        # Reserved but not written by the end of this step: usable by chunks, which run before rows are taken.
        self._chunk_room_bytes = (
            self._free_bytes + line.unwritten_bytes - view.row_step_bytes * len(line.running)
        )
        self._spare_bytes = self._chunk_room_bytes  # The same once the rows are taken.
        self._grid = (view.chunk_tokens or None) if view.fixed_chunks else None
        self._chunk_tokens = math.inf if view.chunk_tokens is None else view.chunk_tokens
        self._ready = line.ready.copy()
        self._closed_order: float = math.inf
        self._stuck_orders: set[int] = set()
        self._fruitless: Counter[int] = Counter()
        self._came_free = False
        self._soon_free: int | None = None
        self._chunks: list[Chunk] = []
        self._parks = Parks(view)
        self._put_off: set[str] = set()
        self._patient_since_s = view.now_s - pass_over_s
        self.overdue: QueryView | None = None
        self._resume: list[str] = []
        self._admit: list[str] = []
        self._prefetch: list[str] = []
        self._blocked: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing was decided."""
        return not (self._chunks or self._parks.orders or self._resume or self._admit)

    def finish(self) -> Plan:
        """Freeze what has been decided."""
        return Plan(
            chunks=tuple(self._chunks),
            park=tuple(self._parks.orders),
            resume=tuple(self._resume),
            admit=tuple(self._admit),
            prefetch=tuple(self._prefetch),
            blocked=self._blocked,
            reasons=self._reasons,
        )

    def shed(self) -> None:
        """Park the least urgent above the row limit, and until what is written fits: nothing protects."""
        if self._free_rows < 0:
            self._take_rows(self._victims.least_urgent(-self._free_rows), "row_limit", "")
        if self._spare_bytes < 0:
            self._shed(-self._spare_bytes, self._line.holders.values())

    def serve_alone(self, query: QueryView, *, gated: bool = False) -> None:
        """Serve a claim that lacks bytes, where nobody runs or can be served: one always advances.

        What others hold without a row makes room first, as far as it is needed.

        Args:
            query: Not served yet.
            gated: Rows are given out in groups.
        """
        writes = self._view.row_step_bytes
        if query.to_prefill_tokens > 0:
            writes += self._next_chunk(query)[1]
        elif not holds_device_bytes(query):
            writes += query.park_bytes
        others = [one for one in self._line.holders.values() if one is not query]
        if others and writes > self._spare_bytes:
            self._shed(writes - self._spare_bytes, others, stays=query)
            return
        self._budget_bytes = self._free_bytes = self._chunk_room_bytes = math.inf
        self._blocked.pop(query.query_id, None)
        if gated:
            self.serve_group((query,), idle=True)
        else:
            self.serve(query, in_line=False)

    def serve(self, query: QueryView, *, in_line: bool = True) -> None:
        """Give one claim what it can get in this step.

        Args:
            query: The next claim in order.
            in_line: Whether bytes stay reserved for it if it lacks some.
        """
        if query.query_id in self._put_off:
            return
        chunks = len(self._chunks)
        if query.reserved_bytes > self._budget_bytes:
            self._pass_over(query, in_line=in_line)
        elif query.to_prefill_tokens > 0:
            self._serve_prefill(query, in_line=in_line)
        else:
            self._serve_row(query, in_line=in_line)
        if in_line and query.phase is Phase.WAITING and len(self._chunks) == chunks:
            self._fruitless[query.class_order] += 1

    def _pass_over(self, query: QueryView, *, in_line: bool) -> None:
        """The whole budget is too low for it now: those behind it, who may fit, go on while it is young."""
        if query.arrival_s > self._patient_since_s:
            self.block(query, "kv_bytes")
            return
        self._hold_back(query, "kv_bytes", in_line=in_line)
        self.overdue = self.overdue or query

    def shut(self, order: int, kind: Kind) -> bool:
        """Whether nobody of a class and kind can get anything as things stand: it makes long lines cheap.

        Reasons are given for the head of the line only. What is passed over holds no bytes on the device, so
        nothing has to be kept for it, or nothing is left that could be, or more than enough.
        """
        if len(self._blocked) < MAX_BLOCKED or kind is Kind.BEGUN:
            return False
        open_bytes = self._open_bytes()
        # With plenty for all that are parked, what is kept for them makes no difference.
        nothing_left = open_bytes <= 0 or open_bytes >= 2 * self._line.parked_bytes
        if kind is Kind.COPY or kind is Kind.INLINE:
            refused = self._victims.refuses(order, parked=kind is Kind.COPY)
            return self._free_rows <= 0 and refused and nothing_left
        if self._chunk_tokens <= 0:
            return kind is not Kind.DROPPED or nothing_left
        if open_bytes <= 0 and order >= self._closed_order:
            return True
        if kind is Kind.DROPPED:
            return False
        no_row = kind is Kind.PROMPT and self._free_rows <= 0 and order in self._stuck_orders
        return no_row or self._fruitless[order] >= LOOK_AHEAD

    def came_free(self) -> bool:
        """Whether rows or bytes taken from somebody since the last call are left over: lanes may open."""
        if not self._came_free:
            return False
        self._came_free = False
        return self._free_rows > 0 or 0 < self._open_bytes() < math.inf

    def serve_group(self, claims: Iterable[QueryView], *, idle: bool) -> None:
        """Prefill the first claims that fill the batch; let them in together once all rows are free.

        Args:
            claims: The claims in order; as many are taken as are needed.
            idle: No query is running.
        """
        group = self._first_group(claims, idle=idle)
        complete = True
        for query in group:
            complete = self._prefill_for_group(query) and complete
        for query in group:
            if not (idle and complete):
                self.block(query, "row" if query.to_prefill_tokens == 0 else "prefill")
            elif not ends_with_prefill(query):
                self._let_in(query, "batch")

    def block(self, query: QueryView, reason: str) -> None:
        """Note why a claim got nothing."""
        if len(self._blocked) < MAX_BLOCKED:
            self._blocked[query.query_id] = reason

    # Rows

    def _serve_row(self, query: QueryView, *, in_line: bool) -> None:
        room = self._room(query, rows=1)
        if room.reason is None:
            self._take_rows(room.victims, self._cause(rows=1), query.query_id)
            self._let_in(query, "row_taken" if room.victims else "row_free")
        else:
            self._hold_back(query, room.reason, in_line=in_line)

    def _let_in(self, query: QueryView, reason: str) -> None:
        self._reasons[query.query_id] = reason
        self._free_rows -= 1
        self._free_bytes -= needed_bytes(query)
        self._count_ready(query)
        (self._resume if has_host_copy(query) else self._admit).append(query.query_id)

    def _room(self, query: QueryView, *, rows: int) -> Choice:
        need = needed_bytes(query)
        rows_short = max(0, rows - self._free_rows)
        bytes_short = max(0, need - self._open_bytes()) if need > 0 else 0
        if not rows_short and not bytes_short:
            return Choice()
        if query.class_order >= self._closed_order:
            return Choice(reason="kv_bytes" if bytes_short else "row")
        return self._victims.choose(query, rows_short, bytes_short)

    def _open_bytes(self) -> float:
        # Below zero the running queries themselves have been promised too much; that is never earmarked.
        return max(self._free_bytes - self._earmarked_bytes, min(self._free_bytes, 0))

    def _cause(self, rows: int) -> str:
        return "kv_bytes" if self._free_rows >= rows else "row"

    def _take_rows(self, victims: Sequence[QueryView], cause: str, for_query_id: str) -> None:
        if not victims:
            return
        self._victims.take(victims)
        self._came_free = True
        for victim in victims:
            self._parks.add(victim, cause, for_query_id)
            self._free_rows += 1
            self._free_bytes += victim.reserved_bytes
            self._spare_bytes += victim.kv_bytes + self._view.row_step_bytes

    def _shed(self, nbytes: float, rowless: Collection[QueryView], stays: QueryView | None = None) -> None:
        """Park for the limit, with or without rows. What comes free is kept: they are not in line yet."""
        victims = self._victims.over_limit(nbytes, rowless, self._view.row_step_bytes, stays)
        self._take_rows([one for one in victims if one.phase is Phase.RUNNING], "kv_limit", "")
        self._earmarked_bytes += sum(one.reserved_bytes for one in victims)
        for victim in victims:
            if victim.phase is Phase.RUNNING:
                continue
            self._parks.add(victim, "kv_limit")
            self._put_off.add(victim.query_id)
            self._blocked.pop(victim.query_id, None)
            self._count_ready(victim)
            self._free_bytes += victim.kv_bytes
            self._spare_bytes += victim.kv_bytes

    def _count_ready(self, query: QueryView) -> None:
        """Note that a query is no longer prefilled and in line."""
        if query.phase is Phase.READY and not query.held:
            self._ready[query.class_order] -= 1

    def _hold_back(self, query: QueryView, reason: str, *, in_line: bool) -> None:
        self.block(query, reason)
        if not in_line:
            return
        need = needed_bytes(query)
        lacks_bytes = need > 0 and need > self._open_bytes()
        self._foresee(query, lacks_bytes=lacks_bytes)
        # What waits for a row or for chunk tokens alone, and holds nothing, leaves the bytes to others.
        if lacks_bytes or query.phase is not Phase.WAITING:
            self._earmarked_bytes += max(0, need)
        if lacks_bytes:
            self._closed_order = min(self._closed_order, query.class_order)

    def _foresee(self, query: QueryView, *, lacks_bytes: bool) -> None:
        """The next rows to come free are for the first in line; who is parked can be brought back ahead."""
        if query.to_prefill_tokens > 0:
            return
        if self._soon_free is None:
            ending = self._line.running.ending
            self._soon_free = len(ending) - sum(order.query_id in ending for order in self._parks.orders)
        if self._soon_free == 0:
            return
        self._soon_free -= 1
        if has_host_copy(query) and not lacks_bytes:
            self._prefetch.append(query.query_id)
            self._reasons[query.query_id] = "row_soon"

    # Prefill

    def _serve_prefill(self, query: QueryView, *, in_line: bool) -> None:
        if not self._next_tokens(query):
            self._hold_back(query, "prefill", in_line=in_line)
            return
        rows = 0 if ends_with_prefill(query) else 1
        room = self._room(query, rows=rows)
        if room.reason is not None:
            self._prefill_ahead(query, room.reason, in_line=in_line)
            return
        tokens, nbytes = self._next_chunk(query)
        last = tokens == query.to_prefill_tokens
        cause = self._cause(rows)
        if nbytes > self._chunk_room_bytes:
            # Chunks run before rows are taken: make room in this step, compute in the next.
            self._take_rows(room.victims, cause, query.query_id)
            self._earmarked_bytes += needed_bytes(query)
            if not room.victims:
                self.block(query, "kv_bytes")
            return
        self._add_chunk(query, tokens, nbytes)
        if last:
            self._take_rows(room.victims, cause, query.query_id)
        if last and rows:
            self._let_in(query, "row_taken" if room.victims else "row_free")
        else:  # A victim works on until the last chunk.
            self._earmarked_bytes += needed_bytes(query)

    def _prefill_ahead(self, query: QueryView, reason: str, *, in_line: bool) -> None:
        """Compute the prompt of a query that gets no row yet, if few enough are ahead of it.

        Prefilled queries of less urgent classes don't count: they must not keep an urgent one waiting.
        """
        need = needed_bytes(query)
        ahead = sum(count for order, count in self._ready.items() if order <= query.class_order)
        tokens, nbytes = self._next_chunk(query)
        fits = need <= max(0, self._open_bytes()) and nbytes <= self._chunk_room_bytes
        if ends_with_prefill(query) or ahead >= self._view.ready_limit or not fits:
            self._hold_back(query, reason, in_line=in_line)
            if query.phase is Phase.WAITING and (ahead >= self._view.ready_limit or not fits):
                self._stuck_orders.add(query.class_order)
            return
        self._add_chunk(query, tokens, nbytes)
        self._earmarked_bytes += need
        if tokens == query.to_prefill_tokens:
            self._ready[query.class_order] += 1

    def _next_tokens(self, query: QueryView) -> int:
        """Tokens of the next chunk; 0 if it has to wait."""
        return chunk_tokens(query, self._chunk_tokens, self._grid)

    def _next_chunk(self, query: QueryView) -> tuple[int, int]:
        """Tokens of the next chunk, and an upper bound of the bytes it writes."""
        tokens = self._next_tokens(query)
        return tokens, chunk_bytes(query, tokens)

    def _add_chunk(self, query: QueryView, tokens: int, nbytes: int) -> None:
        self._chunks.append(Chunk(query.query_id, tokens, last=tokens == query.to_prefill_tokens))
        self._chunk_tokens -= tokens
        self._chunk_room_bytes -= nbytes

    # Run to completion

    def _first_group(self, claims: Iterable[QueryView], *, idle: bool) -> list[QueryView]:
        group: list[QueryView] = []
        rows = self._view.rows
        for query in claims:
            if rows <= 0:
                break
            if query.query_id in self._put_off:
                continue
            need = needed_bytes(query)
            if need > 0 and need > self._open_bytes():
                self.block(query, "kv_bytes")
                if group or not idle:
                    break
                continue  # Nothing runs that could give bytes back: smaller ones must go first.
            self._earmarked_bytes += max(0, need)
            rows -= not ends_with_prefill(query)
            group.append(query)
        return group

    def _prefill_for_group(self, query: QueryView) -> bool:
        if query.to_prefill_tokens == 0:
            return True
        tokens, nbytes = self._next_chunk(query)
        # What a row limit takes from running queries can be written to in the next step.
        if tokens == 0 or nbytes > self._chunk_room_bytes:
            return False
        self._add_chunk(query, tokens, nbytes)
        return tokens == query.to_prefill_tokens
