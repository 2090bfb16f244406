"""The card's linears at few rows against float64, on a card or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch's CUDA build")

from batond.daemon.engine.batch.linears import LinearTiling, choose_linear, streamed_linears

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
H200_SHARED_BYTES = 227 << 10

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA card"),
]

TILINGS = {
    "transposed": LinearTiling(16, block_out=64, block_in=128, stages=4, splits=1, transposed=True),
    "straight": LinearTiling(16, block_out=32, block_in=128, stages=3, splits=1, transposed=False),
    "split": LinearTiling(16, block_out=64, block_in=128, stages=3, splits=2, transposed=True),
    "split in uneven parts": LinearTiling(
        16, block_out=32, block_in=128, stages=3, splits=4, transposed=False
    ),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.float16)


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("n_out", [64, 80])
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_float64(tiling: LinearTiling, rows: int, n_out: int, *, biased: bool) -> None:
    inputs, weight = random(rows, 640), random(n_out, 640, seed=1)
    bias = random(n_out, seed=2) if biased else None
    for _ in range(2):  # What programs of a sum count by is left as it was found.
        found = streamed_linears(inputs, [weight], [] if bias is None else [bias], tiling)[0]
    expected = inputs.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert torch.allclose(found.double(), expected, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("counts", [(64, 16), (80, 48, 128)])
def test_several_of_one_input_equal_each_alone(
    tiling: LinearTiling, *, biased: bool, counts: tuple[int, ...]
) -> None:
    inputs = random(3, 512)
    weights = [random(count, 512, seed=count) for count in counts]
    biases = [random(count, seed=count) for count in counts] if biased else []
    together = streamed_linears(inputs, weights, biases, tiling)
    for number, weight in enumerate(weights):
        alone = streamed_linears(inputs, [weight], biases[number : number + 1], tiling)
        assert torch.equal(together[number], alone[0])


def test_no_bit_of_a_row_depends_on_how_many_there_are() -> None:
    """R1: with the same tile."""
    inputs, weight = random(7, 512), random(64, 512, seed=1)
    tiling = choose_linear(7, 64, 512, H200_SHARED_BYTES)
    assert tiling is not None
    together = streamed_linears(inputs, [weight], [], tiling)[0]
    alone = streamed_linears(inputs[2:3].contiguous(), [weight], [], tiling)[0]
    assert torch.equal(together[2], alone[0])


@pytest.mark.skipif(INTERPRETED, reason="instructions of a card")
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 33, 64])
@pytest.mark.parametrize(
    ("n_out", "n_in"), [(4096, 4096), (1024, 4096), (11008, 4096), (4096, 11008), (32000, 4096)]
)
def test_products_of_real_shapes_are_as_near_as_torchs(rows: int, n_out: int, n_in: int) -> None:
    inputs, weight = random(rows, n_in).bfloat16(), (random(n_out, n_in, seed=1) / 50).bfloat16()
    tiling = choose_linear(rows, n_out, n_in, H200_SHARED_BYTES)
    assert tiling is not None
    expected = inputs.double() @ weight.double().t()
    found = streamed_linears(inputs, [weight], [], tiling)[0]
    error, torchs = ((one.double() - expected).abs().max() for one in (found, inputs @ weight.t()))
    assert error <= 1.5 * torchs
