"""Sources of structured output that would hold the engine for too long."""

from __future__ import annotations

import pytest

from batond.daemon.errors import InvalidRequestError
from batond.daemon.requests.params import SamplingParams
from batond.daemon.requests.structure import check_structure

pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")


@pytest.mark.parametrize(
    ("field", "source"),
    [
        ("regex", "|".join(["a*b"] * 16_000)),
        (
            "grammar",
            "root ::= r0\n" + "\n".join(f'r{i} ::= "" | "a" r{i + 1}' for i in range(300)) + '\nr300 ::= "a"',
        ),
    ],
)
def test_what_takes_too_long_to_compile_is_refused(field: str, source: str) -> None:
    """Q1: it may be sent, and is parsed in a moment; compiling it takes seconds and a gigabyte."""
    with pytest.raises(InvalidRequestError, match="too complex") as refusal:
        check_structure(SamplingParams(**{field: source}))
    assert refusal.value.details["field"] == field


def test_a_long_plain_expression_is_taken() -> None:
    check_structure(SamplingParams(regex="a" * 65_536))
