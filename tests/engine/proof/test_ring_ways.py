"""Which way of decoding on a ring the engine takes, and what it says when it takes a slower one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import families
from batond.daemon.engine import LocalEngine
from batond.daemon.engine.batch import card_steps, card_window, compiled
from batond.daemon.engine.batch.graphs import StepGraphs
from batond.daemon.engine.batch.kernel_check import why_no_kernels
from batond.daemon.engine.batch.ring_rule import Rule
from batond.daemon.engine.proof import rings

if TYPE_CHECKING:
    from collections.abc import Callable

RING: dict[str, Any] = {"rows": 2, "batch": "ring", "max_query_tokens": 64}


def test_without_a_card_nothing_is_said_of_kernels() -> None:
    assert why_no_kernels(torch.device("cpu"), torch.float32) == "there is no CUDA card"
    assert "kernel" not in LocalEngine(families.make_family("llama"), **RING).batch_reason


@pytest.mark.usefixtures("card_on_cpu")
def test_kernels_and_graphs_are_taken_where_they_are_exact() -> None:
    engine = LocalEngine(families.make_family("llama"), **RING)
    assert (
        "decode attention by the card's kernel, compiled, steps as graphs of 1, 2 rows" in engine.batch_reason
    )


@pytest.mark.usefixtures("card_on_cpu")
def test_a_switch_turns_each_off() -> None:
    model = families.make_family("llama")
    reason = LocalEngine(model, compiled=False, **RING).batch_reason
    assert "the card's kernel, steps as graphs of 1, 2 rows" in reason
    reason = LocalEngine(model, graphs=False, **RING).batch_reason
    assert "the card's kernel" in reason
    assert "graphs" not in reason
    assert "kernel" not in LocalEngine(model, kernels=False, **RING).batch_reason


@pytest.mark.usefixtures("card_on_cpu")
def test_a_deterministic_engine_has_one_size_of_step() -> None:
    """R2: no shape depends on which rows are in use."""
    model = families.make_family("llama").to(torch.bfloat16)
    engine = LocalEngine(model, deterministic=True, **{**RING, "rows": 4})
    assert "steps as graphs of 4 rows" in engine.batch_reason


@pytest.mark.usefixtures("card_on_cpu")
def test_a_model_that_the_kernels_can_not_serve_decodes_in_torch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(families.make_family("deepseek_v3"), **RING)
    assert engine.batch_kind == "ring"
    assert "decode attention in torch: " in engine.batch_reason
    assert "computed from what the cache keeps" in engine.batch_reason
    assert len([record for record in caplog.records if "slower way" in record.message]) == 1


@pytest.mark.usefixtures("card_on_cpu")
def test_a_wrong_kernel_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    right = card_window._kernels()

    class Wrong(right):  # type: ignore[misc, valid-type]  # a class of the fixture
        @staticmethod
        def decode_attention(query: torch.Tensor, ring: Any, rule: Rule, **new: Any) -> torch.Tensor:
            return right.decode_attention(query, ring, Rule(rule.scale * 0.9), **new) * 1.0

    monkeypatch.setattr(card_window, "_kernels", lambda: Wrong)
    reason = LocalEngine(families.make_family("llama"), **RING).batch_reason
    assert "decode attention in torch: ring: logits differ by" in reason


@pytest.mark.usefixtures("card_on_cpu")
def test_a_missing_compiler_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rings, "why_no_kernels", lambda *_: "a kernel can't be built: no C compiler")
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(families.make_family("llama"), **RING)
    assert "decode attention in torch: a kernel can't be built: no C compiler" in engine.batch_reason
    assert "no C compiler" in caplog.text


@pytest.mark.usefixtures("card_on_cpu")
def test_steps_that_can_not_be_captured_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = StepGraphs(why_no_more="RuntimeError: called a synchronizing CUDA operation")
    monkeypatch.setattr(card_steps, "capture_on_card", lambda *_: failed)
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(families.make_family("llama"), **RING)
    assert "the card's kernel" in engine.batch_reason
    assert "no graphs: graphs: UnsupportedModelError" in engine.batch_reason
    assert "a synchronizing CUDA operation" in engine.batch_reason
    assert len([record for record in caplog.records if "slower way" in record.message]) == 1


def test_a_step_that_keeps_what_the_capture_saw_is_found_at_load(
    card_on_cpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that the host computed once is frozen in a graph: the probe runs captured steps, too."""
    capture: Callable[..., StepGraphs] = card_steps.capture_on_card

    def frozen(run_of: Callable[[int], Any], *rest: Any) -> StepGraphs:
        def frozen_run_of(rows: int) -> Callable[[], Any]:
            output = run_of(rows)()
            return lambda: output

        return capture(frozen_run_of, *rest)

    monkeypatch.setattr(card_steps, "capture_on_card", frozen)
    engine = LocalEngine(families.make_family("llama"), **RING)
    assert card_on_cpu
    assert "no graphs: graphs: logits differ by" in engine.batch_reason


@pytest.mark.usefixtures("card_on_cpu")
def test_parts_that_can_not_be_compiled_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_function: Any) -> Any:
        def run(*_args: Any) -> None:
            raise RuntimeError("the backend failed\nat length")

        return run

    monkeypatch.setattr(compiled, "compile_function", failing)
    reason = LocalEngine(families.make_family("llama"), **RING).batch_reason
    assert "not compiled: graphs: UnsupportedModelError" in reason
    assert "the backend failed" in reason
    assert "steps as graphs of 1, 2 rows" in reason
