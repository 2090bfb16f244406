"""Sampling on the whole batch: right distribution, and nothing but (seed, position) decides."""

from __future__ import annotations

import pytest
import torch

from batond.daemon.engine.sampling.filters import Draw, gumbel_noise, sample
from batond.daemon.requests.params import SamplingParams

CPU = torch.device("cpu")


def draws(count: int, position: int = 0, **params: float) -> list[Draw]:
    return [Draw(SamplingParams(**params), seed, position) for seed in range(count)]  # type: ignore[arg-type]


def test_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert sample(logits, draws(2)) == [1, 0]


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0, -1.0])
    count = 20_000
    got = torch.tensor(sample(logits.expand(count, 4), draws(count, temperature=0.7)))
    share = torch.bincount(got, minlength=4) / count
    expected = (logits / 0.7).softmax(-1)
    # Five standard deviations of a share at this count.
    assert (share - expected).abs().max() < 5 * (0.25 / count) ** 0.5


def test_noise_is_uniformly_new_in_every_coordinate() -> None:
    noise = gumbel_noise([1, 1, 2, 1 << 40], [0, 1, 0, 0], 5000, CPU)
    corr = torch.corrcoef(noise)
    assert (corr - torch.eye(4, dtype=torch.float64)).abs().max() < 0.08
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.1)


def test_row_and_mates_do_not_matter() -> None:
    """Q3: a seeded request gives the same token in any row, beside anybody."""
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    wanted = Draw(SamplingParams(temperature=1.3, top_p=0.9, top_k=20), 77, 4)
    alone = sample(logits[2:3], [wanted])[0]
    for row in range(6):
        mates = draws(6, position=9, temperature=2.0)
        mates[row] = wanted
        shuffled = torch.randn(6, 50)
        shuffled[row] = logits[2]
        assert sample(shuffled, mates)[row] == alone


def test_top_k_and_top_p_keep_only_the_likeliest() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(500, 4)
    assert set(sample(logits, draws(500, temperature=5.0, top_k=2))) == {2, 3}
    assert set(sample(logits, draws(500, temperature=5.0, top_k=1))) == {3}
    assert set(sample(logits, draws(500, temperature=1.0, top_p=0.7))) == {2, 3}
    assert set(sample(logits, draws(500, temperature=1.0, top_p=1e-9))) == {3}
    assert set(sample(logits, draws(500, temperature=5.0, top_k=400))) == {0, 1, 2, 3}


def test_extreme_temperatures_are_defined() -> None:
    logits = torch.tensor([[0.0, 1e-3, -5.0]])
    assert sample(logits, draws(1, temperature=1e-6)) == [1]
    assert sample(logits * 1e30, draws(1, temperature=1e-6)) == [1]
