"""What changes from step to step, in buffers on the card: a captured step reads them and stays valid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDE = torch.int64  # Token ids and positions: what models are used to.
_NARROW = torch.int32  # What kernels count with.


class StepInputs:
    """Token, position and length of every row, and the newest column; written by one copy a step.

        bytes  [ token ids | positions | lengths | cursor ]
                 int64 each              int32 each

    Idle rows have token 0 at position 0 and length 0, which kernels take for "touch nothing".

    Args:
        rows: Rows of the batch.
        device: Where steps run.

    Attributes:
        token_ids: int64, shape [rows, 1].
        position_ids: int64, shape [rows, 1].
        lengths: Tokens by row, the new one included; int32, shape [rows].
        cursor: The newest column; int32, shape [1].
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        on_cuda = device.type == "cuda"
        nbytes = rows * (2 * _WIDE.itemsize + _NARROW.itemsize) + _NARROW.itemsize
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._card = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._host_parts = _parts(self._host, rows)
        ids, positions, self.lengths, self.cursor = _parts(self._card, rows)
        self.token_ids, self.position_ids = ids[:, None], positions[:, None]
        self._copied: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def fill(self, tokens: Mapping[int, Sequence[int]], lengths: Sequence[int], cursor: int) -> None:
        """Set the next step's inputs; the copy takes its turn on the current stream.

        Args:
            tokens: One new token by occupied row.
            lengths: Tokens by row, the new ones included; 0 is idle.
            cursor: The column that the step writes.
        """
        if self._copied is not None:
            self._copied.synchronize()  # The last copy may still read the host's buffer.
        numbers: tuple[list[int], list[int], Sequence[int], list[int]] = (
            [0] * self.rows,
            [max(length - 1, 0) for length in lengths],
            lengths,
            [cursor],
        )
        for row, (token,) in tokens.items():
            numbers[0][row] = token
        for part, new in zip(self._host_parts, numbers, strict=True):
            part.copy_(torch.tensor(new, dtype=part.dtype))
        self._card.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _parts(raw: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions, lengths and cursor as views on a buffer's bytes."""
    wide, narrow = raw[: 2 * rows * _WIDE.itemsize], raw[2 * rows * _WIDE.itemsize :]
    numbers, counts = wide.view(_WIDE), narrow.view(_NARROW)
    return numbers[:rows], numbers[rows:], counts[:rows], counts[rows:]
