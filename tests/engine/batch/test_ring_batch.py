"""RingBatch: wrapping, byte ranges and ranged attention, against each row alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from batond.bench import families
from batond.daemon.engine.batch import ring_attention, ring_window
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE = 1e-4
RING_FAMILIES = ["llama", "mistral", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "lfm2"]


@pytest.fixture(scope="session", params=RING_FAMILIES)
def bench(
    request: pytest.FixtureRequest, make_family: Callable[[str], Any], make_bench: Callable[..., Any]
) -> Any:
    own = request.param in {"deepseek_v3", "lfm2"}  # Latents; convolution state in some layers.
    return make_bench(families.make_family(request.param) if own else make_family(request.param))


def prompt(length: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place) % 120 for place in range(length)]


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return float((left - right).abs().max()) < TOLERANCE


@pytest.fixture(params=[0, 256, 1 << 20], ids=["row by row", "as measured", "all at once"])
def _grouping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are read together is a matter of cost alone."""
    monkeypatch.setitem(ring_window._CALL_COLUMNS, "cpu", request.param)


@pytest.mark.usefixtures("_grouping")
def test_rows_of_any_length_equal_each_alone_over_many_wraps(bench: Any) -> None:
    """Random parks into other rows, newcomers of lengths 1 to capacity-1, every column written many times."""
    rng = random.Random(7)
    capacity = 24
    ring = bench.ring(3, capacity)
    live: dict[int, list[int]] = {0: prompt(5), 1: prompt(capacity - 1, 11)}
    for row, tokens in live.items():
        ring.embed(row, bench.prefilled(tokens))
    for _ in range(90):
        new = {row: [rng.randrange(3, 120)] for row in live}
        logits = ring.step(new)
        for row, (token,) in new.items():
            live[row].append(token)
            assert close(logits[row], bench.alone(live[row]))
        ring.check_integrity()
        for row in [row for row, tokens in live.items() if len(tokens) == capacity or rng.random() < 0.1]:
            parked, tokens = ring.extract(row), live.pop(row)
            ring.free(row)
            if len(tokens) == capacity:
                tokens = prompt(rng.choice([1, 2, 7, 8, 9, capacity - 1]), rng.randrange(2, 40))
                parked = bench.prefilled(tokens)
            target = rng.choice([r for r in range(3) if r not in live and r != row] or [row])
            ring.embed(target, parked)
            live[target] = tokens


def test_round_trip_is_byte_for_byte_across_the_wrap(bench: Any) -> None:
    """R4: one range or two, a row gives back its own bytes."""
    mine, mate = bench.prefilled(prompt(9)), bench.prefilled(prompt(15, 11))
    ring = bench.ring(3, 16)
    ring.embed(0, mate)
    for _ in range(20):
        ring.embed(1, mine)
        out = ring.extract(1)
        assert torch.equal(out.tokens, mine.tokens)
        assert torch.equal(out.state, mine.state)
        ring.free(1)
        ring.step({0: [5]})
        if ring.lengths[0] == 16:
            ring.free(0)
            ring.embed(2, mine)  # Keeps the cursor where it is.
            ring.embed(0, mate)
            ring.free(2)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17])
def test_window_edges_with_a_park(bench: Any, length: int) -> None:
    """Q8: sliding window 8; window and full layers mixed, soft caps, sinks."""
    ring = bench.ring(2, 40)
    ring.embed(0, bench.prefilled(prompt(30, 11)))
    ring.embed(1, bench.prefilled(prompt(length)))
    ring.step({0: [4], 1: [5]})
    parked = ring.extract(1)
    ring.free(1)
    ring.free(0)
    ring.embed(0, parked)
    assert close(ring.step({0: [6]})[0], bench.alone([*prompt(length), 5, 6]))


def test_neighbours_of_very_different_length(bench: Any) -> None:
    """Q9: each row reads its own range only; the long mate changes nothing."""
    ring = bench.ring(4, 300)
    lengths = [1, 16, 260, 3]
    for row, length in enumerate(lengths):
        ring.embed(row, bench.prefilled(prompt(length, 3 + row)))
    logits = ring.step({row: [row + 5] for row in range(4)})
    for row, length in enumerate(lengths):
        assert close(logits[row], bench.alone([*prompt(length, 3 + row), row + 5]))


def test_decoding_moves_no_bytes_of_older_tokens(bench: Any) -> None:
    ring = bench.ring(2, 32)
    ring.embed(0, bench.prefilled(prompt(9)))
    before, address = ring._storage.clone(), ring._storage.data_ptr()
    for token in range(5, 10):
        ring.step({0: [token]})
    assert ring._storage.data_ptr() == address
    assert torch.equal(ring._storage[0, :9], before[0, :9])


