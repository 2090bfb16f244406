"""When the engine decodes on a ring, how large the ring is, and what it says about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batond.bench import families
from batond.bench.model_support import check_model, solo_tokens
from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.engine.batch import ring_size
from batond.daemon.errors import ConfigError, RequestTooLargeError, UnsupportedModelError
from batond.daemon.memory.host import HostLimits

if TYPE_CHECKING:
    from collections.abc import Callable

RINGS = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "lfm2", "qwen3_next", "jamba"]


def tokens(count: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place + place * place) % 110 for place in range(count)]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the machine have so many free bytes."""

    def set_free(nbytes: int) -> None:
        limits = HostLimits(available_bytes=nbytes, cgroup_bytes=None, memlock_bytes=None)
        monkeypatch.setattr(ring_size, "read_limits", lambda: limits)

    return set_free


@pytest.mark.parametrize("family", RINGS)
def test_auto_decodes_on_a_ring_where_a_probe_proves_it(family: str) -> None:
    """R2: staggered queries, parked into other rows, equal solo `generate`; all kinds of cache layers."""
    support = check_model(family, families.make_family(family))
    assert (support.outcome, support.batch) == ("exact", "ring"), support


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt", "mamba2"])
def test_auto_says_why_there_is_no_ring(family: str) -> None:
    """ALiBi and eager-only families break on a rotated ring, states alone have no columns."""
    engine = LocalEngine(families.make_family(family), rows=2)
    assert engine.batch_kind == "padded"
    assert "not a ring: " in engine.batch_reason


def test_a_ring_that_is_not_exact_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r'ring: .*"auto" serves it another way'):
        LocalEngine(families.make_family("bloom"), rows=2, batch="ring")


def test_a_wrong_read_of_a_wrapped_ring_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe runs over the end of a ring: a fault that only shows there can't pass."""
    from batond.daemon.engine.batch import ring_window  # noqa: PLC0415 - only broken here

    whole = ring_window.ranges_up_to
    monkeypatch.setattr(ring_window, "ranges_up_to", lambda *args: whole(*args)[-1:])
    engine = LocalEngine(families.make_family("llama"), rows=2)
    assert engine.batch_kind == "padded"
    with pytest.raises(UnsupportedModelError):
        LocalEngine(families.make_family("llama"), rows=2, batch="ring")


def test_inline_prefill_takes_the_padded_batch() -> None:
    model = families.make_family("llama")
    assert LocalEngine(model, rows=2, prefill="inline").batch_kind == "padded"
    with pytest.raises(ConfigError, match="inline prefill needs the padded batch"):
        LocalEngine(model, rows=2, prefill="inline", batch="ring")


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize(("prompt", "output"), [(1, 23), (22, 2), (23, 1), (8, 16), (16, 8)])
def test_queries_may_fill_the_ring(family: str, prompt: int, output: int) -> None:
    """Q8: a query of just as many tokens as the ring has columns, beside another, parked half-way."""
    model = families.make_family(family)
    engine = LocalEngine(model, rows=2, batch="ring", max_query_tokens=24)
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    query = engine.submit(tokens(prompt), sampling)
    mate = engine.submit(tokens(5, 11), SamplingParams(max_tokens=19, ignore_eos=True))
    for _ in range(2 + output // 2):
        engine.step()
    if query.live:
        engine.park(query)
        engine.step()
    engine.run_until_idle()
    engine.check_integrity()
    assert query.output_token_ids == solo_tokens(model, tokens(prompt), output)
    assert mate.output_token_ids == solo_tokens(model, tokens(5, 11), 19)
    with pytest.raises(RequestTooLargeError, match="24"):
        engine.submit(tokens(prompt + 1), sampling)


def test_a_ring_takes_what_memory_holds(memory: Callable[[int], None]) -> None:
    """M4, M7: with no limit stated the ring shrinks to what fits; what is reported is what is enforced."""
    model = families.make_family("llama", max_position_embeddings=4096)
    record_bytes = LocalEngine(model, rows=2, max_query_tokens=64).residency.batch.layout.record_bytes
    memory(2 * record_bytes * 2 * 100)
    engine = LocalEngine(model, rows=2)
    assert engine.batch_kind == "ring"
    assert engine.max_query_tokens == 100
    assert "queries end at 100 of 4096 tokens" in engine.batch_reason
    with pytest.raises(RequestTooLargeError, match="100"):
        engine.submit(tokens(100), SamplingParams(max_tokens=1))


def test_a_stated_limit_that_does_not_fit_is_refused_with_the_largest_that_does(
    memory: Callable[[int], None],
) -> None:
    """M4: the message holds the number; `auto` serves the limit from the padded batch instead."""
    model = families.make_family("llama", max_position_embeddings=4096)
    record_bytes = LocalEngine(model, rows=2, max_query_tokens=64).residency.batch.layout.record_bytes
    memory(2 * record_bytes * 2 * 100)
    with pytest.raises(ConfigError, match="max_query_tokens=100 or less"):
        LocalEngine(model, rows=2, batch="ring", max_query_tokens=101)
    engine = LocalEngine(model, rows=2, max_query_tokens=101)
    assert engine.batch_kind == "padded"
    assert "max_query_tokens=100 or less" in engine.batch_reason


def test_peak_memory_of_decoding_is_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of the ring makes or moves a tensor of the size of the batch's keys and values."""
    engine = LocalEngine(families.make_family("llama"), rows=2, batch="ring", max_query_tokens=256)
    queries = [engine.submit(tokens(100 + n), SamplingParams(max_tokens=60, ignore_eos=True)) for n in (0, 9)]
    for _ in range(4):
        engine.step()
    storage: Any = engine.residency.batch
    address, made = storage._storage.data_ptr(), _Largest()
    with made:
        for _ in range(20):
            engine.step()
    assert all(query.live for query in queries)
    assert storage._storage.data_ptr() == address
    layer_bytes = 2 * 100 * engine.residency.batch.layout.record_bytes // 4
    assert made.nbytes < layer_bytes, made.nbytes


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs))} - {None}
        for leaf in tree_leaves(out):
            if _storage(leaf) not in given | {None}:
                self.nbytes = max(self.nbytes, leaf.numel() * leaf.element_size())
        return out


def _storage(leaf: Any) -> int | None:
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else None


def test_a_failed_forward_leaves_the_books_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step can be tried again: no row has grown, no column is taken."""
    model = families.make_family("llama")
    engine = LocalEngine(model, rows=2, batch="ring", max_query_tokens=64)
    query = engine.submit(tokens(5), SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range(3):
        engine.step()
    forward = model.forward

    def failing(*args: Any, **options: Any) -> Any:
        forward(*args, **options)
        raise RuntimeError("on cue")

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(RuntimeError, match="on cue"):
        engine.step()
    engine.check_integrity()
    monkeypatch.setattr(model, "forward", forward)
    engine.run_until_idle()
    assert query.output_token_ids == solo_tokens(model, tokens(5), 8)


def test_a_lack_of_memory_is_not_taken_for_a_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.make_family("llama")

    def failing(*_args: Any, **_options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(ConfigError, match="no memory left to probe the model"):
        LocalEngine(model, rows=2, batch="ring")
