"""What a model or a compiler says of its failure is told by its first line."""

from __future__ import annotations

from typing import Any

import pytest

from batond.bench.families import make_family
from batond.daemon.engine.model.causal import CausalModel, first_line
from batond.daemon.engine.proof.probe import references
from batond.daemon.errors import UnsupportedModelError


@pytest.mark.parametrize(
    ("said", "told"), [("", ""), ("one", "one"), ("one\ntwo", "one"), ("\n\n  one\ntwo", "one")]
)
def test_a_message_that_begins_with_an_empty_line_says_something_too(said: str, told: str) -> None:
    assert first_line(RuntimeError(said)) == told


def test_the_refusal_of_a_model_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """R8: some releases of torch begin their messages with an empty line."""
    model = make_family("llama")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("\nno kernel for this\nset a variable to learn more")

    monkeypatch.setattr(model, "generate", broken)
    with pytest.raises(UnsupportedModelError, match=r"generate fails: RuntimeError: no kernel for this$"):
        references(CausalModel(model, "cpu"))
