"""What the probe at load makes of captured prompts; the CPU passes for a card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.bench import families
from batond.daemon.engine.batch import prompt_steps, prompt_window
from batond.daemon.engine.batch.card_steps import NO_CARD, CardUse
from batond.daemon.engine.batch.prompt_batch import CapturedPrompt
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.proof.prompts import PromptProof, prove_prompts
from batond.daemon.engine.proof.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

pytestmark = pytest.mark.usefixtures("card_on_cpu")


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PromptProof]:
    monkeypatch.setattr(prompt_steps, "SIZES", (16, 32))

    def prove(family: str, *, card: CardUse | None = None, deterministic: bool = False) -> PromptProof:
        model = CausalModel(families.make_family(family), "cpu")
        trial = Trial(model, deterministic=deterministic, rows=2)
        _, layout, padded = next(trial.recipes())
        proof = prove_prompts(trial, layout, padded, card or CardUse(), None)
        assert not trial.reasons  # They are another choice's.
        assert proof.steps is not None or proof.way is padded
        return proof

    return prove


@pytest.mark.parametrize("deterministic", [False, True])
def test_exact_prompts_are_captured(prove: Callable[..., PromptProof], *, deterministic: bool) -> None:
    proof = prove("llama", deterministic=deterministic)
    compiled = "" if deterministic else ", compiled"
    assert proof.remark == f"; prompts as graphs of 16, 32 tokens{compiled}"
    assert isinstance(proof.way.prompt(), CapturedPrompt)


def test_without_graphs_nothing_is_tried(prove: Callable[..., PromptProof]) -> None:
    assert prove("llama", card=NO_CARD).remark == ""


class Off:
    """Kernels of which the attention is a little wrong behind many tokens."""

    def __init__(self, right: Any) -> None:
        self.write_tokens = right.write_tokens
        self._attend = right.prompt_attention

    def prompt_attention(self, query: torch.Tensor, fresh: Any, blocks: torch.Tensor, *rest: Any) -> Any:
        found = self._attend(query, fresh, blocks, *rest)
        return found * 1.01 if int(blocks[2].max()) > 20 else found


def test_a_size_that_comes_out_otherwise_is_found(
    prove: Callable[..., PromptProof], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2: all sizes are looked at, not the first."""
    kernels = Off(prompt_window._kernels())
    monkeypatch.setattr(prompt_window, "_kernels", lambda: kernels)
    proof = prove("llama")
    assert proof.remark.startswith("; prompts kernel by kernel: captured prompts: logits differ by")


@pytest.mark.parametrize("promise", ["chunks_hold", "far_chunks_hold"])
def test_prompts_that_chunks_change_are_not_captured(
    prove: Callable[..., PromptProof], monkeypatch: pytest.MonkeyPatch, promise: str
) -> None:
    """R2: neither way may cut them, and a captured prompt is cut at its largest forward all the same."""
    monkeypatch.setattr(Trial, promise, lambda *_: False)
    proof = prove("llama")
    assert proof.steps is None
    assert "behind windows, or far away" in proof.remark


@pytest.mark.parametrize(
    ("family", "why"),
    [("bloom", "attend by the kernel"), ("qwen3_next", "holds a state"), ("llama4_text", "")],
)
def test_what_can_not_be_captured_is_computed_as_before(
    prove: Callable[..., PromptProof], family: str, why: str
) -> None:
    assert "; prompts kernel by kernel: " in prove(family).remark
    assert why in prove(family).remark
