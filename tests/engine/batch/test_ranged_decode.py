"""The card's decode attention against float64, on a card or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch's CUDA build")

from batond.daemon.engine.batch.card_facts import Card
from batond.daemon.engine.batch.ranged_decode import (
    Tiling,
    choose_tiling,
    decode_attention,
    write_column,
)
from batond.daemon.engine.batch.ring_rule import Ring, Rule

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
H200 = Card(cores=132, shared_bytes=227 * 1024)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def reference(query: torch.Tensor, ring: Ring, rule: Rule) -> torch.Tensor:
    """The same in float64, row by row."""
    key, value, cursor = ring.key, ring.value, int(ring.cursor)
    rows, heads, _ = query.shape
    capacity, group = key.shape[1], heads // key.shape[2]
    out = torch.zeros(rows, heads, value.shape[3], dtype=torch.float64, device=query.device)
    for row, length in enumerate(ring.lengths.tolist()):
        seen = min(length, rule.window or length)
        if not seen:
            continue
        columns = [(cursor - age) % capacity for age in range(seen)]
        keys = key[row, columns].double().repeat_interleave(group, dim=1)
        values = value[row, columns].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,hd->hn", keys, query[row].double()) * rule.scale
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.double()[:, None]], dim=1)
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(1)[:, :seen], values)
    return out


def poisoned(
    rows: int, capacity: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the second of two layers in token-major records, all NaN: what is read shows."""
    layer, gap = kv_heads * sum(dims), 8
    storage = torch.full((rows, capacity, 2 * layer + gap), torch.nan, dtype=dtype, device=DEVICE)
    mine = storage[:, :, layer + gap :]
    key, value = mine.split([kv_heads * dims[0], kv_heads * dims[1]], dim=2)
    return key.unflatten(2, (kv_heads, dims[0])), value.unflatten(2, (kv_heads, dims[1]))


