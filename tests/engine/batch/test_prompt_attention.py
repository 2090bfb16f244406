"""The card's attention of prompts against float64, on a card or in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch's CUDA build")

from batond.daemon.engine.batch.prompt_attention import prompt_attention, write_tokens
from batond.daemon.engine.batch.prompt_inputs import Part, PromptInputs
from batond.daemon.engine.batch.ring_rule import Fresh, Rule

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA card"),
]

CASES: list[dict[str, Any]] = [
    {},
    {"heads": 6, "kv_heads": 2},
    {"dim": 80, "value_dim": 48},
    {"dim": 256, "value_dim": 256, "heads": 2},
    {"window": 9},
    {"window": 70, "heads": 8},
    {"softcap": 5.0},
    {"sinks": True, "softcap": 2.0, "window": 16},
]
PAST = {"first": (0, 0, 0), "behind": (70, 0, 129), "far": (3, 300, 64)}
COUNTS = (33, 1, 70)


class Layer:
    """Prompts' records of two layers, all NaN but for the columns before the chunk, and a chunk of states."""

    def __init__(self, past: tuple[int, ...], room: int, dtype: torch.dtype, **case: Any) -> None:
        self.case = {"heads": 4, "kv_heads": 2, "dim": 64, "value_dim": 64, **case}
        heads, kv_heads, dim, value_dim = (
            self.case[name] for name in ("heads", "kv_heads", "dim", "value_dim")
        )
        dice = torch.Generator().manual_seed(len(str(case)) + sum(past))

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=dice).to(dtype).to(DEVICE)

        width = 2 * kv_heads * (dim + value_dim)
        self.anchor = torch.full((width,), torch.nan, dtype=dtype, device=DEVICE)
        self.records = [
            torch.full((n + count + 1, width), torch.nan, dtype=dtype, device=DEVICE)
            for n, count in zip(past, COUNTS, strict=True)
        ]
        for records, n in zip(self.records, past, strict=True):
            self.keys(records)[:n] = draw(n, kv_heads, dim)
            self.values(records)[:n] = draw(n, kv_heads, value_dim)
        self.query = draw(room, heads, dim).transpose(0, 1)
        self.fresh = Fresh(
            draw(room, kv_heads, dim).transpose(0, 1),
            draw(kv_heads, room, value_dim),
            self.keys(self.anchor),
            self.values(self.anchor),
            self.anchor.nbytes,
        )
        sinks = draw(heads) if case.get("sinks") else None
        self.rule = Rule(dim**-0.5, case.get("softcap"), sinks, case.get("window"))

    def keys(self, records: torch.Tensor) -> torch.Tensor:
        """The second layer's keys in records of any shape."""
        kv_heads, dim, value_dim = (self.case[name] for name in ("kv_heads", "dim", "value_dim"))
        begin = kv_heads * (dim + value_dim)
        return records[..., begin : begin + kv_heads * dim].unflatten(-1, (kv_heads, dim))

    def values(self, records: torch.Tensor) -> torch.Tensor:
        """Its values."""
        kv_heads, value_dim = self.case["kv_heads"], self.case["value_dim"]
        return records[..., -kv_heads * value_dim :].unflatten(-1, (kv_heads, value_dim))

    def expected(self, number: int, token: int, past: int, count: int) -> torch.Tensor:
        """Attention of one prompt's chunk in float64, [count, heads, value dim]."""
        group = self.case["heads"] // self.case["kv_heads"]
        mine, records = slice(token, token + count), self.records[number][: past + count].clone()
        self.keys(records)[past:] = self.fresh.key[:, mine].transpose(0, 1)
        self.values(records)[past:] = self.fresh.value[:, mine].transpose(0, 1)
        keys, values = (
            of(records).double().repeat_interleave(group, dim=1) for of in (self.keys, self.values)
        )
        scores = torch.einsum("nhd,hqd->hqn", keys, self.query[:, mine].double()) * self.rule.scale
        if self.rule.softcap is not None:
            scores = torch.tanh(scores / self.rule.softcap) * self.rule.softcap
        column = torch.arange(past + count, device=DEVICE)
        at = torch.arange(past, past + count, device=DEVICE)[:, None]
        seen = (column <= at) & (column > at - (self.rule.window or past + count))
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.rule.sinks is not None:
            scores = torch.cat([scores, self.rule.sinks.double()[:, None, None].expand(-1, count, 1)], dim=2)
        weights = scores.softmax(-1)[..., : past + count]
        return torch.einsum("hqn,nhd->qhd", weights, values)


@pytest.mark.parametrize("past", PAST.values(), ids=PAST)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tile"), [(torch.float32, 32), (torch.bfloat16, 64), (torch.float16, 128)])
def test_equals_float64(dtype: torch.dtype, tile: int, case: dict[str, Any], past: tuple[int, ...]) -> None:
    """Q8, Q9: chunks of three prompts side by side, over what each has already; nothing else is read."""
    if INTERPRETED and (dtype != torch.float32 or past == PAST["far"]):
        pytest.skip("the interpreter has no bfloat16 products, and is slow")
    layer = Layer(past, 128, dtype, **case)
    inputs = PromptInputs(128, tile, layer.anchor.view(torch.uint8))
    inputs.fill(
        [
            Part([5] * count, n, records.data_ptr())
            for records, n, count in zip(layer.records, past, COUNTS, strict=True)
        ]
    )
    found = prompt_attention(layer.query, layer.fresh, inputs.blocks, tile, layer.rule)
    assert found.isfinite().all()
    bound = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    token = 0
    for number, count in enumerate(COUNTS):
        expected = layer.expected(number, token, past[number], count)
        mine = found[token : token + count].double()
        torch.testing.assert_close(mine, expected, rtol=bound, atol=bound)
        token += count


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_writes_the_chunks_records_and_no_others(case: dict[str, Any]) -> None:
    past = PAST["behind"]
    layer = Layer(past, 128, torch.float32, **case)
    before = [records.clone() for records in layer.records]
    inputs = PromptInputs(128, 64, layer.anchor.view(torch.uint8))
    inputs.fill(
        [
            Part([5] * count, n, records.data_ptr())
            for records, n, count in zip(layer.records, past, COUNTS, strict=True)
        ]
    )
    write_tokens(layer.fresh, inputs.places)
    assert layer.anchor.isnan().all()
    token = 0
    for records, old, n, count in zip(layer.records, before, past, COUNTS, strict=True):
        layer.keys(old)[n : n + count] = layer.fresh.key[:, token : token + count].transpose(0, 1)
        layer.values(old)[n : n + count] = layer.fresh.value[:, token : token + count].transpose(0, 1)
        torch.testing.assert_close(records, old, rtol=0, atol=0, equal_nan=True)
        token += count
