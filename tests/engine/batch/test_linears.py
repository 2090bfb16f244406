"""Which linears are computed together, and that a model is left as it was; with a kernel that only counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from batond.bench import families
from batond.daemon.engine.batch import linears
from batond.daemon.engine.batch.linears import LinearTiling, StreamedLinears, choose_linear

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")
IDS = torch.tensor([[5], [9]])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many linears each launch computed."""
    counted: list[int] = []

    def streamed_linears(
        inputs: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        tiling: LinearTiling,
    ) -> list[torch.Tensor]:
        assert tiling.tile == 16
        counted.append(len(weights))
        both = zip(weights, biases or [None] * len(weights), strict=True)
        return [functional.linear(inputs, weight, bias) for weight, bias in both]

    monkeypatch.setattr(linears, "streamed_linears", streamed_linears)
    monkeypatch.setattr(linears, "choose_linear", lambda *_: LinearTiling(16, 16, 16, 3, 1, transposed=False))
    return counted


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("llama", [3, 1, 2, 1]),  # q k v, o, gate up, down
        ("qwen2", [3, 1, 2, 1]),  # With biases on the first three.
        ("gemma2", [3, 1, 2, 1]),
        ("gpt_neox", [1, 1, 1, 1]),  # One weight for q, k and v; attention and MLP have norms of their own.
    ],
)
def test_linears_of_one_input_are_one_launch(family: str, layer: list[int], launches: list[int]) -> None:
    model = families.make_family(family, num_hidden_layers=2).bfloat16()
    streamed = StreamedLinears(model, CPU)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        with streamed.in_use():
            for _ in range(2):
                launches.clear()
                with streamed.run():
                    found = model(input_ids=IDS).logits
    assert torch.equal(found, expected)
    assert launches == [*layer, *layer, 1]


def test_the_first_run_knows_of_nothing_that_comes(launches: list[int]) -> None:
    model = families.make_family("llama", num_hidden_layers=1).bfloat16()
    streamed = StreamedLinears(model, CPU)
    with torch.no_grad(), streamed.in_use(), streamed.run():
        model(input_ids=IDS)
    assert launches == [1] * 8


def test_a_run_that_goes_another_way_than_the_last_is_exact(launches: list[int]) -> None:
    one, two, three = (torch.nn.Linear(8, 4).bfloat16() for _ in range(3))
    streamed = StreamedLinears(torch.nn.ModuleList([one, two, three]), CPU)
    x, y = torch.randn(2, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    expected = [[one(x), two(x), three(x)], [one(x), two(y), three(y)], [two(x), one(x), three(x)]]
    with torch.no_grad(), streamed.in_use():
        with streamed.run():
            _ = one(x), two(x), three(x)
        launches.clear()
        for turn, calls in enumerate([((one, x), (two, x), (three, x)), ((one, x), (two, y), (three, y))]):
            with streamed.run():
                found = [module(value) for module, value in calls]
            assert all(torch.equal(a, b) for a, b in zip(found, expected[turn], strict=True))
        with streamed.run():
            found = [two(x), one(x), three(x)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected[2], strict=True))
    assert launches[0] == 3


def test_a_failure_inside_leaves_the_model_as_it_was() -> None:
    model = families.make_family("llama", num_hidden_layers=1).bfloat16()
    streamed = StreamedLinears(model, CPU)
    with pytest.raises(RuntimeError, match="on cue"), streamed.in_use():
        raise RuntimeError("on cue")
    assert {type(module) for module in streamed.modules} == {torch.nn.Linear}


def test_only_plain_linears_in_half_precision_take_part() -> None:
    class Own(torch.nn.Linear):
        pass

    hooked = torch.nn.Linear(4, 4).bfloat16()
    hooked.register_forward_hook(lambda *_: None)
    replaced = torch.nn.Linear(4, 4).bfloat16()
    replaced.forward = replaced.forward  # type: ignore[method-assign]  # Bound to the instance.
    plain = torch.nn.Linear(4, 4).half()
    model = torch.nn.ModuleList([Own(4, 4).bfloat16(), hooked, replaced, plain, torch.nn.Linear(4, 4)])
    assert StreamedLinears(model, CPU).modules == [plain]


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64, 65])
@pytest.mark.parametrize(
    ("n_out", "n_in"), [(4096, 4096), (6144, 4096), (22016, 4096), (4096, 11008), (128, 64)]
)
@pytest.mark.parametrize("shared_bytes", [99 << 10, 227 << 10])  # Of an L4, of an H200.
def test_a_choice_covers_the_product_and_fits(rows: int, n_out: int, n_in: int, shared_bytes: int) -> None:
    tiling = choose_linear(rows, n_out, n_in, shared_bytes)
    if rows > linears.MOST_ROWS or n_in % 128:
        assert tiling is None
        return
    assert tiling is not None
    assert tiling.tile >= rows
    assert n_in % tiling.block_in == 0
    assert tiling.splits <= n_in // tiling.block_in
    assert tiling.stages * (tiling.tile + tiling.block_out) * tiling.block_in * 2 <= shared_bytes


def test_an_input_that_changed_in_its_place_is_another(launches: list[int]) -> None:
    one, two = (torch.nn.Linear(8, 4).bfloat16() for _ in range(2))
    streamed = StreamedLinears(torch.nn.ModuleList([one, two]), CPU)
    x = torch.randn(2, 8).bfloat16()
    with torch.no_grad():
        expected = two(x + 1)
        with streamed.in_use():
            for _ in range(2):
                changing = x.clone()
                with streamed.run():
                    one(changing)
                    changing += 1
                    found = two(changing)
                assert torch.equal(found, expected)
    assert launches == [1] * 4


def test_linears_of_one_weight_are_told_apart(launches: list[int]) -> None:
    """With other biases, and of a part of it."""
    weight, x = torch.randn(8, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    modules = [torch.nn.Linear(8, 8).bfloat16() for _ in range(2)] + [torch.nn.Linear(8, 4).bfloat16()]
    for module in modules:
        module.weight = torch.nn.Parameter(weight[: module.out_features])
    streamed = StreamedLinears(torch.nn.ModuleList(modules), CPU)
    with torch.no_grad():
        expected = [module(x) for module in modules]
        with streamed.in_use():
            for _ in range(2):
                with streamed.run():
                    found = [module(x) for module in modules]
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert launches == [1, 1, 1, 3]


def test_a_thread_that_captures_nothing_computes_as_ever() -> None:
    model = families.make_family("llama", num_hidden_layers=1).bfloat16()
    streamed = StreamedLinears(model, CPU)
    with torch.no_grad(), ThreadPoolExecutor(1) as other:
        expected = model(input_ids=IDS).logits
        with streamed.in_use():
            found = other.submit(lambda: _logits(model)).result()
    assert torch.equal(found, expected)


@torch.no_grad()
def _logits(model: torch.nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=IDS).logits
    return logits
