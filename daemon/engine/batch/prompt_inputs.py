"""What changes from chunk to chunk of prompts, in buffers on the card: a captured forward reads them.

    tokens    [ a4 a5 a6 | b0 b1 b2 b3 | pad pad pad ]     chunks of several prompts, one behind the other
    blocks    [ a  | b  b | pad  pad ]                     up to `tile` queries of one prompt each

Pads are tokens 0 of a prompt of their own that nobody has: they are written nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Most prompts that share a forward: each costs a row of the logits.
MOST_PARTS: Final = 16
_BLOCK_FIELDS: Final = 5


@dataclass(frozen=True, slots=True)
class Part:
    """The next chunk of one prompt.

    Attributes:
        token_ids: At least one.
        past: Tokens of the prompt before it.
        address: Of the prompt's first record, which has room behind the last one for the chunk.
    """

    token_ids: Sequence[int]
    past: int
    address: int


class PromptInputs:
    """Tokens, positions and places of a chunk; written by one copy.

    Args:
        tokens: Room, pads included.
        tile: Most queries of a block.
        anchor: A record on the device that stays where it is; distances count from it.

    Attributes:
        token_ids: int64, shape [1, tokens].
        position_ids: int64, shape [1, tokens].
        places: Bytes from the anchor to each token's record, 0 for none; int64, shape [tokens].
        last: Index of each part's last token, that of the last part where there is no more; int64, shape
            [MOST_PARTS].
        blocks: See `prompt_attention`; int64, shape [5, blocks].
    """

    def __init__(self, tokens: int, tile: int, anchor: torch.Tensor) -> None:
        self.tokens, self.tile = tokens, tile
        self.device = anchor.device
        self._anchor = anchor
        on_cuda = self.device.type == "cuda"
        # Each part, and the pads, may leave a block that is not full.
        blocks_n = tokens // tile + MOST_PARTS + 1
        self._sizes = [tokens, tokens, tokens, MOST_PARTS, _BLOCK_FIELDS * blocks_n]
        self._host = torch.zeros(sum(self._sizes), dtype=torch.int64, pin_memory=on_cuda)
        self._card = torch.zeros(sum(self._sizes), dtype=torch.int64, device=self.device)
        ids, positions, self.places, self.last, blocks = torch.split(self._card, self._sizes)
        self.token_ids, self.position_ids = ids[None], positions[None]
        self.blocks = blocks.view(_BLOCK_FIELDS, -1)
        self._copied: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def fill(self, parts: Sequence[Part]) -> None:
        """Set the next forward's inputs; the copy takes its turn on the current stream.

        Args:
            parts: One chunk of each prompt; all fit into the room.
        """
        if self._copied is not None:
            self._copied.synchronize()  # The last copy may still read the host's buffer.
        ids, positions, places, last, table = torch.split(self._host, self._sizes)
        self._host.zero_()
        record_bytes, start = self._anchor.numel(), self._anchor.data_ptr()
        blocks: list[tuple[int, int, int, int, int]] = []
        done = 0
        for number, part in enumerate(parts):
            count, first = len(part.token_ids), part.address - start
            mine = slice(done, done + count)
            ids[mine] = torch.tensor(part.token_ids)
            positions[mine] = torch.arange(part.past, part.past + count)
            places[mine] = first + positions[mine] * record_bytes
            last[number:] = done + count - 1
            blocks += self._blocks_of(done, count, part.past, first)
            done += count
        blocks += self._blocks_of(done, self.tokens - done, 0, 0)
        # The longest ranges first: what begins last should not take longest.
        blocks.sort(key=lambda block: -block[2])
        table.view(_BLOCK_FIELDS, -1)[:, : len(blocks)] = torch.tensor(blocks).T
        self._card.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _blocks_of(
        self, token: int, count: int, past: int, first: int
    ) -> list[tuple[int, int, int, int, int]]:
        """The blocks of a part, a column of the table each."""
        return [
            (token + at, min(self.tile, count - at), past + at, past, first)
            for at in range(0, count, self.tile)
        ]
