"""Bad sampling parameters are refused at the edge, each with its field's name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from batond.daemon.engine.params import SamplingParams
from batond.daemon.errors import InvalidRequestError

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


def test_the_wire_keeps_every_field() -> None:
    params = SamplingParams(max_tokens=5, temperature=0.5, stop=("x",), stop_token_ids=(4,), ignore_eos=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
