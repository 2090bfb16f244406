"""PaddedBatch: vector shaping, vector embedding, extraction and release, against each row alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeBench = Callable[[Any], Any]

TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def bench(any_model: Any, make_bench: Callable[[Any], Any]) -> Any:
    return make_bench(any_model)


def prompt(length: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place) % 150 for place in range(length)]


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return float((left - right).abs().max()) < TOLERANCE


def test_embedding_a_shorter_query_pads_its_own_row(bench: Any) -> None:
    batch = bench.batch(2)
    batch.embed(0, bench.prefilled(prompt(12)))
    batch.embed(1, bench.prefilled(prompt(5, 11)))
    assert batch.columns == 12
    logits = batch.step({0: [9], 1: [8]})
    assert close(logits[0], bench.alone([*prompt(12), 9]))
    assert close(logits[1], bench.alone([*prompt(5, 11), 8]))


def test_embedding_a_longer_query_pads_all_other_rows(bench: Any) -> None:
    batch = bench.batch(3)
    batch.embed(2, bench.prefilled(prompt(4)))
    batch.step({2: [9]})
    batch.embed(0, bench.prefilled(prompt(17, 11)))
    assert batch.columns == 17
    logits = batch.step({0: [8], 2: [7]})
    assert close(logits[2], bench.alone([*prompt(4), 9, 7]))
    assert close(logits[0], bench.alone([*prompt(17, 11), 8]))


def test_freeing_the_longest_row_releases_its_leading_columns(bench: Any) -> None:
    batch = bench.batch(2)
    batch.embed(0, bench.prefilled(prompt(20)))
    batch.embed(1, bench.prefilled(prompt(6, 11)))
    batch.step({0: [5], 1: [6]})
    assert batch.columns == 21
    batch.free(0)
    assert batch.columns == 7
    batch.check_integrity()
    assert close(batch.step({1: [9]})[1], bench.alone([*prompt(6, 11), 6, 9]))
    batch.free(1)
    assert batch.columns == 0
    batch.check_integrity()


def test_round_trip_is_byte_for_byte(bench: Any) -> None:
    """R4: a row only ever gives back its own bytes, whatever happened around it."""
    batch = bench.batch(3)
    mine, mate = bench.prefilled(prompt(9)), bench.prefilled(prompt(14, 11))
    batch.embed(1, mine)
    batch.embed(0, mate)
    out = batch.extract(1)
    assert torch.equal(out.tokens, mine.tokens)
    assert torch.equal(out.state, mine.state)
    batch.step({0: [4], 1: [5]})
    out = batch.extract(1)
    assert out.n_tokens == 10
    assert torch.equal(out.tokens[:9], mine.tokens)
    batch.free(1)
    batch.embed(2, out)
    assert torch.equal(batch.extract(2).tokens, out.tokens)


def test_chunks_equal_one_prefill(bench: Any) -> None:
    single = bench.batch(1)
    for begin in range(0, 13, 5):
        logits = single.step({0: prompt(13)[begin : begin + 5]})
    assert close(logits[0], bench.alone(prompt(13)))


def test_many_lengths_in_one_batch_equal_each_alone(llama: Any, make_bench: MakeBench) -> None:
    """Q9: lengths 1..65 in one batch, fp32: largest logit difference under 1e-4."""
    bench = make_bench(llama)
    lengths = range(1, 66)
    batch = bench.batch(len(lengths))
    for row, length in enumerate(lengths):
        batch.embed(row, bench.prefilled(prompt(length, 3 + length % 5)))
    logits = batch.step({row: [row + 5] for row in range(len(lengths))})
    for row, length in enumerate(lengths):
        assert close(logits[row], bench.alone([*prompt(length, 3 + length % 5), row + 5]))


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
def test_sliding_window_edges(length: int, mistral: Any, make_bench: MakeBench) -> None:
    """Q8: prompt of window-1, window, window+1 beside a longer mate, parked and embedded in another row."""
    bench = make_bench(mistral)
    batch = bench.batch(2)
    batch.embed(0, bench.prefilled(prompt(30, 11)))
    batch.embed(1, bench.prefilled(prompt(length)))
    batch.step({0: [4], 1: [5]})
    parked = batch.extract(1)
    batch.free(1)
    batch.free(0)
    batch.embed(0, parked)
    assert close(batch.step({0: [6]})[0], bench.alone([*prompt(length), 5, 6]))


def test_shaping_prefills_a_newcomer_inside_the_step(llama: Any, make_bench: MakeBench) -> None:
    bench = make_bench(llama)
    batch = bench.batch(3)
    batch.step({0: prompt(6)})
    logits = batch.step({0: [5], 1: prompt(9, 11)})
    assert batch.columns == 6 + 9
    assert close(logits[0], bench.alone([*prompt(6), 5]))
    assert close(logits[1], bench.alone(prompt(9, 11)))
    logits = batch.step({0: [6], 1: [7]})
    assert close(logits[0], bench.alone([*prompt(6), 5, 6]))
    assert close(logits[1], bench.alone([*prompt(9, 11), 7]))
    parked = batch.extract(0)
    assert parked.n_tokens == 8
    batch.free(0)
    batch.embed(2, parked)
    assert close(batch.step({2: [9]})[2], bench.alone([*prompt(6), 5, 6, 9]))


def test_shaping_beside_a_running_row_is_refused_with_windows(mistral: Any, make_bench: MakeBench) -> None:
    batch = make_bench(mistral).batch(2)
    batch.step({0: prompt(6)})
    with pytest.raises(UnsupportedModelError, match="decoupled"):
        batch.step({0: [5], 1: prompt(9)})


def test_an_occupied_row_is_never_overwritten(bench: Any) -> None:
    batch = bench.batch(2)
    batch.embed(0, bench.prefilled(prompt(3)))
    with pytest.raises(RuntimeError, match="occupied"):
        batch.embed(0, bench.prefilled(prompt(4)))
    with pytest.raises(RuntimeError, match="idle"):
        batch.extract(1)
