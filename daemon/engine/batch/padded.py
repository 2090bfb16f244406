"""The paper's batch: plain tensors, padding and a 2-D attention mask.

    column      0                                   cursor
    row 0      [ pad pad pad | t0 t1 t2 t3 t4 t5 t6 ]
    row 1      [ t0 t1 t2 t3 t4 t5 t6 t7 t8 t9      ]     <- starts at 0: keeps the leading columns
    row 2      [ pad pad pad pad pad pad pad pad pad ]     <- idle
    row 3      [ pad pad pad pad pad | t0 t1 t2 t3 t4 ]

Serves every model that survives left padding, with any attention implementation; is the oracle in tests and
the baseline in benchmarks. After BATON (dynamic re-batching): vector shaping is `step` with several tokens
for a newcomer, vector embedding is `embed`, resource releasing is in `free`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.one_by_one import OneByOne
from batond.daemon.engine.model.columns import put, release, truncate
from batond.daemon.engine.model.shortage import SHORTAGE_TYPES, is_shortage
from batond.daemon.errors import UnsupportedModelError
from batond.daemon.memory.use import NO_KEYS_AND_VALUES, ArenaUse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers.cache_utils import Cache

    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout, Slot
    from batond.offload.slice import KVSlice


class PaddedBatch(OneByOne):
    """A batch of fixed rows over plain tensors; see `batch.Batch` for the contract.

    Args:
        model: The model.
        rows: Number of rows.
        layout: Byte layout of the model's cache.
    """

    kind = "padded"

    def __init__(self, model: CausalModel, rows: int, layout: RecordLayout) -> None:
        self.rows = rows
        self.layout = layout
        self.device = model.device
        self._model = model
        self._cache: Cache | None = None
        # 1 where a row has a token. Rows shaped inline have holes, so a start index would not do.
        self._mask = torch.zeros(rows, 0, dtype=torch.bool, device=model.device)
        self._lengths = [0] * rows
        self.intact = True

    @property
    def columns(self) -> int:
        """Live columns."""
        return int(self._mask.shape[1])

    @property
    def lengths(self) -> Sequence[int]:
        """Cached tokens per row."""
        return self._lengths

    @property
    def memory(self) -> ArenaUse:
        """What its tensors take, room for columns to come included.

        Not elastic: a parked row leaves its padding behind, and tensors shrink when they are next copied.
        """
        cache = self._cache  # Whoever watches memory asks from a thread of its own.
        if cache is None:
            return NO_KEYS_AND_VALUES
        tensors = (slot.tensor(cache) for slot in self.layout.token_slots)
        sizes = {raw.data_ptr(): raw.nbytes() for raw in (one.untyped_storage() for one in tensors)}
        nbytes = sum(sizes.values())
        return ArenaUse(nbytes, 0, nbytes, elastic=False)

    @staticmethod
    def trim(keep_bytes: int = 0) -> int:  # noqa: ARG004 - the protocol's
        """Nothing is pooled here."""
        return 0

    @staticmethod
    def trim_soon() -> None:
        """Likewise."""

    @staticmethod
    def expect(total_tokens: int) -> None:
        """Of no use: no room is taken ahead that a prompt's length would tell."""

    def close(self) -> None:
        """Give all memory back, at once."""
        self._cache, self._mask = None, self._mask.new_zeros(self.rows, 0)
        self._lengths = [0] * self.rows

    def embed(self, row: int, kv: KVSlice) -> None:
        """Write a slice into an idle row so that it ends at the newest column.

        Shorter than the batch: the row is padded on its left. Longer: all other rows are.

        Args:
            row: An idle row.
            kv: A slice of this batch's layout, on the model's device.
        """
        self._require_idle(row)
        count = kv.n_tokens
        if self._cache is None:
            mask = self._mask.new_zeros(self.rows, count)
            self._cache, self._mask = self._model.blank_cache(self.layout, self.rows, count), mask
        elif count > self.columns:
            self._prepend(count - self.columns)
        try:
            for slot in self.layout.token_slots:
                target = slot.row(self._cache, row)
                target[: self.columns - count] = 0
                target[self.columns - count :] = self.layout.token_part(slot, kv)
            for slot in self.layout.state_slots:
                slot.row(self._cache, row).copy_(self.layout.state_part(slot, kv))
        except BaseException:
            self.free(row)  # With the columns that were made for it.
            raise
        self._mask[row] = False
        self._mask[row, self.columns - count :] = True
        self._lengths[row] = count

    def extract(self, row: int) -> KVSlice:
        """Copy an occupied row's tokens out, without padding."""
        if self._cache is None or not self._lengths[row]:
            raise RuntimeError(f"row {row} is idle")
        return self.layout.pack(self._cache, row, self._mask[row].nonzero()[:, 0])

    def free(self, row: int) -> None:
        """Make a row idle; release the columns before the oldest token of the remaining rows."""
        self._lengths[row] = 0
        self._mask[row] = False
        if not any(self._lengths):
            self._cache, self.intact = None, True
            self._mask = self._mask[:, :0]
            return
        try:
            unused = int(self._mask.any(dim=0).int().argmax())
        except SHORTAGE_TYPES as error:
            if not is_shortage(error):
                raise
            # A row is often freed because there is no memory: counted on the host, without tensors.
            columns = zip(*self._mask.cpu().tolist(), strict=True)
            unused = next(place for place, column in enumerate(columns) if any(column))
        self._release(unused)

    def step(self, tokens: Mapping[int, Sequence[int]], *, all_positions: bool = False) -> torch.Tensor:
        """Run the model over each row's new tokens, all ending in the newest column.

        Running rows bring one token; a newcomer (vector shaping) brings its prompt, and everybody else's
        input and mask are padded to its length.

        Args:
            tokens: New tokens by row.
            all_positions: Return the logits behind every new token, not only behind the newest.

        Returns:
            float32 logits, shape [rows, vocabulary], or [rows, most new tokens, vocabulary] end-aligned.
        """
        width = max(len(new) for new in tokens.values())
        self._require_no_gaps(tokens, width)
        input_ids = torch.zeros(self.rows, width, dtype=torch.int64)
        position_ids = torch.zeros(self.rows, width, dtype=torch.int64)
        fresh = torch.zeros(self.rows, width, dtype=torch.bool)
        lengths = list(self._lengths)
        for row, new in tokens.items():
            first = lengths[row]
            input_ids[row, width - len(new) :] = torch.tensor(new)
            position_ids[row, width - len(new) :] = torch.arange(first, first + len(new))
            fresh[row, width - len(new) :] = True
            lengths[row] = first + len(new)
        device = self._model.device
        mask = torch.cat([self._mask, fresh.to(device)], dim=1)
        cache = self._cache
        if cache is None and not self._model.recipe.own_cache:
            cache = self._model.new_cache()
        # Idle rows see their own newest column: attention over nothing at all is not defined.
        seen = mask.long()
        seen[:, -1] = 1
        try:
            output = self._model.run(
                input_ids.to(device),
                seen,
                position_ids.to(device),
                cache,
                logits_to_keep=None if all_positions else 1,
            )
            logits: torch.Tensor = output.logits
            newest = (logits if all_positions else logits[:, -1]).float()
        except BaseException:
            self._roll_back()
            raise
        self._cache = self._model.cache_of(output) if cache is None else cache
        self._mask, self._lengths = mask, lengths
        return newest

    def check_integrity(self) -> None:
        """Raise AssertionError where mask, lengths and cache contradict each other."""
        found = self._mask.sum(dim=1).tolist()
        if found != self._lengths:
            raise AssertionError(f"mask counts {found}, lengths {self._lengths}")
        if self._cache is None:
            return
        for slot in self.layout.token_slots:
            shape = slot.tensor(self._cache).shape
            if (shape[slot.row_axis], shape[slot.column_axis]) != (self.rows, self.columns):
                raise AssertionError(f"{slot}: {tuple(shape)} in a batch of {self.rows} x {self.columns}")
        if self.columns and not bool(self._mask[:, 0].any()):
            raise AssertionError("leading columns were not released")

    def _prepend(self, count: int) -> None:
        """Left-pad all rows by `count` columns."""
        if self._cache is None:
            raise RuntimeError("an empty batch needs no padding")
        mask = torch.cat([self._mask.new_zeros(self.rows, count), self._mask], dim=1)
        done: list[Slot] = []
        try:
            for slot in self.layout.token_slots:
                padding = slot.zeros(self.rows, count, self.device)
                put(self._cache, slot, torch.cat([padding, slot.tensor(self._cache)], dim=slot.column_axis))
                done.append(slot)
        except BaseException:
            for slot in done:
                release(self._cache, slot, count)
            raise
        self._mask = mask

    def _roll_back(self) -> None:
        """Take back what a forward that failed has written: layers before the one that failed have grown.

        A state is overwritten in place, so there the rows are lost with the forward. An empty batch has
        nothing to lose: its cache is taken over once the forward has succeeded.
        """
        if self._cache is None:
            return
        columns, cache = self.columns, self._cache
        kept = [truncate(cache, slot, columns) for slot in self.layout.token_slots]
        self.intact = self.intact and all(kept) and not self.layout.state_slots

    def _release(self, count: int) -> None:
        """Give back the `count` oldest columns."""
        if not count or self._cache is None:
            return
        for slot in self.layout.token_slots:
            release(self._cache, slot, count)
        self._mask = self._mask[:, count:]

    def _require_idle(self, row: int) -> None:
        if self._lengths[row]:
            raise RuntimeError(f"row {row} is occupied")

    def _require_no_gaps(self, tokens: Mapping[int, Sequence[int]], width: int) -> None:
        """Shaping leaves gaps in the running rows; windows and recurrent state would count them."""
        counting = self.layout.state_slots or self._model.has_windows
        short = (
            row for row, length in enumerate(self._lengths) if length and len(tokens.get(row, ())) < width
        )
        if counting and next(short, None) is not None:
            raise UnsupportedModelError(
                "inline prefill (vector shaping) leaves gaps between a running row's tokens; this model's"
                " sliding windows or recurrent state would count them: use decoupled prefill"
            )