def test_a_slice_of_the_padded_batch_lives_on_in_the_ring_and_back(bench: Any) -> None:
    """One record format: a query may change the kind of batch while parked."""
    padded = bench.batch(2)
    padded.embed(0, bench.prefilled(prompt(6)))
    padded.step({0: [9]})
    ring = bench.ring(2, 16)
    ring.embed(1, padded.extract(0))
    ring.step({1: [8]})
    padded.free(0)
    padded.embed(1, ring.extract(1))
    assert close(padded.step({1: [7]})[1], bench.alone([*prompt(6), 9, 8, 7]))


def test_misuse_is_loud(bench: Any) -> None:
    ring = bench.ring(2, 8)
    ring.embed(0, bench.prefilled(prompt(3)))
    with pytest.raises(RuntimeError, match="occupied"):
        ring.embed(0, bench.prefilled(prompt(3)))
    with pytest.raises(RuntimeError, match="idle"):
        ring.extract(1)
    with pytest.raises(RuntimeError, match="no column"):
        ring.embed(1, bench.prefilled(prompt(8)))


def test_latents_are_expanded_over_the_live_window_only(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLA computes keys from what the cache keeps: a wrapped ring hands it the live columns, not all."""
    bench = make_bench(families.make_family("deepseek_v3"))
    handed: list[int] = []
    note = ring_window.RingWindow.note_keys
    monkeypatch.setattr(
        ring_window.RingWindow,
        "note_keys",
        lambda window, key: (handed.append(key.shape[2]), note(window, key)),
    )
    ring = bench.ring(2, 64)
    ring.embed(0, bench.prefilled(prompt(4)))
    ring.step({0: [5]})
    ring.embed(1, bench.prefilled(prompt(9, 11)))  # Longer than what has passed: wraps.
    handed.clear()
    logits = ring.step({0: [6], 1: [7]})
    assert set(handed) == {10}
    assert close(logits[0], bench.alone([*prompt(4), 5, 6]))
    assert close(logits[1], bench.alone([*prompt(9, 11), 7]))


def test_numbers_that_overflowed_stay_with_their_query(bench: Any) -> None:
    """One query's NaN is not the next one's, though rows are read together."""
    ring = bench.ring(2, 40)
    ring.embed(1, bench.prefilled(prompt(20)))
    bad = bench.prefilled(prompt(12, 11))
    ring.embed(0, KVSlice(torch.full_like(bad.tokens, 0xFF), torch.full_like(bad.state, 0xFF)))
    ring.step({0: [5], 1: [5]})
    ring.free(0)
    ring.step({1: [6]})
    ring.embed(0, bench.prefilled(prompt(2)))
    logits = ring.step({0: [7], 1: [7]})
    assert close(logits[0], bench.alone([*prompt(2), 7]))
    assert close(logits[1], bench.alone([*prompt(20), 5, 6, 7]))


def test_an_idle_row_writes_nothing(bench: Any) -> None:
    ring = bench.ring(3, 40)
    ring.embed(1, bench.prefilled(prompt(20)))
    for token in range(5, 9):
        ring.step({1: [token]})
    assert not ring._storage[0].any()
    assert not ring._storage[2].any()


def test_a_soft_cap_that_the_models_own_attention_ignores_is_ignored(
    make_bench: Callable[..., Any],
) -> None:
    """R2: transformers' sdpa ignored it before 5.24, in `generate` too; two attentions must not differ."""

    def deaf(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("deaf", deaf)
    AttentionMaskInterface.register("deaf", sdpa_mask)
    model = families.make_family("gemma2", attn_logit_softcapping=0.5)
    tokens, logits = prompt(9), {}
    for attention in ("eager", "deaf"):
        model.config._attn_implementation = attention
        bench = make_bench(model)
        ring = bench.ring(2, 24)
        ring.embed(1, bench.prefilled(tokens[:-1]))
        logits[attention] = ring.step({1: tokens[-1:]})[1]
        assert close(logits[attention], bench.alone(tokens)), attention
    assert not close(logits["eager"], logits["deaf"])


def test_what_a_registered_attention_uses_is_found_out_by_calling_it() -> None:
    def refuses(*_args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"can't do {kwargs}")

    def heeds(_module: Any, query: torch.Tensor, *_: Any, softcap: float = 1.0, **__: Any) -> Any:
        return query * softcap, None

    AttentionInterface.register("refuses", refuses)
    AttentionInterface.register("heeds", heeds)
    assert ring_attention.ignored_arguments("refuses") == frozenset()
    assert ring_attention.ignored_arguments("heeds") == {"s_aux", "sinks"}
    assert ring_attention.ignored_arguments("eager") == frozenset()
