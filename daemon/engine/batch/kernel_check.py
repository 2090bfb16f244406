"""Whether the card's own kernels can be built and run here: asked once, by running one."""

from __future__ import annotations

import functools
from importlib import util

import torch

from batond.daemon.engine.batch.ring_rule import Ring, Rule
from batond.daemon.engine.model.causal import first_line

NO_CUDA_CARD = "there is no CUDA card"
#: Tensor cores that take bfloat16 came with compute capability 8.0.
_OLDEST_CAPABILITY = (8, 0)
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@functools.cache
def why_no_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Why the ring's kernels can't be used; "" where they can.

    Triton compiles at run time: it needs a C compiler, a folder it may write to, and a card it knows. What is
    missing shows in a small attention, compared with torch's.
    """
    if device.type != "cuda":
        return NO_CUDA_CARD
    if util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return f"the card has compute capability {capability[0]}.{capability[1]}, below 8.0"
    if dtype not in _TOLERANCE:
        return f"the kernels don't compute in {dtype}"
    try:
        error = _attention_error(device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # noqa: BLE001 - Triton and compilers raise all kinds; any means "no"
        return f"a kernel can't be built or run: {type(problem).__name__}: {first_line(problem)}"
    return "" if error <= _TOLERANCE[dtype] else f"a kernel's result is off by {error:.1e}"


def _attention_error(device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference of a small attention from torch's."""
    from batond.daemon.engine.batch import ranged_decode  # noqa: PLC0415 - there is no Triton without a card

    noise = torch.Generator().manual_seed(1)
    key, value, query, new = (torch.randn(2, 8, 1, 16, generator=noise).to(device, dtype) for _ in range(4))
    lengths = torch.tensor([5, 0], dtype=torch.int32, device=device)
    cursor = torch.tensor([2], dtype=torch.int32, device=device)
    ring = Ring(key, value, lengths, cursor, most_tokens=8)
    column = new[:, 0], new[:, 1]
    found = ranged_decode.decode_attention(query[:, 0], ring, Rule(0.25), new=column)[0].float()
    columns = [6, 7, 0, 1, 2]
    keys, values = (store[0, columns, 0].float() for store in (key, value))
    weights = (keys @ query[0, 0, 0].float() * 0.25).softmax(dim=0)
    return float((found[0] - weights @ values).abs().max())
