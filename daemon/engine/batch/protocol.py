"""What the engine asks of a batch; `PaddedBatch` and `RingBatch` answer it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.memory.use import ArenaUse
    from batond.offload.slice import KVSlice


class Batch(Protocol):
    """Rows that share one time axis; every row's newest token sits in the newest column.

    A row is idle (owned by nobody) or occupied (`lengths[row]` cached tokens). Who owns which row is
    the engine's business; the batch only knows rows.
    """

    kind: str
    rows: int
    layout: RecordLayout
    device: torch.device

    def likeliest(self) -> Sequence[int] | None:
        """Token ids of the greatest logits of the last step, by row, where the step itself found them out.

        Waits for that step. As many as its logits have rows; None where logits are all there is.
        """

    @property
    def intact(self) -> bool:
        """False after a step that failed half-way and can't be taken back: no row holds what it held.

        Such rows may only be freed; once all are, the batch is as new. True: the step can be done again.
        """

    @property
    def columns(self) -> int:
        """Live columns of the shared axis."""

    @property
    def lengths(self) -> Sequence[int]:
        """Cached tokens per row; 0 is idle."""

    @property
    def memory(self) -> ArenaUse:
        """What the rows' keys and values take; cheap enough to be asked every step."""

    def trim(self, keep_bytes: int = 0) -> int:
        """Give pooled memory back to the system.

        Args:
            keep_bytes: Of the pool, for the next rows.

        Returns:
            Bytes given back.
        """

    def trim_soon(self) -> None:
        """Have all pooled memory given back, without waiting for it; any thread may ask."""

    def close(self) -> None:
        """Give all memory back, at once; the batch can't be used afterwards. Closing twice is harmless."""

    def embed(self, row: int, kv: KVSlice) -> None:
        """Write a prefilled slice into an idle row, end-aligned with the newest column (vector embedding).

        Raises:
            torch.OutOfMemoryError: There is no memory for it; the row stays idle.
        """

    def extract(self, row: int) -> KVSlice:
        """Copy an occupied row out; the row stays as it is."""

    def free(self, row: int) -> None:
        """Make a row idle and release leading columns that no row covers any more."""

    def step(self, tokens: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Run the model over each given row's new tokens.

        Usually one token a row. A row with several is a newcomer whose prompt is prefilled inside the step
        (vector shaping); its row must be idle before.

        Returns:
            float32 logits, shape [rows, vocabulary]; rows not in `tokens` hold nothing of value, and those
            behind the last of them may be missing. The next step may overwrite them.

        Raises:
            torch.OutOfMemoryError: There is no memory for it; lengths are as before.
        """

    @property
    def goes_ahead(self) -> bool:
        """Whether steps can be begun before the host has seen the tokens of the last one."""

    def give(self, token_ids: torch.Tensor) -> None:
        """Have other tokens than the likeliest follow the last step; `likeliest` returns these instead.

        Only where steps go ahead.

        Args:
            token_ids: int64, on the device, shape of the step's logits without the vocabulary.
        """

    @property
    def ahead(self) -> bool:
        """Whether a step was begun that is not in the books yet."""

    def prepare_ahead(self, rows: Sequence[int]) -> bool:
        """Have a step ready that follows the last one before the host has seen its tokens.

        Args:
            rows: Of the last step; each takes its likeliest token, or what it was given. Those left out are
                idle in the new step.

        Returns:
            Whether it is ready; False where the batch does no such thing.

        Raises:
            torch.OutOfMemoryError: There is no memory for it; lengths are as before.
        """

    def begin_ahead(self) -> None:
        """Launch the step that is ready. The books stay as they are.

        Until `take_ahead` rows may be copied out and freed, but none be embedded and no other step be run.
        What the step computes for a row that is freed meanwhile is lost; once all are, so is the step.
        """

    def take_ahead(self) -> torch.Tensor:
        """Take the step begun ahead into the books; `likeliest` is about it from `begin_ahead` on.

        Returns:
            Its logits, as `step`.
        """

    def check_integrity(self) -> None:
        """Raise AssertionError where the bookkeeping contradicts itself; for tests and when idle."""
