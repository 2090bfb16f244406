"""The ring: columns that wrap, token-major records, nothing moved while decoding.

    column     0           cursor                          capacity
    row 0     [ ######## a9 |......................| a0 ### )    wraps: two byte ranges
    row 1     [ ..... b0 b5 |............................... )    one byte range
    row 2     [ ............|............................... )    idle

One step writes one new column for all rows: column = step mod capacity. Every row's newest token sits at
the cursor, and a row of n tokens owns the n columns that end there. Keys carry their positions already and
attention does not care about the order in which keys are stored, so wrapping is free. Releasing costs nothing
either: a column is reusable as soon as no row's range covers it, which a capacity of the longest query
guarantees. What memory stands behind the columns is the arena's business (`arenas/`): it is told of every
column before that is written, and of every row that comes free.

    storage[row, column]   one record: all layers' keys and values of one token, see `model/layout.py`
    state[row]             what doesn't grow with tokens
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.arenas.arena import ArenaShape, NewArena
from batond.daemon.engine.batch.arenas.choice import auto_arena
from batond.daemon.engine.batch.card_steps import NO_CARD, RING_RECIPE, CardSteps, CardUse
from batond.daemon.engine.batch.pending import Pending
from batond.daemon.engine.batch.ring_attention import RING_ATTENTION, active_window, ignored_arguments
from batond.daemon.engine.batch.ring_cache import ring_cache
from batond.daemon.engine.batch.ring_window import RingWindow, ranges_up_to
from batond.offload.landing import empty_records
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.memory.use import ArenaUse

#: A page is asked for so many steps ahead: a step takes some milliseconds, and mapping 64 pages about two.
_EXPECT_STEPS = 2


class RingBatch:
    """A batch of fixed rows over a ring of columns; see `batch.Batch` for the contract.

    Args:
        model: The model.
        rows: Number of rows.
        layout: Byte layout of the model's cache.
        capacity: Columns of the ring: the most tokens a row may hold.
        row_by_row: Attend to every row by itself: slower, and no bit of a row depends on its mates. Kernels
            do so anyhow.
        card: What of a card to use.
        new_arena: Makes the storage of its records.

    Attributes:
        intact: See `Batch`.
        card: What of a card it may use.

    Raises:
        UnsupportedModelError: The model's cache has layers that the ring can't stand in for.
    """

    kind = "ring"

    def __init__(
        self,
        model: CausalModel,
        rows: int,
        layout: RecordLayout,
        capacity: int,
        *,
        row_by_row: bool = False,
        card: CardUse = NO_CARD,
        new_arena: NewArena = auto_arena,
    ) -> None:
        self.rows = rows
        self.layout = layout
        self.device = model.device
        self.capacity = capacity
        self._model = model
        self._row_by_row, self.card = row_by_row, card
        self._new_arena = new_arena
        self._arena = new_arena(ArenaShape(rows, capacity, layout.record_bytes), model.device)
        self._storage = self._arena.tensor
        self._held_columns = [0] * rows  # Committed, counted from the row's oldest.
        self._state = torch.zeros(rows, layout.state_bytes, dtype=torch.uint8, device=model.device)
        self._lengths = [0] * rows
        self._cursor = -1  # Newest column; -1 before the first.
        self.intact = True
        self._ahead: Pending | None = None
        self._on_card: CardSteps | None = None
        if card.kernels:
            self._on_card = CardSteps(model, layout, self._storage, self._state, card)
            return
        self._window = RingWindow(
            self._storage, row_by_row=row_by_row, ignored=ignored_arguments(model.attention_name)
        )
        self._cache = ring_cache(model, layout, self._storage, self._state, self._window)

    def empty_again(self) -> RingBatch:
        """Another batch like this one, with all rows idle."""
        return RingBatch(
            self._model,
            self.rows,
            self.layout,
            self.capacity,
            row_by_row=self._row_by_row,
            card=self.card,
            new_arena=self._new_arena,
        )

    @property
    def graph_rows(self) -> Sequence[int]:
        """Row counts whose step is a captured graph, ascending; empty without any."""
        return self._on_card.graphs.sizes if self._on_card is not None else ()

    @property
    def why_no_graphs(self) -> str:
        """Why not all row counts are captured; "" where they are, or nobody asked."""
        return self._on_card.graphs.why_no_more if self._on_card is not None else ""

    @property
    def remark(self) -> str:
        """What an operator should know of how it decodes, in words; "" if there is nothing."""
        return (self._on_card.remark if self._on_card is not None else "") + self._arena.remark

    @property
    def columns(self) -> int:
        """Live columns: those of the longest row."""
        return max(self._lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """Cached tokens per row."""
        return self._lengths

    def likeliest(self) -> Sequence[int] | None:
        """Token ids of the greatest logits of the first rows, or those given; None without a card."""
        return self._on_card.likeliest() if self._on_card is not None else None

    @property
    def memory(self) -> ArenaUse:
        """What its records take."""
        return self._arena.use

    def trim(self, keep_bytes: int = 0) -> int:
        """Give pooled memory back to the system."""
        return self._arena.trim(keep_bytes)

    def trim_soon(self) -> None:
        """Have pooled memory given back; any thread may ask."""
        self._arena.trim_soon()

    def close(self) -> None:
        """Give all memory back, at once; the batch can't be used afterwards."""
        self._lengths, self._held_columns = [0] * self.rows, [0] * self.rows
        self._arena.close()

    def embed(self, row: int, kv: KVSlice) -> None:
        """Write a slice into an idle row so that it ends at the cursor: one or two plain copies."""
        if self._lengths[row]:
            raise RuntimeError(f"row {row} is occupied")
        self._refuse_ahead()
        if kv.n_tokens >= self.capacity:
            raise RuntimeError(
                f"{kv.n_tokens} tokens leave no column for the next in a ring of {self.capacity}"
            )
        # An empty ring starts anew: the same pages are used again.
        cursor = self._cursor if any(self._lengths) else kv.n_tokens - 1
        ranges = ranges_up_to(cursor, kv.n_tokens, self.capacity)
        try:
            behind = self._write(row, ranges, kv)
        except BaseException:
            self._arena.release(row, ranges)
            raise
        self._cursor, self._lengths[row], self._held_columns[row] = cursor, kv.n_tokens, kv.n_tokens + behind

    def _write(self, row: int, ranges: Sequence[tuple[int, int]], kv: KVSlice) -> int:
        """Commit the ranges and fill them; returns how many columns behind the last are committed, too."""
        behind = 0
        for first, last in ranges:
            behind = self._arena.commit(row, first, last)
        done = 0
        for first, last in ranges:
            self._storage[row, first:last] = kv.tokens[done : done + last - first]
            done += last - first
        self._state[row] = kv.state
        return behind

    def extract(self, row: int) -> KVSlice:
        """Copy an occupied row out; byte ranges, no gather."""
        if not self._lengths[row]:
            raise RuntimeError(f"row {row} is idle")
        tokens = empty_records(self._lengths[row], self.layout.record_bytes, self.device)
        done = 0
        for first, last in self._ranges(self._lengths[row]):
            tokens[done : done + last - first] = self._storage[row, first:last]
            done += last - first
        return KVSlice(tokens, self._state[row].clone())

    def free(self, row: int) -> None:
        """Make a row idle; its columns are free from now on, and what memory stands behind them goes.

        In torch, rows read together see each other's span behind a mask, and what is masked counts as zero
        times its value, which is not zero where one query's numbers overflowed: the arena zeroes them there.
        The card's kernels read each row's own columns and nothing else.
        """
        if self._ahead is not None:  # It may write one column more, for nobody.
            self._ahead.rows.discard(row)
            if not self._ahead.rows:
                self._ahead = None
        length = self._lengths[row]
        written = () if self._on_card is not None else ranges_up_to(self._cursor, length, self.capacity)
        self._arena.release(row, written)
        self._state[row] = 0
        self._lengths[row] = self._held_columns[row] = 0
        self.intact = self.intact or not any(self._lengths)

    def step(self, tokens: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Run the model over one new token per occupied row.

        A forward that fails leaves the books as they were; the column it wrote is written again by the next,
        and zeroed meanwhile, see `free`. What it did to states can't be taken back: `intact` says so.

        Args:
            tokens: One token by occupied row.

        Returns:
            float32 logits, shape [rows, vocabulary]; on a card perhaps of the first rows alone. The next step
            may overwrite them.

        Raises:
            torch.OutOfMemoryError: There is no memory for the new column; rows that got some keep it.
        """
        self._refuse_ahead()
        lengths, cursor = self._grown(tokens)
        self._commit_column(lengths, cursor)
        try:
            if self._on_card is not None:
                logits = self._on_card.run(tokens, lengths, cursor).logits
            else:
                logits = self._torch_step(tokens, lengths, cursor)
        except BaseException:
            self._give_up(tokens, cursor)
            raise
        self._lengths, self._cursor = lengths, cursor
        self._expect_columns()
        return logits

    @property
    def goes_ahead(self) -> bool:
        """Whether steps can be begun ahead.

        Not where rows have states, which a step for nobody would spoil, nor without graphs: an eager step
        keeps the host busy all the while.
        """
        return self._on_card is not None and bool(self.graph_rows) and not self.layout.state_slots

    def give(self, token_ids: torch.Tensor) -> None:
        """Have these tokens follow the last step instead of the likeliest; int64, shape of its first rows."""
        if self._on_card is None:
            raise RuntimeError("no step follows on the card")
        self._on_card.give(token_ids)

    @property
    def ahead(self) -> bool:
        """Whether a step was begun that is not in the books yet."""
        return self._ahead is not None and self._ahead.begun

    def prepare_ahead(self, rows: Sequence[int]) -> bool:
        """Set the inputs of the step after the last one, whose tokens it takes; launches nothing.

        Raises:
            torch.OutOfMemoryError: There is no memory for its column; rows that got some keep it.
        """
        self._refuse_ahead()
        if self._on_card is None or not self.goes_ahead or not rows:
            return False
        lengths, cursor = self._grown(rows)
        self._commit_column(lengths, cursor)
        taken = set(rows)
        now = [length if row in taken else 0 for row, length in enumerate(lengths)]
        self._on_card.follow(rows, now, cursor)
        self._ahead = Pending(taken, cursor)
        return True

    def begin_ahead(self) -> None:
        """Launch the step that was prepared. Until it is taken in, rows may only leave.

        Raises:
            RuntimeError: None was prepared since the last step.
        """
        if self._ahead is None or self._ahead.begun or self._on_card is None:
            raise RuntimeError("no step was prepared")
        self._on_card.run_on()
        self._ahead.begun = True

    def take_ahead(self) -> torch.Tensor:
        """Take the step begun ahead into the books, for all rows of it that are still there.

        Returns:
            Its logits, as `step`.

        Raises:
            RuntimeError: None was begun, all its rows have left, or one is here that it did not compute.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.begun or self._on_card is None:
            raise RuntimeError("no step was begun ahead")
        if left_out := {row for row, length in enumerate(self._lengths) if length} - ahead.rows:
            raise RuntimeError(f"rows {sorted(left_out)} are occupied, and the step did not compute them")
        for row in ahead.rows:
            self._lengths[row] += 1
        self._cursor = ahead.cursor
        self._expect_columns()
        return self._on_card.last.logits

    def _refuse_ahead(self) -> None:
        """A step begun ahead must be taken in before anything else; one only prepared is dropped."""
        if self.ahead:
            raise RuntimeError("a step was begun ahead and is not in the books yet")
        self._ahead = None

    def _grown(self, rows: Iterable[int]) -> tuple[list[int], int]:
        """Lengths and cursor with one more token in these rows."""
        lengths = list(self._lengths)
        for row in rows:
            lengths[row] += 1
        return lengths, (self._cursor + 1) % self.capacity

    def _commit_column(self, lengths: Sequence[int], cursor: int) -> None:
        """Have memory for the column at the cursor in every occupied row; lengths are the new ones."""
        for row, length in enumerate(lengths):
            if length > self._held_columns[row]:
                self._held_columns[row] = length + self._arena.commit(row, cursor, cursor + 1)

    def _expect_columns(self) -> None:
        """Tell the arena which rows need memory in a few steps: it may have it ready by then."""
        for row, length in enumerate(self._lengths):
            ahead = self._held_columns[row] + 1 - length
            if length and ahead <= _EXPECT_STEPS and length + ahead <= self.capacity:
                self._arena.expect(row, (self._cursor + ahead) % self.capacity)

    def _give_up(self, rows: Iterable[int], cursor: int) -> None:
        """A forward over these rows has failed; its column may have been written in some layers."""
        self.intact = self.intact and not self.layout.state_slots
        with contextlib.suppress(RuntimeError):  # A device that is past use says so once more.
            for row in rows:
                self._storage[row, cursor] = 0

    def _torch_step(
        self, tokens: Mapping[int, Sequence[int]], lengths: Sequence[int], cursor: int
    ) -> torch.Tensor:
        """The step with torch's attention over the window that the rows share; lengths are the new ones."""
        input_ids = torch.zeros(self.rows, 1, dtype=torch.int64)
        position_ids = torch.zeros(self.rows, 1, dtype=torch.int64)
        for row, (token,) in tokens.items():
            input_ids[row, 0] = token
            position_ids[row, 0] = lengths[row] - 1
        self._window.advance(cursor, lengths)
        with active_window(self._window), self._model.attention(RING_ATTENTION):
            return self._model.forward(
                input_ids.to(self.device),
                self._window.padding_mask(),
                position_ids.to(self.device),
                self._cache,
                recipe=RING_RECIPE,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict each other."""
        if not -1 <= self._cursor < self.capacity:
            raise AssertionError(f"cursor {self._cursor} in a ring of {self.capacity}")
        for row, length in enumerate(self._lengths):
            if not 0 <= length <= self.capacity:
                raise AssertionError(f"row {row} holds {length} tokens in a ring of {self.capacity}")
            held = self._held_columns[row]
            if not length <= held <= self.capacity + length:
                raise AssertionError(f"row {row} has memory for {held} tokens and holds {length}")
            if length and not all(self._arena.holds(row, *columns) for columns in self._ranges(length)):
                raise AssertionError(f"row {row} holds {length} tokens without memory")
            if not length and self._arena.use.elastic and self._arena.row_bytes(row):
                raise AssertionError(f"idle row {row} holds {self._arena.row_bytes(row)} bytes")
        self._arena.check_integrity()

    def _ranges(self, length: int) -> tuple[tuple[int, int], ...]:
        """Column ranges [first, last) of the `length` columns that end at the cursor, oldest first."""
        return ranges_up_to(self._cursor, length, self.capacity)
