"""Memory that runs out in the other ways of serving: inline, the same bits, packs and sessions."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench.faults.allocations import Allocations
from batond.bench.faults.counts import full_or
from batond.daemon.engine import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.queries.query import Query

GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPTS = [[3 + (7 * number + place) % 90 for place in range(4 + 3 * number)] for number in range(4)]
CLASSES = ("batch", "standard", "batch", "interactive")
WAYS: dict[str, dict[str, Any]] = {
    "inline": {"prefill": "inline", "batch": "padded"},
    "deterministic": {"deterministic": True, "batch": "ring", "chunk_tokens": 4},
    "packs": {"batch": "ring", "chunk_tokens": 64, "ready_limit": 3},
    "sessions": {"batch": "padded", "chunk_tokens": "auto"},
}


def serve(engine: LocalEngine, mode: Allocations, *, sessions: bool) -> list[Query]:
    """Each prompt a step after the one before; books are checked after each step."""
    queries: list[Query] = []

    def step() -> None:
        with mode:
            engine.step()
        engine.check_integrity()

    for number, (prompt, sla_class) in enumerate(zip(PROMPTS, CLASSES, strict=True)):
        session = f"talk {number}" if sessions else None
        queries.append(engine.submit(prompt, GREEDY, sla_class=sla_class, session_id=session))
        step()
    for _ in range(500):
        if not engine.queries:
            break
        step()
    assert not engine.queries
    return queries


@pytest.mark.parametrize("way", WAYS)
def test_memory_runs_out_anywhere(
    make_engine: Callable[..., Any], llama: Any, calm: Callable[[Any], Any], way: str
) -> None:
    """M6: at any operation of a step; who does not fail has the tokens it has undisturbed."""
    engine = make_engine(llama, rows=2, max_query_tokens=64, **WAYS[way])
    sessions = way == "sessions"
    expected = [query.output_token_ids for query in serve(engine, Allocations(), sessions=sessions)]
    counted = Allocations()
    serve(engine, counted, sessions=sessions)
    rng = random.Random(1)
    for _ in range(full_or(12, 200)):
        calm(engine)
        mode = Allocations(rng.sample(range(counted.count), rng.choice([1, 3, 12])))
        queries = serve(engine, mode, sessions=sessions)
        for query, tokens in zip(queries, expected, strict=True):
            if query.error is not None:
                assert query.error[0] == "RESOURCE_EXHAUSTED"
            else:
                assert query.output_token_ids == tokens


def test_a_prompt_whose_logits_find_no_memory_is_begun_anew(
    make_engine: Callable[..., Any], llama: Any, calm: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: its forward is done, and nobody saw what is behind it: put off beside a row, it gets none so."""
    engine = make_engine(llama, rows=2, max_query_tokens=64)
    calm(engine)
    wanted = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    expected = engine.submit(PROMPTS[0], wanted)
    engine.run_until_idle()
    record, refused = engine._sampler.record_given, 0

    def refuses(*given: Any) -> Any:
        nonlocal refused
        if not engine.counters["prompts_put_off"]:
            refused += 1
            raise torch.OutOfMemoryError("full")
        return record(*given)

    other = engine.submit(PROMPTS[1], SamplingParams(max_tokens=40, ignore_eos=True))
    while other.row is None:
        engine.step()
    monkeypatch.setattr(engine._sampler, "record_given", refuses)
    query = engine.submit(PROMPTS[0], wanted)
    engine.run_until_idle()
    assert refused > 1
    assert query.output_token_ids == expected.output_token_ids
    assert query.prompt_logprobs == expected.prompt_logprobs