def on_card(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def fill(key: torch.Tensor, value: torch.Tensor, lengths: list[int], cursor: int, generator: Any) -> None:
    for row, length in enumerate(lengths):
        columns = [(cursor - age) % key.shape[1] for age in range(length)]
        for store in (key, value):
            numbers = torch.randn(length, *store.shape[2:], generator=generator)
            store[row, columns] = numbers.to(store.dtype).to(store.device)


CASES: list[dict[str, Any]] = [
    {},
    {"heads": 8, "kv_heads": 2},
    {"heads": 6, "kv_heads": 2},
    {"heads": 40, "kv_heads": 1},
    {"dim": 80, "value_dim": 80},
    {"dim": 192, "value_dim": 128},
    {"dim": 256, "value_dim": 256, "heads": 2, "kv_heads": 2},
    {"dim": 64, "value_dim": 64, "window": 33},
    {"softcap": 5.0},
    {"sinks": True},
    {"sinks": True, "softcap": 2.0, "window": 16, "heads": 8},
]
TILINGS = [
    None,
    Tiling(16, 4, 2, 1),
    Tiling(32, 4, 2, 4),
    Tiling(16, 2, 3, 32),
    Tiling(16, 2, 4, 8, enough=64),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tiling"),
    [*((torch.float32, one) for one in TILINGS), (torch.bfloat16, None), (torch.float16, TILINGS[-1])],
    ids=str,
)
def test_equals_float64(dtype: torch.dtype, case: dict[str, Any], tiling: Tiling | None) -> None:
    """Q8, Q9: ranges of any length, wrapped or not, idle rows between; nothing outside a range is read."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16 products")
    case = {"heads": 4, "kv_heads": 4, "dim": 128, "value_dim": 128, **case}
    generator = torch.Generator().manual_seed(len(str(case)))
    capacity, lengths = 257, [0, 1, 16, 33, 128, 200, 257]
    dims = case["dim"], case["value_dim"]
    key, value = poisoned(len(lengths), capacity, case["kv_heads"], dims, dtype)
    query = torch.randn(len(lengths), case["heads"], case["dim"], generator=generator).to(dtype).to(DEVICE)
    sinks = (
        torch.randn(case["heads"], generator=generator).to(dtype).to(DEVICE) if case.get("sinks") else None
    )
    rule = Rule(case["dim"] ** -0.5, case.get("softcap"), sinks, case.get("window"))
    for cursor in (256, 0, 100):
        key.fill_(torch.nan)
        value.fill_(torch.nan)
        fill(key, value, lengths, cursor, generator)
        ring = Ring(key, value, on_card(*lengths), on_card(cursor), capacity)
        found = decode_attention(
            query, ring, rule, tiling or choose_tiling(ring, rule, H200, case["heads"] // case["kv_heads"])
        )
        assert not found[0].any()
        bound = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
        expected = reference(query, ring, rule)
        torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


def test_writes_rows_that_have_a_token_and_no_others() -> None:
    key, value = poisoned(3, 9, 2, (80, 64), torch.float32)
    generator = torch.Generator().manual_seed(1)
    new_key = torch.randn(3, 2, 80, generator=generator).to(DEVICE)
    new_value = torch.randn(3, 2, 64, generator=generator).to(DEVICE)
    write_column(new_key, new_value, Ring(key, value, on_card(4, 0, 1), on_card(5), 9))
    for row in (0, 2):
        assert torch.equal(key[row, 5], new_key[row])
        assert torch.equal(value[row, 5], new_value[row])
    for store in (key, value):
        assert store[1].isnan().all()
        assert store[:, [0, 1, 2, 3, 4, 6, 7, 8]].isnan().all()


NEW_CASES: list[dict[str, Any]] = [
    {},
    {"heads": 8, "kv_heads": 2, "window": 33},
    {"dim": 80, "value_dim": 48, "softcap": 5.0},
    {"heads": 8, "sinks": True},
]


@pytest.mark.parametrize("case", NEW_CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tiling"),
    [(torch.float32, TILINGS[1]), (torch.float32, TILINGS[2]), (torch.bfloat16, TILINGS[-1])],
    ids=str,
)
def test_takes_the_newest_column_and_writes_it(
    dtype: torch.dtype, case: dict[str, Any], tiling: Tiling
) -> None:
    """Q8, Q9: as if it had been written before; an idle row's is not."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16 products")
    case = {"heads": 4, "kv_heads": 4, "dim": 64, "value_dim": 64, **case}
    generator = torch.Generator().manual_seed(len(str(case)))
    capacity, lengths, heads = 97, [0, 1, 16, 17, 65, 97], case["heads"]
    key, value = poisoned(len(lengths), capacity, case["kv_heads"], (case["dim"], case["value_dim"]), dtype)
    query = torch.randn(len(lengths), heads, case["dim"], generator=generator).to(dtype).to(DEVICE)
    sinks = torch.randn(heads, generator=generator).to(dtype).to(DEVICE) if case.get("sinks") else None
    rule = Rule(case["dim"] ** -0.5, case.get("softcap"), sinks, case.get("window"))
    for cursor in (96, 0, 40):
        key.fill_(torch.nan)
        value.fill_(torch.nan)
        fill(key, value, lengths, cursor, generator)
        ring = Ring(key, value, on_card(*lengths), on_card(cursor), capacity)
        expected = reference(query, ring, rule)
        whole = key.clone(), value.clone()
        new = tuple(store[:, cursor].nan_to_num(3.0) for store in whole)
        key[1:, cursor] = value[1:, cursor] = torch.nan
        # As a part of a wider projection: rows lie further apart than their numbers.
        wide = torch.cat(new, dim=2).split((case["dim"], case["value_dim"]), dim=2)
        found = decode_attention(query, ring, rule, tiling, new=(wide[0], wide[1]))
        bound = 2e-2 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)
        for store, before in zip((key, value), whole, strict=True):
            torch.testing.assert_close(store, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("numbers", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [8, 32])
def test_a_tiling_follows_from_shapes(numbers: torch.dtype, kv_heads: int) -> None:
    """Rows that are few are split; many are, once they are long."""

    def chosen(rows: int, most_tokens: int, card: Card = H200) -> Tiling:
        store = torch.empty(rows, 1, kv_heads, 128, dtype=numbers)
        return choose_tiling(Ring(store, store, store, store, most_tokens), Rule(1.0), card)

    assert chosen(128, 1024).splits == 1
    assert chosen(128, 65536).splits == 32
    for rows in (1, 2, 3):
        assert 0.9 * 132 <= chosen(rows, 4096).splits * rows * kv_heads <= 2 * 132
    for rows in (1, 16, 64):
        tiling = chosen(rows, 65536)
        assert tiling.splits in {1, 2, 4, 8, 16, 32}
        assert tiling.enough >= 2 * tiling.block
    # A smaller card has room for fewer loads in flight.
    assert (chosen(16, 256).stages, chosen(16, 256, Card(132, 99 * 1024)).stages) in {(4, 3), (2, 2)}


def test_a_rows_bits_do_not_depend_on_its_mates() -> None:
    """R2 in the kernel: splits follow from a row's own length."""
    generator = torch.Generator().manual_seed(2)
    key, value = poisoned(4, 128, 2, (64, 64), torch.float32)
    query = torch.randn(4, 4, 64, generator=generator).to(DEVICE)
    fill(key, value, [100, 128, 128, 128], 60, generator)
    first, *others = (
        decode_attention(
            query,
            Ring(key, value, on_card(100, *mates), on_card(60), 128),
            Rule(0.125),
            Tiling(16, 4, 2, 4, enough=32),
        )[0]
        for mates in ((128, 1, 7), (0, 0, 0), (5, 128, 128))
    )
    assert all(torch.equal(first, other) for other in others)
