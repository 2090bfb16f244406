"""Penalties for tokens that were there before, for all rows at once.

The table holds one number per (slot, token id): how often the token stands in the output, plus a flag if it
stands in the prompt. Counting goes by a query's token lists, never by what the batch holds, so padding and
batch mates can't be counted, and a slot that was given away (a park, a crash) is rebuilt from the lists.
A step adds each row's newest token in one scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from batond.daemon.engine.sampling.tensors import on_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.requests.params import SamplingParams

_IN_PROMPT: Final = 1 << 30  # Above every count: a context has fewer tokens.


@dataclass(frozen=True, slots=True)
class History:
    """The tokens of one query.

    Attributes:
        key: Unique name.
        prompt_token_ids: The prompt.
        output_token_ids: What was emitted; it only ever grows while the key is known to a table.
    """

    key: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(slots=True)
class _Slot:
    index: int
    counted: int  # Output tokens that are in the table.


class TokenCounts:
    """Token counts of the queries that ask for penalties; 4 bytes per slot and token id.

    Args:
        vocab_size: Width of the logits.
        device: Where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._slots: dict[str, _Slot] = {}
        self._idle: list[int] = []
        self._nobody = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._table = self._nobody

    @property
    def slots(self) -> int:
        """Slots that exist, used or not."""
        return int(self._table.shape[0])

    def rows(self, histories: Sequence[History]) -> torch.Tensor:
        """Counts as of now. A call that fails may have counted in part: `forget` the keys, and ask again.

        Args:
            histories: One per row wanted; keys differ.

        Returns:
            int32, shape [len(histories), vocabulary]: output count, plus 2^30 if in the prompt.
        """
        fresh = [history for history in histories if history.key not in self._slots]
        if fresh:
            self._open(fresh)
        slots = [self._slots[history.key] for history in histories]
        new_cells: list[int] = []
        for history, slot in zip(histories, slots, strict=True):
            first = slot.index * self._vocab_size
            new_cells += [first + token for token in history.output_token_ids[slot.counted :]]
            slot.counted = len(history.output_token_ids)
        if new_cells:
            cells = on_device(new_cells, torch.int64, self._table.device)
            self._table.view(-1).scatter_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
        return self._table[on_device([slot.index for slot in slots], torch.int64, self._table.device)]

    def forget(self, key: str) -> None:
        """Give a query's slot back; unknown keys are ignored."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        self._idle.append(slot.index)
        if not self._slots:  # Nobody asks any more: the memory is the batch's.
            self._table, self._idle = self._nobody, []

    def _open(self, histories: Sequence[History]) -> None:
        """Give each a slot that holds its prompt."""
        missing = len(histories) - len(self._idle)
        if missing > 0:
            grown, first = max(missing, self.slots), self.slots  # Doubling: a copy per query is quadratic.
            self._table = torch.cat([self._table, self._table.new_zeros(grown, self._vocab_size)])
            self._idle += range(first, first + grown)
        cells: list[int] = []
        for history in histories:
            slot = self._slots[history.key] = _Slot(self._idle.pop(), 0)
            cells += [slot.index * self._vocab_size + token for token in history.prompt_token_ids]
        device = self._table.device
        opened = [self._slots[history.key].index for history in histories]
        self._table[on_device(opened, torch.int64, device)] = 0
        if cells:
            self._table.view(-1)[on_device(cells, torch.int64, device)] = _IN_PROMPT


def penalize(logits: torch.Tensor, counts: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply repetition, then presence and frequency penalties.

    Args:
        logits: float32, shape [rows, vocabulary].
        counts: From `TokenCounts.rows`, same shape.
        params: One per row; a value that is off leaves its row as it is, bit for bit.

    Returns:
        New logits of the same shape.
    """
    repetition, presence, frequency = (
        on_device(values, torch.float32, logits.device)[:, None]
        for values in (
            [one.repetition_penalty for one in params],
            [one.presence_penalty for one in params],
            [one.frequency_penalty for one in params],
        )
    )
    in_output = counts & (_IN_PROMPT - 1)
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(counts != 0, repeated, logits)
    return logits - frequency * in_output - presence * (in_output > 0)
