"""Numbers come from a card to the host as they are, and wait for no large copy."""

from __future__ import annotations

import math

import pytest
import torch

from batond.daemon.engine.model.read_back import to_list

ON_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CARD)])
def test_as_torch_reads_them(device: str) -> None:
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
        numbers = torch.arange(24, device=device).to(dtype).view(4, 6) - 5
        for part in (numbers, numbers.T, numbers[:, 2], numbers[:0], numbers[1, 1]):
            assert to_list(part) == part.tolist()
    large = torch.arange(50_000, device=device)
    assert to_list(large) == large.tolist()
    assert to_list(torch.tensor([math.inf, -math.inf, 0.1], device=device)) == [
        math.inf,
        -math.inf,
        pytest.approx(0.1),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_large_copy_to_the_host_is_not_waited_for() -> None:
    """R5: the tokens of a step beside a park."""
    card = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    tokens = torch.arange(32, device="cuda")
    to_list(tokens)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        host.copy_(card, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
    assert to_list(tokens) == list(range(32))
    assert not copied.query(), "20 ms of copy are over"
    copied.synchronize()
