"""What batches have in common that never begin a step before the last one's tokens are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class OneByOne:
    """Says no to steps ahead; see `protocol.Batch`."""

    goes_ahead = ahead = False

    @staticmethod
    def likeliest() -> Sequence[int] | None:
        """Nothing but logits."""
        return None

    @staticmethod
    def prepare_ahead(rows: Sequence[int]) -> bool:  # noqa: ARG004 - the protocol's
        """Never."""
        return False

    @staticmethod
    def give(token_ids: torch.Tensor) -> None:  # noqa: ARG004 - the protocol's
        """Nobody would take them.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("no step follows on the card")

    @staticmethod
    def begin_ahead() -> None:
        """Nothing can have been prepared.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("no step was prepared")

    @staticmethod
    def take_ahead() -> torch.Tensor:
        """Nothing can have been begun.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("no step was begun ahead")
