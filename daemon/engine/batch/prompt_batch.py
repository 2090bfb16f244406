"""One prompt computed by captured forwards: its records are its slice from the first chunk on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.one_by_one import OneByOne
from batond.daemon.engine.batch.prompt_inputs import Part
from batond.daemon.engine.model.shortage import SHORTAGE_TYPES, is_shortage
from batond.daemon.memory.use import NO_KEYS_AND_VALUES
from batond.offload.landing import empty_records
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batond.daemon.engine.batch.prompt_steps import PromptSteps

_SPARE_SHARE = 1 / 8  # A slice with more room than this behind it is copied out.


class CapturedPrompt(OneByOne):
    """A batch of one row for a prompt; see `batch.Batch` and `prefill.PromptBatch` for the contract.

    What lies in the records below `lengths[0]` never changes again: a slice is a view on them.

    Args:
        steps: Captured forwards.
    """

    kind = "prompt"
    rows = 1
    intact = True
    memory = NO_KEYS_AND_VALUES

    def __init__(self, steps: PromptSteps) -> None:
        self.layout, self.device = steps.layout, steps.device
        self._steps = steps
        self._length = 0
        self._total_tokens: int | None = None
        self._records = torch.empty(0, self.layout.record_bytes, dtype=torch.uint8, device=self.device)
        self._is_own = False  # Records that were given to it are not written behind.

    @property
    def columns(self) -> int:
        """Tokens computed."""
        return self._length

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens computed, of its only row."""
        return [self._length]

    @staticmethod
    def trim(keep_bytes: int = 0) -> int:  # noqa: ARG004 - the protocol's
        """Nothing is pooled here."""
        return 0

    @staticmethod
    def trim_soon() -> None:
        """Likewise."""

    def close(self) -> None:
        """Give all memory back."""
        self.free(0)

    def expect(self, total_tokens: int) -> None:
        """Have room for so many tokens at most, where there is a choice."""
        self._total_tokens = total_tokens

    def embed(self, row: int, kv: KVSlice) -> None:
        """Begin behind a slice; nothing is copied before the next chunk."""
        if self._length:
            raise RuntimeError(f"row {row} is occupied")
        self._records, self._length, self._is_own = kv.tokens.contiguous(), kv.n_tokens, False

    def extract(self, row: int) -> KVSlice:
        """All tokens computed so far: a view, or a copy where much lies behind them and there is memory."""
        if not self._length:
            raise RuntimeError(f"row {row} is idle")
        tokens, room = self._records[: self._length], self._records.shape[0] - self._length
        if room > self._length * _SPARE_SHARE:
            try:
                tokens = self._copied(self._length)
            except SHORTAGE_TYPES as error:
                if not is_shortage(error):
                    raise
        return KVSlice(tokens, torch.zeros(0, dtype=torch.uint8, device=self.device))

    def free(self, row: int) -> None:  # noqa: ARG002 - there is one
        """Forget all tokens."""
        self._length, self._records, self._is_own = 0, self._records[:0], False

    def step(self, tokens: Mapping[int, Sequence[int]], *, all_positions: bool = False) -> torch.Tensor:
        """Append a chunk; one that is longer than the largest forward takes several.

        Args:
            tokens: The new tokens of row 0.
            all_positions: Return the logits behind every new token.

        Returns:
            float32 logits, shape [1, vocabulary] or [1, new tokens, vocabulary].

        Raises:
            torch.OutOfMemoryError: There is no memory for them; nothing has changed.
        """
        new, most = tokens[0], self._steps.most_tokens
        self._reserve(self._length + len(new))
        address, found = self._records.data_ptr(), []
        for first in range(0, len(new), most):
            part = Part(new[first : first + most], self._length + first, address)
            found.append(self._steps.run_noting(part) if all_positions else self._steps.run([part]))
        self._length += len(new)
        return torch.cat(found)[None] if all_positions else found[-1]

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict each other."""
        if self._length > self._records.shape[0]:
            raise AssertionError(f"{self._length} tokens in {self._records.shape[0]} records")

    def _reserve(self, count: int) -> None:
        """Have records for so many tokens: as many at first, twice as many as there were later on.

        The whole prompt needs no more than its own, and where memory is short it gets those it needs now.
        """
        room = self._records.shape[0]
        if self._is_own and count <= room:
            return
        doubled = 2 * room if self._total_tokens is None else min(2 * room, self._total_tokens)
        wanted = max(count, doubled) if self._is_own else count
        try:
            grown = self._copied(wanted)
        except SHORTAGE_TYPES as error:
            if wanted == count or not is_shortage(error):
                raise
            grown = self._copied(count)
        self._records, self._is_own = grown, True

    def _copied(self, count: int) -> torch.Tensor:
        """So many records of its own, which begin with all tokens computed so far."""
        records = empty_records(count, self.layout.record_bytes, self.device)
        records[: self._length] = self._records[: self._length]
        return records
