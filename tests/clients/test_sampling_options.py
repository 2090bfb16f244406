"""Every sampling option reaches the contract's field of the same name, and only if it was given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batond.clients import build
from batond.clients.errors import InvalidRequestError

GIVEN: dict[str, Any] = {
    "min_p": 0.0,
    "repetition_penalty": 1.25,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "n": 2,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "regex": "a+",
    "grammar": 'root ::= "a"',
    "json_schema": '{"type": "object"}',
}


@pytest.mark.parametrize("field", GIVEN)
def test_a_given_option_is_sent_even_if_it_is_zero(field: str) -> None:
    sampling = build.spec("x", {field: GIVEN[field]}).sampling  # type: ignore[misc]
    assert sampling.HasField(field)
    assert getattr(sampling, field) == GIVEN[field]
    assert [one.name for one, _ in sampling.ListFields()] == [field], "nothing else was asked for"


def test_biases_are_a_map() -> None:
    assert dict(build.spec("x", {"logit_bias": {3: -100.0, 70_000: 2}}).sampling.logit_bias) == {
        3: -100.0,
        70_000: 2.0,
    }


def test_a_schema_may_be_a_mapping_and_keeps_its_order() -> None:
    schema = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "null"}}}
    sent = build.spec("x", {"json_schema": schema}).sampling.json_schema
    assert json.loads(sent) == schema
    assert sent.index('"z"') < sent.index('"a"')


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: "much"}),
        ("logit_bias", [1]),
        ("min_p", "some"),
        ("min_tokens", 1.5),
        ("json_schema", {"default": float("nan")}),
        ("json_schema", {"default": object()}),
        ("json_schema", 3),
        ("regex", 3),
    ],
    # An object's own text differs between processes, and xdist wants the same names in all.
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_the_field_can_not_hold_is_refused_by_name(field: str, value: Any) -> None:
    """Q1."""
    with pytest.raises(InvalidRequestError, match=field):
        build.spec("x", {field: value})  # type: ignore[misc]
