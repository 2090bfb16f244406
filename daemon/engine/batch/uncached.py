"""A batch for models without a cache: every step computes every row from its first token.

A row is nothing but its token ids, so a slice holds those, and a park costs eight bytes a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batond.daemon.engine.batch.one_by_one import OneByOne
from batond.daemon.engine.model.layout import RecordLayout, Slot
from batond.daemon.engine.model.tensors import NO_INDEX, WHOLE_CACHE
from batond.daemon.errors import UnsupportedModelError
from batond.daemon.memory.use import NO_KEYS_AND_VALUES
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batond.daemon.engine.model.causal import CausalModel

_ID_BYTES = 8
TOKEN_ID_LAYOUT = RecordLayout(
    (Slot(WHOLE_CACHE, "token_ids", NO_INDEX, (), torch.int64, 0, _ID_BYTES, 0, 1),),
    (),
)


class UncachedBatch(OneByOne):
    """Rows of token ids; see `batch.Batch` for the contract.

    Args:
        model: The model.
        rows: Number of rows.
        shared: Rows share a left-padded forward. Otherwise each has a forward of its own, asked for as
            transformers' `generate` asks, which serves models with inputs of their own.
    """

    kind = "uncached"
    intact = True
    memory = NO_KEYS_AND_VALUES

    def __init__(self, model: CausalModel, rows: int, *, shared: bool) -> None:
        self.rows = rows
        self.layout = TOKEN_ID_LAYOUT
        self.device = model.device
        self._model = model
        self._shared = shared
        self._tokens: list[list[int]] = [[] for _ in range(rows)]

    @property
    def columns(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens per row."""
        return [len(tokens) for tokens in self._tokens]

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
        """Forget all tokens."""
        self._tokens = [[] for _ in range(self.rows)]

    def embed(self, row: int, kv: KVSlice) -> None:
        """Take a slice's token ids into an idle row."""
        if self._tokens[row]:
            raise RuntimeError(f"row {row} is occupied")
        ids = self.layout.token_part(self.layout.token_slots[0], kv)
        self._tokens[row] = [int(token) for token in ids.tolist()]

    def extract(self, row: int) -> KVSlice:
        """An occupied row's token ids as a slice."""
        if not self._tokens[row]:
            raise RuntimeError(f"row {row} is idle")
        ids = torch.tensor(self._tokens[row], dtype=torch.int64, device=self.device)
        records = torch.zeros(len(ids), self.layout.record_bytes, dtype=torch.uint8, device=self.device)
        records[:, :_ID_BYTES] = ids[:, None].view(torch.uint8)
        return KVSlice(records, torch.zeros(0, dtype=torch.uint8, device=self.device))

    def free(self, row: int) -> None:
        """Make a row idle."""
        self._tokens[row] = []

    def step(self, tokens: Mapping[int, Sequence[int]], *, all_positions: bool = False) -> torch.Tensor:
        """Append each row's new tokens and compute the rows.

        Args:
            tokens: New tokens by row.
            all_positions: Return the logits behind every new token, not only behind the newest.

        Returns:
            float32 logits, shape [rows, vocabulary], or [rows, most new tokens, vocabulary] end-aligned.
        """
        before = list(self._tokens)
        for row, new in tokens.items():
            self._tokens[row] = [*self._tokens[row], *new]
        width = max(len(new) for new in tokens.values()) if all_positions else 1
        try:
            logits = self._together() if self._shared else self._one_by_one(list(tokens), width)
        except BaseException:
            self._tokens = before
            raise
        return logits[:, -width:] if all_positions else logits[:, -1]

    def check_integrity(self) -> None:
        """Nothing here can contradict itself."""

    def _together(self) -> torch.Tensor:
        """Logits of all rows in one left-padded forward, shape [rows, columns, vocabulary]."""
        columns = self.columns
        input_ids = torch.zeros(self.rows, columns, dtype=torch.int64)
        position_ids = torch.zeros_like(input_ids)
        seen = torch.zeros_like(input_ids)
        for row, tokens in enumerate(self._tokens):
            start = columns - len(tokens)
            input_ids[row, start:] = torch.tensor(tokens, dtype=torch.int64)
            position_ids[row, start:] = torch.arange(len(tokens))
            seen[row, start:] = 1
        seen[:, -1] = 1  # Attention over nothing at all is not defined.
        device = self.device
        output = self._model.run(
            input_ids.to(device), seen.to(device), position_ids.to(device), None, logits_to_keep=None
        )
        logits: torch.Tensor = output.logits
        return logits.float()

    def _one_by_one(self, rows: Sequence[int], width: int) -> torch.Tensor:
        """Logits of some rows, each alone, shape [rows, width, vocabulary]."""
        logits = torch.zeros(self.rows, width, self._model.vocab_size, device=self.device)
        for row in rows:
            found = self._alone(self._tokens[row])
            if found.shape[0] < width:
                raise UnsupportedModelError("this model shows the logits behind its newest token only")
            logits[row] = found[-width:]
        return logits

    def _alone(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], device=self.device)
        model: Any = self._model.model
        inputs = model.prepare_inputs_for_generation(
            ids, attention_mask=torch.ones_like(ids), use_cache=False
        )
        with torch.no_grad():
            output = model(**{**inputs, "use_cache": False})
        logits: torch.Tensor = output.logits[0]
        return logits.float()
