"""The engine on a card: same tokens as on the CPU, with parks through page-locked memory."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import families
from batond.bench.model_support import check_model
from batond.daemon.engine import SamplingParams
from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.proof.trial import probe_layout
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def prompt(length: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place) % 150 for place in range(length)]


def tokens_on(device: str, model: Any, make_engine: Callable[..., LocalEngine]) -> list[list[int]]:
    rng = random.Random(1)
    engine = make_engine(model, rows=4, chunk_tokens=8, device=device)
    queries = [
        engine.submit(prompt(rng.randrange(1, 40), 3 + n), SamplingParams(max_tokens=20, ignore_eos=True))
        for n in range(12)
    ]
    while any(query.live for query in queries):
        engine.step()
        for query in queries:
            if query.live and query.state is not QueryState.PARKED and rng.random() < 0.1:
                engine.park(query)
            elif query.held and rng.random() < 0.5:
                engine.resume(query)
    assert engine.counters["recomputed_tokens"] == 0
    return [query.output_token_ids for query in queries]


def test_tokens_equal_the_cpus(
    make_family: Callable[[str], Any], make_engine: Callable[..., LocalEngine]
) -> None:
    """R2 in fp32, CUDA against CPU."""
    for family in ("llama", "mistral", "gpt2"):
        model = make_family.__wrapped__(family)  # type: ignore[attr-defined]  # not the cached one: it moves
        on_cpu = tokens_on("cpu", model, make_engine)
        assert tokens_on("cuda", model, make_engine) == on_cpu


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "lfm2", "qwen3_next", "mixtral"],
)
def test_auto_serves_a_family_exactly(family: str) -> None:
    """R2: on the ring, staggered and parked, against solo `generate` on the card."""
    support = check_model(family, families.make_family(family), device="cuda")
    assert (support.outcome, support.batch) == ("exact", "ring"), support


def test_a_turn_of_a_session_equals_a_cold_run(
    make_family: Callable[[str], Any], make_engine: Callable[..., LocalEngine]
) -> None:
    """What page-locked memory kept between two jobs is what a prompt computes."""
    model = make_family.__wrapped__("llama")  # type: ignore[attr-defined]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    warm = make_engine(model, rows=2, device="cuda")
    first = warm.submit(prompt(20), sampling, session_id="s")
    warm.run_until_idle()
    conversation = [*prompt(20), *first.output_token_ids, 9, 8, 7]
    turn = warm.submit(conversation, sampling, session_id="s")
    warm.run_until_idle()
    assert turn.cached_prompt_tokens == 31
    cold = make_engine(model, rows=2, device="cuda")
    again = cold.submit(conversation, sampling)
    cold.run_until_idle()
    assert turn.output_token_ids == again.output_token_ids


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_ring_logits_equal_each_query_alone(make_family: Callable[[str], Any], family: str) -> None:
    model = CausalModel(make_family.__wrapped__(family), "cuda")  # type: ignore[attr-defined]
    layout = probe_layout(model)
    ring = RingBatch(model, 3, layout, capacity=24)
    live = {0: prompt(5), 2: prompt(13, 11)}
    for row, tokens in live.items():
        single = PaddedBatch(model, 1, layout)
        single.step({0: tokens})
        ring.embed(row, single.extract(0))
    for token in range(5, 15):
        logits = ring.step({row: [token + row] for row in live})
        for row, tokens in live.items():
            tokens.append(token + row)
            alone = PaddedBatch(model, 1, layout).step({0: tokens})[0]
            assert float((logits[row] - alone).abs().max()) < 1e-3
