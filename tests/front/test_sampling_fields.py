"""Every sampling field of the contract reaches the engine's parameters, and bad ones are named."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from batond.daemon.errors import InvalidRequestError
from batond.daemon.front.requests import _check_structure, _sampling
from batond.daemon.requests.params import SamplingParams
from batond.daemon.requests.structure import FIELDS
from batond.v1 import types_pb2

GIVEN: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.75,
    "min_p": 0.25,
    "repetition_penalty": 1.25,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 1.5, 70_000: -2.0},
    "min_tokens": 2,
    "n": 3,
    "logprobs": 0,
    "prompt_logprobs": 20,
    "ignore_eos": True,
    "stop_token_ids": (7,),
    "stop": ("x",),
    "json_schema": "{}",
    "regex": "a+",
    "grammar": 'root ::= "a"',
}


def read(given: types_pb2.SamplingParams) -> SamplingParams:
    """All that is checked of it."""
    sampling = _sampling(given, 256)
    _check_structure(sampling)
    return sampling


@pytest.mark.parametrize("field", GIVEN)
def test_a_field_reaches_the_parameters(field: str) -> None:
    if field in FIELDS:
        pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    value = GIVEN[field]
    given = types_pb2.SamplingParams(**{field: value})
    expected = {"max_tokens": 256, field: value}
    assert read(given) == SamplingParams(**expected)


def test_every_field_of_the_contract_is_covered() -> None:
    fields = {field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields}
    assert fields - {"seed"} <= set(GIVEN), "a new field needs a line above; the seed belongs to the job"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 2.5),
        ("logit_bias", {1: 101.0}),
        ("min_tokens", 1 << 40),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 1 << 40),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("json_schema", "[]"),
        ("regex", ""),
        ("grammar", "x" * 65_537),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_by_its_place(field: str, value: Any) -> None:
    """Q1."""
    with pytest.raises(InvalidRequestError) as caught:
        read(types_pb2.SamplingParams(**{field: value}))
    assert caught.value.details["field"] == f"spec.sampling.{field}"
    assert caught.value.reason == "BAD_SAMPLING"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("json_schema", '{"type": "nope"}'),
        ("json_schema", '{"items":' * 101 + "{}" + "}" * 101),
        ("regex", "a{3,1}"),
        ("regex", "(a"),
        ("grammar", "root ::= missing"),
        ("grammar", 'start ::= "a"'),
        ("grammar", "no grammar at all"),
    ],
    ids=["type", "nested", "bounds", "bracket", "rule", "root", "words"],
)
def test_a_structure_that_no_engine_compiles_is_refused(field: str, value: str) -> None:
    """Q1: when it is submitted, not when it runs."""
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    with pytest.raises(InvalidRequestError) as caught:
        read(types_pb2.SamplingParams(**{field: value}))
    assert caught.value.details["field"] == f"spec.sampling.{field}"
    assert caught.value.reason == "BAD_SAMPLING"
    assert "/project/" not in caught.value.message


def test_a_schema_as_deep_as_allowed_is_taken() -> None:
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    schema = '{"items":' * 99 + "{}" + "}" * 99
    assert read(types_pb2.SamplingParams(json_schema=schema)).json_schema == schema


def test_without_the_extra_every_structure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(InvalidRequestError, match=r"batond\[structured\]") as caught:
        read(types_pb2.SamplingParams(regex="a"))
    assert caught.value.reason == "NO_STRUCTURED_OUTPUT"


def test_two_structures_at_once_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="only one of json_schema and regex"):
        read(types_pb2.SamplingParams(json_schema="{}", regex="a"))
