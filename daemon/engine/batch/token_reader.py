"""Token ids on their way from the card to the host, which waits for nothing but them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batond.daemon.engine.model.read_back import as_card

if TYPE_CHECKING:
    from collections.abc import Sequence


class TokenReader:
    """Writes the tokens of each step, found or drawn, into memory of the host, by a kernel behind the step.

    A plain read waits for all that was launched by then; this one for its own kernel alone, so the next step
    may be launched in between. A copy would queue behind those of parks.

    Args:
        rows: Most token ids of a step.
        device: Where steps run.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(rows, dtype=torch.int64, pin_memory=on_cuda)
        self._card = (
            as_card(self._host.view(torch.uint8), device).view(torch.int64) if on_cuda else self._host
        )
        self._written: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._count = 0

    def start(self, token_ids: torch.Tensor) -> None:
        """Begin to write, on the current stream; what was not read until now is lost.

        Args:
            token_ids: int64, shape [rows].
        """
        self._count = len(token_ids)
        torch.mul(token_ids, 1, out=self._card[: self._count])
        if self._written is not None:
            self._written.record()

    def wait(self) -> Sequence[int]:
        """The token ids of the last `start`."""
        if self._written is not None:
            self._written.synchronize()
        token_ids: list[int] = self._host[: self._count].tolist()
        return token_ids
