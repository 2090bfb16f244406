"""What changes from step to step, in buffers on the card: a captured step reads them and stays valid."""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
        nbytes = rows * (2 * _WIDE.itemsize + _NARROW.itemsize) + _NARROW.itemsize
        self._card = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        ids, positions, self.lengths, self.cursor = _parts(self._card, rows)
        self.token_ids, self.position_ids = ids[:, None], positions[:, None]
        self._numbers = struct.Struct(f"={rows}q{rows}q{rows}ii")
        # By turns: the copy from one may still wait on the card while the next step is filled in.
        self._hosts = itertools.cycle([_HostBuffer(nbytes, device) for _ in range(2)])

    def fill(self, tokens: Mapping[int, Sequence[int]], lengths: Sequence[int], cursor: int) -> None:
        """Set the next step's inputs; the copy takes its turn on the current stream.

        Args:
            tokens: One new token by occupied row.
            lengths: Tokens by row, the new ones included; 0 is idle.
            cursor: The column that the step writes.
        """
        ids = [0] * self.rows
        for row, (token,) in tokens.items():
            ids[row] = token
        self._send(ids, lengths, cursor)

    def follow(
        self, rows: Iterable[int], token_ids: torch.Tensor, lengths: Sequence[int], cursor: int
    ) -> None:
        """Set the inputs of a step whose tokens the host does not know yet: they are on the card.

        Args:
            rows: Occupied ones.
            token_ids: Of the first rows, up to the last occupied one at least; int64.
            lengths: Tokens by row, the new ones included; 0 is idle.
            cursor: The column that the step writes.
        """
        taken = [0] * self.rows
        for row in rows:
            taken[row] = 1
        self._send(taken, lengths, cursor)
        self.token_ids[: len(token_ids), 0].mul_(token_ids)

    def _send(self, ids: Sequence[int], lengths: Sequence[int], cursor: int) -> None:
        host = next(self._hosts)
        positions = [length - 1 if length else 0 for length in lengths]
        self._numbers.pack_into(host.writable(), 0, *ids, *positions, *lengths, cursor)
        host.copy_to(self._card)


class _HostBuffer:
    """Bytes of the host that the card copies in its own time; page-locked where there is a card."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._tensor = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._bytes = self._tensor.numpy().data
        self._copied: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def writable(self) -> memoryview:
        """The bytes, once the last copy has read them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._bytes

    def copy_to(self, card: torch.Tensor) -> None:
        """Begin the copy, on the current stream."""
        card.copy_(self._tensor, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _parts(raw: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions, lengths and cursor as views on a buffer's bytes."""
    wide, narrow = raw[: 2 * rows * _WIDE.itemsize], raw[2 * rows * _WIDE.itemsize :]
    numbers, counts = wide.view(_WIDE), narrow.view(_NARROW)
    return numbers[:rows], numbers[rows:], counts[:rows], counts[rows:]
