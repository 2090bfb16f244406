"""The `deterministic` engine: in half precision, the same bits whatever the load is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import families
from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from batond.daemon.engine.queries.query import Query

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "lfm2", "qwen3_next"]
ROWS = 4
TOKENS = 12  # Of each output: enough for some to be parked, and to end, in the middle of others.
ENGINE: dict[str, Any] = {
    "rows": ROWS,
    "max_query_tokens": 128,
    "chunk_tokens": 8,
    "host_pool_bytes": 1 << 22,
    "deterministic": True,
}
ON_CARD = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")],
)


@pytest.fixture(scope="module", params=["cpu", ON_CARD])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompt(length: int, stride: int) -> list[int]:
    return [3 + (stride * place + place * place) % 110 for place in range(length)]


def submit(engine: LocalEngine, number: int) -> Query:
    sampling = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, logprobs=2, temperature=0.9 if number % 2 else 0.0
    )
    return engine.submit(prompt(1 + 7 * number % 40, 3 + number), sampling, seed=number)


def outcome(query: Query) -> Any:
    """Tokens and exact log-probabilities: equal floats mean equal bits."""
    assert query.error is None, query.error
    return query.output_token_ids, query.output_logprobs


def alone(engine: LocalEngine, number: int) -> Any:
    query = submit(engine, number)
    engine.run_until_idle()
    return outcome(query)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return families.make_family(request.param).to(torch.bfloat16)


def test_bits_do_not_depend_on_mates_rows_or_parks(model: Any, device: str) -> None:
    """R2, R3 in bfloat16: log-probabilities are equal to the last bit, not within a tolerance."""
    engine = LocalEngine(model, **ENGINE, device=device)
    expected = [alone(engine, number) for number in range(7)]
    queries = []
    for number in range(7):
        queries.append(submit(engine, number))
        for _ in range(3):
            engine.step()
        if number % 2 and queries[number - 1].live:
            engine.park(queries[number - 1])
            engine.step()
    engine.run_until_idle()
    assert engine.counters["parks"] >= 2
    assert [outcome(query) for query in queries] == expected


def test_dropped_work_is_computed_again_to_the_bit(model: Any, device: str) -> None:
    """R8: emitted tokens are fed again through the batch, in the shapes that made them."""
    engine = LocalEngine(model, **{**ENGINE, "host_pool_bytes": 0}, device=device)
    expected = [alone(engine, number) for number in range(3)]
    queries = [submit(engine, number) for number in range(3)]
    for _ in range(9):
        engine.step()
    for query in queries:
        if query.live:
            engine.park(query)
    engine.run_until_idle()
    assert engine.counters["recomputed_tokens"] > 0
    assert [outcome(query) for query in queries] == expected


def test_a_job_goes_on_elsewhere_to_the_bit(model: Any, device: str) -> None:
    """Tokens emitted by an engine that died are replayed; what follows them is what would have."""
    first = LocalEngine(model, **ENGINE, device=device)
    tokens, _ = alone(first, 2)
    second = LocalEngine(model, **ENGINE, device=device)
    mate = submit(second, 3)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    query = second.submit(prompt(15, 5), sampling, seed=2, emitted_token_ids=tokens[: TOKENS // 2])
    second.run_until_idle()
    assert query.output_token_ids == tokens
    assert mate.finish_reason == "length"


def test_what_would_change_shapes_is_off(model: Any, device: str) -> None:
    engine = LocalEngine(model, **ENGINE, device=device)
    assert not engine.keeps_sessions
    queries = [engine.submit(prompt(4, 3 + n), SamplingParams(max_tokens=2)) for n in range(3)]
    engine.run_until_idle()
    assert all(query.finish_reason for query in queries)
    assert engine.counters["packed_prompts"] == 0


@pytest.mark.parametrize(
    ("family", "reason"),
    [("deepseek_v3", "computes keys from what its cache keeps"), ("bloom", "can't be served determin")],
)
def test_a_model_that_mixes_rows_is_refused(family: str, reason: str) -> None:
    model = families.make_family(family).to(torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=reason):
        LocalEngine(model, **ENGINE)


def test_kernels_that_tell_rows_apart_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last bit that depends on the row is enough for a refusal."""
    model = families.make_family("llama").to(torch.bfloat16)
    head = model.lm_head.forward

    def nudged(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        if logits.shape[0] > 1:
            logits[0] = torch.nextafter(logits[0], torch.full_like(logits[0], torch.inf))
        return logits

    monkeypatch.setattr(model.lm_head, "forward", nudged)
    with pytest.raises(UnsupportedModelError, match="mates or another row change logits"):
        LocalEngine(model, **ENGINE)


def test_inline_prefill_is_refused() -> None:
    with pytest.raises(ConfigError, match="not deterministic"):
        LocalEngine(families.make_family("llama"), rows=2, prefill="inline", deterministic=True)
