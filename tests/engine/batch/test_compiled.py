"""Which parts of a model are compiled, and that it is left as it was; with a compiler that only counts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import families
from batond.daemon.engine.batch import compiled
from batond.daemon.engine.batch.compiled import CompiledParts

if TYPE_CHECKING:
    from collections.abc import Callable

IDS = torch.tensor([[5], [9]])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Runs of functions that were given to the compiler."""
    counted: Counter[str] = Counter()

    def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            counted[function.__qualname__] += 1
            return function(*args, **options)

        return run

    monkeypatch.setattr(compiled, "compile_function", compile_function)
    return counted


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"LlamaRMSNorm", "LlamaMLP"}),
        ("gemma2", {"Gemma2RMSNorm", "Gemma2MLP"}),
        ("gpt_neox", {"GPTNeoXMLP"}),  # Its norms are torch's own, which are one kernel.
        ("gpt2", set()),
    ],
)
def test_norms_and_mlps_are_found_by_what_they_are_made_of(family: str, kinds: set[str]) -> None:
    model = families.make_family(family)
    assert {type(module).__name__ for module in CompiledParts(model).modules} == kinds


def test_parts_run_compiled_inside_and_as_they_are_outside(runs: Counter[str]) -> None:
    model = families.make_family("llama", num_hidden_layers=2)
    parts = CompiledParts(model)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        with parts.in_use():
            found = model(input_ids=IDS).logits
        inside = dict(runs)
        again = model(input_ids=IDS).logits
    assert inside == {"LlamaRMSNorm.forward": 5, "LlamaMLP.forward": 2, "apply_rotary_pos_emb": 2}
    assert dict(runs) == inside
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)


def test_a_failure_inside_leaves_the_model_as_it_was(runs: Counter[str]) -> None:
    model = families.make_family("llama", num_hidden_layers=2)
    with pytest.raises(RuntimeError, match="on cue"), CompiledParts(model).in_use():
        raise RuntimeError("on cue")
    with torch.no_grad():
        model(input_ids=IDS)
    assert not runs
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_somebody_replaced_is_left_alone() -> None:
    model = families.make_family("llama", num_hidden_layers=2)
    replaced = model.model.norm
    replaced.forward = replaced.forward  # Bound to the instance: a hook of another library, say.
    parts = CompiledParts(model)
    assert replaced not in parts.modules
    with parts.in_use():
        pass
    assert "forward" in vars(replaced)
