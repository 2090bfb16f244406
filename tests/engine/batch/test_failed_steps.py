"""A step that fails at any allocation leaves a batch as it was, or says that it could not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import families
from batond.bench.faults.allocations import Allocations
from batond.daemon.engine.batch.uncached import UncachedBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeBench = Callable[..., Any]

LENGTHS = (9, 4)


def prompt(length: int) -> list[int]:
    return [3 + 7 * place % 120 for place in range(length)]


@pytest.fixture(params=["llama", "mistral", "lfm2"])
def bench(request: pytest.FixtureRequest, make_family: Callable[[str], Any], make_bench: MakeBench) -> Any:
    own = request.param == "lfm2"  # Convolution states: what a forward overwrites can't be taken back.
    return make_bench(families.make_family(request.param) if own else make_family(request.param))


def filled(bench: Any, kind: str, *, occupied: bool = True) -> Any:
    batch = bench.batch(3) if kind == "padded" else bench.ring(3, 16)
    if not occupied:
        return batch
    for row, length in enumerate(LENGTHS):
        batch.embed(row, bench.prefilled(prompt(length)))
    batch.step({0: [5], 1: [6]})
    return batch


def slices(batch: Any) -> list[torch.Tensor]:
    return [part for row in range(2) for part in (batch.extract(row).tokens, batch.extract(row).state)]


def test_a_failed_step_can_be_done_again(bench: Any, batch_kind: str) -> None:
    """M6: whichever layers it got to; logits, keys and values have the same bits."""
    new = {0: [7], 1: [8]}
    undisturbed = filled(bench, batch_kind)
    before = slices(undisturbed)
    expected = undisturbed.step(new)[:2].clone()
    after = slices(undisturbed)
    batch = filled(bench, batch_kind)
    number = 0
    while True:
        try:
            with Allocations({number}):
                logits = batch.step(new)
        except torch.OutOfMemoryError:
            batch.check_integrity()
            assert list(batch.lengths[:2]) == [length + 1 for length in LENGTHS]
            if not batch.intact:
                assert bench.layout.state_slots
                batch = _begin_again(batch, bench)
            assert all(map(torch.equal, slices(batch), before))
            number += 3
            continue
        break
    assert number > 20, "it hardly failed"
    assert torch.equal(logits[:2], expected)
    assert all(map(torch.equal, slices(batch), after))


def _begin_again(batch: Any, bench: Any) -> Any:
    """What was lost is freed, and the batch is as new."""
    for row in range(2):
        batch.free(row)
    assert batch.intact
    for row, length in enumerate(LENGTHS):
        batch.embed(row, bench.prefilled(prompt(length)))
    batch.step({0: [5], 1: [6]})
    return batch


def test_a_failed_embed_leaves_the_row_idle(bench: Any, batch_kind: str) -> None:
    """M6: also where it is the first, or longer than all others, which are padded for it."""
    for occupied, length in ((False, 6), (True, 3), (True, 14)):
        kv = bench.prefilled(prompt(length))
        batch = filled(bench, batch_kind, occupied=occupied)
        before = slices(batch) if occupied else []
        number = 0
        while True:
            try:
                with Allocations({number}):
                    batch.embed(2, kv)
            except torch.OutOfMemoryError:
                batch.check_integrity()
                assert batch.lengths[2] == 0
                assert all(map(torch.equal, slices(batch) if occupied else [], before))
                number += 1
                continue
            break
        assert number or batch_kind == "ring", "what memory a ring has is up to its arena"
        assert torch.equal(batch.extract(2).tokens, kv.tokens)
        assert all(map(torch.equal, slices(batch) if occupied else [], before))


def test_a_failed_forward_of_an_uncached_batch_has_appended_nothing(bench: Any) -> None:
    batch = UncachedBatch(bench.model, 2, shared=True)
    batch.step({0: prompt(4)})
    with pytest.raises(torch.OutOfMemoryError), Allocations({9}):
        batch.step({0: [5]})
    assert list(batch.lengths) == [4, 0]
    assert batch.intact
