"""What this device reaches at best: copies and a large matrix product, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from batond.bench.gpu.timing import Spread, repeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.gpu.sizes import Sizes

_ROUNDS: Final = 20
_WARM_UP: Final = 3
#: Several times the largest cache, and little beside the memory.
_CARD_COPY_BYTES: Final = 2 << 30
_HOST_COPY_BYTES: Final = 512 << 20
_CARD_MATMUL_SIDE: Final = 8192
_CPU_COPY_BYTES: Final = 16 << 20
_CPU_MATMUL_SIDE: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates of a device.

    Attributes:
        copy_gb_s: Copy within the device; bytes read and bytes written both count.
        to_host_gb_s: Copy into page-locked host memory.
        to_device_gb_s: Copy out of page-locked host memory.
        matmul_tflop_s: Square matrix product in the dtype of the run.
        copy_bytes: Copied within the device.
        host_copy_bytes: Copied to the host and back.
        matmul_side: Side of the matrices.
    """

    copy_gb_s: Spread
    to_host_gb_s: Spread
    to_device_gb_s: Spread
    matmul_tflop_s: Spread
    copy_bytes: int
    host_copy_bytes: int
    matmul_side: int

    def read_s(self, nbytes: float) -> float:
        """The least time in which so many bytes of the device's memory are read."""
        return nbytes / (self.copy_gb_s.median * 1e9)

    def compute_s(self, operations: float) -> float:
        """The least time of so many operations."""
        return operations / (self.matmul_tflop_s.median * 1e12)

    def step_floor_s(self, sizes: Sizes, cached_tokens: float) -> float:
        """Floor of a decode step over so many tokens of all rows together."""
        return self.read_s(sizes.step_bytes(cached_tokens))

    def prefill_floor_s(self, sizes: Sizes, tokens: int) -> float:
        """Floor of a prompt: its operations, or for few tokens its weights."""
        return max(self.compute_s(sizes.prefill_ops(tokens)), self.read_s(sizes.step_weight_bytes))


def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure a device.

    Args:
        device: Which.
        dtype: Of the matrix product.
    """
    on_card = device.type == "cuda"
    copy_bytes = _CARD_COPY_BYTES if on_card else _CPU_COPY_BYTES
    host_bytes = _HOST_COPY_BYTES if on_card else _CPU_COPY_BYTES
    side = _CARD_MATMUL_SIDE if on_card else _CPU_MATMUL_SIDE
    # Random bytes: what is all alike may be moved and multiplied faster.
    source = torch.randint(0, 255, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(host_bytes, dtype=torch.uint8, pin_memory=on_card)
    part = source[:host_bytes]
    copied = _rate(device, 2 * copy_bytes / 1e9, lambda: target.copy_(source))
    out = _rate(device, host_bytes / 1e9, lambda: host.copy_(part, non_blocking=True))
    back = _rate(device, host_bytes / 1e9, lambda: part.copy_(host, non_blocking=True))
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    computed = _rate(device, 2 * side**3 / 1e12, lambda: torch.mm(left, right, out=product))
    return Ceilings(
        copy_gb_s=copied,
        to_host_gb_s=out,
        to_device_gb_s=back,
        matmul_tflop_s=computed,
        copy_bytes=copy_bytes,
        host_copy_bytes=host_bytes,
        matmul_side=side,
    )


def _rate(device: torch.device, amount: float, work: Callable[[], object]) -> Spread:
    """How much a second, if `work` does so much."""
    seconds = repeat(device, work, rounds=_ROUNDS, warm_up=_WARM_UP)
    return Spread.of([amount / one for one in seconds])
