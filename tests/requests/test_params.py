"""Bad sampling parameters are refused at the edge, each with its field's name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from batond.daemon.errors import InvalidRequestError
from batond.daemon.requests.params import SamplingParams

BAD: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 1.5},
    {"max_tokens": 1 << 31},
    {"max_tokens": True},
    {"max_tokens": "7"},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": -0.1},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_p": float("nan")},
    {"top_k": -1},
    {"top_k": 1.0},
    {"ignore_eos": 1},
    {"stop": "word"},
    {"stop": [""]},
    {"stop": ["x" * 257]},
    {"stop": ["x"] * 17},
    {"stop": [3]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [1.0]},
    {"stop_token_ids": list(range(65))},
    {"min_p": -0.01},
    {"min_p": 1.01},
    {"min_p": float("nan")},
    {"repetition_penalty": 0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": 101},
    {"repetition_penalty": float("inf")},
    {"presence_penalty": -2.1},
    {"presence_penalty": 2.1},
    {"presence_penalty": float("nan")},
    {"frequency_penalty": -2.1},
    {"frequency_penalty": 2.1},
    {"frequency_penalty": True},
    {"logit_bias": [(1, 1.0)]},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {"1": 1.0}},
    {"logit_bias": {1 << 31: 1.0}},
    {"logit_bias": {1: 100.5}},
    {"logit_bias": {1: float("nan")}},
    {"logit_bias": {1: float("-inf")}},
    {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    {"min_tokens": -1},
    {"min_tokens": 257},
    {"min_tokens": 1.0},
    {"n": 0},
    {"n": 129},
    {"n": None},
    {"logprobs": -1},
    {"logprobs": 21},
    {"logprobs": True},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": 1.5},
    {"json_schema": ""},
    {"json_schema": "{"},
    {"json_schema": "[]"},
    {"json_schema": "3"},
    {"json_schema": {}},
    {"json_schema": "[" * 60_000},
    {"json_schema": '{"a": "' + "x" * (1 << 16) + '"}'},
    {"regex": ""},
    {"regex": "a" * ((1 << 16) + 1)},
    {"regex": 3},
    {"grammar": ""},
    {"grammar": b"root"},
    {"json_schema": "{}", "regex": "a"},
    {"regex": "a", "grammar": "root ::= 1"},
]


@pytest.mark.parametrize("fields", BAD, ids=lambda fields: f"{fields}"[:40])
def test_meaningless_values_are_refused_by_name(fields: dict[str, Any]) -> None:
    """Q1."""
    with pytest.raises(InvalidRequestError, match=next(iter(fields))) as caught:
        SamplingParams(**fields)
    assert caught.value.details["field"] == next(iter(fields))


def test_edges_are_accepted() -> None:
    params = SamplingParams(max_tokens=1, temperature=0, top_p=1, top_k=1, stop=["a"], stop_token_ids=[0])  # type: ignore[arg-type]
    assert params.stop == ("a",)
    assert params.stop_token_ids == (0,)
    biases = {0: -100.0, (1 << 31) - 1: 100, **dict.fromkeys(range(1, 1023), 0.0)}
    most = SamplingParams(
        max_tokens=9,
        min_p=1,
        repetition_penalty=100,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias=biases,
        min_tokens=9,
        n=128,
        logprobs=20,
        prompt_logprobs=0,
        regex="a" * (1 << 16),
    )
    assert most.penalized
    assert most.structured
    biases.clear()
    assert len(most.logit_bias) == 1024, "parameters are a value: the caller's dictionary is not kept"
    assert SamplingParams(json_schema="true").structured
    assert not SamplingParams().penalized
    assert not SamplingParams().structured


def test_a_schema_refers_to_nothing_outside() -> None:
    """Q1: xgrammar ignores such a reference, and writes it, line breaks and all, where our log goes."""
    with pytest.raises(InvalidRequestError, match="must be # or begin with #/"):
        SamplingParams(json_schema='{"items": [{"$ref": "x:\\n{\\"event\\": \\"forged\\"}"}]}')
    assert SamplingParams(json_schema='{"properties": {"$ref": {"$ref": "#/$defs/a"}}}').structured


def test_a_schema_that_takes_minutes_to_compile_is_refused() -> None:
    """Q1: the engine would stand still for all."""
    many = {f"p{i}": {} for i in range(101)}
    half = dict(list(many.items())[:60])
    for schema in (
        {"properties": many},
        {"properties": {"a": {"properties": half}, "b": {"anyOf": [{"properties": half}] * 2}}},
    ):
        with pytest.raises(InvalidRequestError, match="too many optional properties"):
            SamplingParams(json_schema=json.dumps(schema))
    assert SamplingParams(json_schema=json.dumps({"properties": many, "required": list(many)})).structured
    assert SamplingParams(json_schema='{"properties": [], "required": 3}').structured


def test_the_wire_keeps_every_field() -> None:
    params = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        stop=("x",),
        stop_token_ids=(4,),
        ignore_eos=True,
        min_p=0.1,
        logit_bias={3: 1.5, 70_000: -2.0},
        n=3,
        logprobs=0,
        json_schema='{"type": "object"}',
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
