"""One query's prompt, computed in chunks apart from the batch (prefill and decode decoupled)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batond.daemon.engine.batch.protocol import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from batond.offload.slice import KVSlice

LOGITS_TOKENS = 256  # Logits of all places of a longer chunk at once would need gigabytes.


class PromptBatch(Batch, Protocol):
    """A batch that can show the logits behind every token of a prompt."""

    def expect(self, total_tokens: int) -> None:
        """Be told how many tokens there will be in all: no more room is needed."""

    def step(self, tokens: Mapping[int, Sequence[int]], *, all_positions: bool = False) -> torch.Tensor:
        """As `Batch.step`; with `all_positions`, shape [rows, most new tokens, vocabulary], end-aligned."""


class Prefill:
    """Prompt computation of one query; can be interrupted after every chunk, keeps what it has.

    It is a batch of one row: chunks append columns, and the finished slice is its only row.

    Args:
        batch: An empty batch of one row.
        kv: What was computed before and parked; None starts from nothing.
        total_tokens: Of the whole prompt, what was computed before included; None if nobody knows.
        divisible: A chunk may be computed in parts.
    """

    def __init__(
        self,
        batch: PromptBatch,
        kv: KVSlice | None = None,
        *,
        total_tokens: int | None = None,
        divisible: bool = True,
    ) -> None:
        self._batch = batch
        self._divisible = divisible
        self._noted = True
        if total_tokens is not None:
            batch.expect(total_tokens)
        if kv is not None:
            batch.embed(0, kv)

    @property
    def done_tokens(self) -> int:
        """Tokens computed so far."""
        return self._batch.lengths[0]

    @property
    def intact(self) -> bool:
        """False after a chunk that failed and can't be taken back: the prompt must be begun anew."""
        return self._batch.intact and self._noted

    def run(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute the next chunk.

        Args:
            token_ids: The tokens that follow those computed so far; at least one.

        Returns:
            float32 logits after the last of them, shape [vocabulary].
        """
        return self._batch.step({0: token_ids})[0]

    def run_noting(self, token_ids: Sequence[int], note: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        """Compute the next chunk in parts and show the logits behind each of its tokens.

        Args:
            token_ids: As in `run`.
            note: Called with the index of a part's first token and the part's float32 logits, shape
                [tokens, vocabulary].

        Returns:
            As `run`.
        """
        most_tokens = LOGITS_TOKENS if self._divisible else len(token_ids)
        for start in range(0, len(token_ids), most_tokens):
            first = self.done_tokens
            behind = self._batch.step({0: token_ids[start : start + most_tokens]}, all_positions=True)[0]
            self._noted = False  # Tokens whose logits nobody has seen can't be gone on from.
            note(first, behind)
            self._noted = True
        return behind[-1]

    def slice(self) -> KVSlice:
        """The KV of all tokens computed so far."""
        return self._batch.extract(0)
