"""One query's prompt, computed in chunks apart from the batch (prefill and decode decoupled)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from batond.daemon.engine.batch import Batch
    from batond.offload.slice import KVSlice


class Prefill:
    """Prompt computation of one query; can be interrupted after every chunk, keeps what it has.

    It is a batch of one row: chunks append columns, and the finished slice is its only row.

    Args:
        batch: An empty batch of one row.
        kv: What was computed before and parked; None starts from nothing.
    """

    def __init__(self, batch: Batch, kv: KVSlice | None = None) -> None:
        self._batch = batch
        if kv is not None:
            batch.embed(0, kv)

    @property
    def done_tokens(self) -> int:
        """Tokens computed so far."""
        return self._batch.lengths[0]

    def run(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute the next chunk.

        Args:
            token_ids: The tokens that follow those computed so far; at least one.

        Returns:
            float32 logits after the last of them, shape [vocabulary].
        """
        return self._batch.step({0: token_ids})[0]

    def slice(self) -> KVSlice:
        """The KV of all tokens computed so far."""
        return self._batch.extract(0)
