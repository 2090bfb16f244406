"""How the engine finds out by asking the model: masks, windows, chunks, replays, limits, refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from batond.bench.families import make_family
from batond.bench.model_support import check_model, solo_tokens
from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.model.columns import ColumnLayer
from batond.daemon.engine.model.recipe import MaskForm
from batond.daemon.engine.proof.probe import Way, references, shared_error, tolerance
from batond.daemon.engine.proof.serving import choose_batch
from batond.daemon.engine.proof.trial import probe_layout
from batond.daemon.errors import RequestTooLargeError, UnsupportedModelError


def serve(engine: LocalEngine, prompt: list[int], max_tokens: int) -> list[int]:
    query = engine.submit(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    engine.run_until_idle()
    assert query.error is None, query.error
    return query.output_token_ids


def tokens(count: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place + place * place) % 110 for place in range(count)]


def test_a_window_kept_by_the_cache_alone_is_found() -> None:
    """Moshi's masks know no window: it relies on its cache forgetting."""
    model = CausalModel(make_family("moshi"), "cpu")
    serving = choose_batch("padded", model, 2)
    assert model.recipe.mask is MaskForm.WINDOW
    assert not serving.chunkable


def test_a_window_too_wide_to_be_crossed_is_still_found() -> None:
    """At the price of one step over made-up tokens."""
    model = CausalModel(make_family("moshi", sliding_window=600, max_position_embeddings=1024), "cpu")
    choose_batch("padded", model, 2)
    assert model.recipe.mask is MaskForm.WINDOW
    prompt = tokens(700)
    assert serve(LocalEngine(model, rows=2, batch="padded"), prompt, 6) == solo_tokens(model.model, prompt, 6)


def test_a_wide_window_in_the_masks_passes() -> None:
    model = CausalModel(make_family("mistral", sliding_window=600, max_position_embeddings=1024), "cpu")
    serving = choose_batch("padded", model, 2)
    assert model.recipe.mask is MaskForm.COLUMNS
    assert serving.chunkable


def test_chunks_behind_a_wide_window_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several new tokens at once take another way through a model's masks than one does."""
    model = make_family("mistral", sliding_window=600, max_position_embeddings=1024)
    forward = model.forward

    def spoilt(**options: Any) -> Any:
        mask, ids = options.get("attention_mask"), options["input_ids"]
        cache = options.get("cache", options.get("past_key_values"))
        ours = cache is not None and isinstance(cache.layers[0], ColumnLayer)
        if ours and mask is not None and mask.shape[-1] > 600 and ids.shape[1] == 3:
            options["input_ids"] = (ids + 1) % 100
        return forward(**options)

    spoilt.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", spoilt)
    engine = LocalEngine(model, rows=2)
    assert not engine.chunkable
    assert not engine.keeps_sessions


@pytest.mark.parametrize("window", [20, 30, 100])
def test_a_selection_by_values_is_refused_where_it_begins(window: int) -> None:
    """Equal tokens have equal values: which of them doge keeps is not defined, and padding would decide."""
    with pytest.raises(UnsupportedModelError, match="scores are equal"):
        LocalEngine(make_family("doge", keep_window_size=window), rows=3)


@pytest.mark.parametrize("floor_scale", [20, 26, 40, 63, 64])
def test_a_threshold_named_in_the_configuration_is_crossed(floor_scale: int) -> None:
    """Llama 4's temperature tuning counts padding from `floor_scale` tokens on: refused, or capped before."""
    tuned = {"attn_temperature_tuning": True, "floor_scale": floor_scale, "attn_scale": 0.5}
    model = make_family("llama4_text", **tuned)
    try:
        engine = LocalEngine(model, rows=3)
    except UnsupportedModelError:
        return
    assert engine.max_query_tokens < floor_scale


def test_a_model_that_sees_ahead_gets_its_prompt_whole() -> None:
    """A BERT that was not made a decoder attends in both directions."""
    support = check_model("bert", make_family("bert", is_decoder=False), batch="padded")
    assert support.outcome in {"exact", "refused"}
    assert support.outcome == "refused" or not support.chunkable


@pytest.mark.parametrize(
    "family", ["nemotron_h", "zamba2", "moshi", "jamba", "llama", "bart", "deepseek_v32"]
)
def test_dropped_work_is_computed_again_exactly(family: str) -> None:
    """R8: with no host memory every park drops the KV; the tokens stay the same."""
    model = make_family(family)
    engine = LocalEngine(model, rows=2, batch="padded", host_pool_bytes=1)
    prompts = [tokens(9), tokens(14, 5)]
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    queries = [engine.submit(prompt, sampling) for prompt in prompts]
    for _ in range(6):
        engine.step()
    for query in queries:
        if query.live:
            engine.park(query)
    engine.run_until_idle()
    assert engine.counters["parks_dropped"] == 2
    for query, prompt in zip(queries, prompts, strict=True):
        assert query.output_token_ids == solo_tokens(model, prompt, 16)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_queries_end_where_rope_would_look_at_batch_mates(kind: str) -> None:
    """Longrope and dynamic RoPE switch on the longest query of the batch: refused beyond, with the limit."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    overrides: dict[str, Any] = {"max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 64,
        }
        overrides["max_position_embeddings"] = 256
    model = make_family("llama", rope_parameters=rope, **overrides)
    engine = LocalEngine(model, rows=2, batch="padded")
    assert engine.max_query_tokens == 64
    with pytest.raises(RequestTooLargeError, match="64"):
        engine.submit(tokens(60), SamplingParams(max_tokens=5))
    prompt = tokens(50)
    assert serve(engine, prompt, 14) == solo_tokens(model, prompt, 14)


def test_temperature_tuning_by_columns_is_refused_or_limited() -> None:
    """llama4 counts the batch's columns: crossed by the probe it is refused, far away it limits queries."""
    near = make_family("llama4_text", floor_scale=4, attn_scale=0.5, no_rope_layers=[0] * 4)
    with pytest.raises(UnsupportedModelError, match="generate"):
        LocalEngine(near, rows=2, batch="padded")
    far = LocalEngine(make_family("llama4_text", floor_scale=128), rows=2, batch="padded")
    assert far.max_query_tokens == 127
    assert "temperature" in far.batch_reason


def test_state_outside_of_the_cache_is_refused() -> None:
    """recurrent_gemma keeps its state on the modules: one model would hold one query's state."""
    with pytest.raises(UnsupportedModelError, match="outside of its cache"):
        LocalEngine(make_family("recurrent_gemma"), one_at_a_time=True)


def test_one_at_a_time_must_be_allowed() -> None:
    model = make_family("rwkv")
    with pytest.raises(UnsupportedModelError, match="one_at_a_time"):
        LocalEngine(model, rows=3)
    engine = LocalEngine(model, rows=3, one_at_a_time=True)
    assert (engine.rows, engine.preemption_mode) == (1, "recompute")


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "inkling_text", "dots3_note_text", "moshi"])
def test_window_edges(family: str, length: int) -> None:
    """Q8: prompts around the window of 8, beside a longer mate."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    model = make_family(family)
    engine = LocalEngine(model, rows=2, batch="padded", chunk_tokens=5)
    mate = engine.submit(tokens(21, 11), SamplingParams(max_tokens=12, ignore_eos=True))
    engine.step()
    assert serve(engine, tokens(length), 10) == solo_tokens(model, tokens(length), 10)
    assert mate.output_token_ids == solo_tokens(model, tokens(21, 11), 12)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("family", ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note_text"])
def test_selection_among_equal_scores_is_refused(family: str, heads: int) -> None:
    """Few indexer heads often score zero; which of equal columns topk takes depends on padding.

    The probe queries are too short to see it every time: these were served silently wrong before.
    """
    for seed in (11, 12):
        model = make_family(family, seed=seed, index_n_heads=heads)
        with pytest.raises(UnsupportedModelError):
            LocalEngine(model, rows=3, batch="padded")


def test_the_reason_names_equal_scores() -> None:
    with pytest.raises(UnsupportedModelError, match="scores are equal"):
        LocalEngine(make_family("glm_moe_dsa", index_n_heads=4, seed=12), rows=3, batch="padded")


def test_a_selection_that_only_begins_far_away_is_seen() -> None:
    """Below 64 tokens nothing is selected, so the probe queries alone would find the model exact."""
    model = CausalModel(make_family("glm_moe_dsa", index_n_heads=2, index_topk=64), "cpu")
    layout = probe_layout(model)
    queries = references(model)
    near = shared_error(
        Way(lambda rows: PaddedBatch(model, rows, layout), lambda: PaddedBatch(model, 1, layout)), queries
    )
    assert near <= tolerance(model)
    with pytest.raises(UnsupportedModelError, match=r"behind \d+ tokens.*scores are equal"):
        LocalEngine(model, rows=3, batch="padded")


@pytest.mark.parametrize("family", ["gpt2", "bart", "roberta", "opt", "whisper"])
def test_a_query_may_fill_the_whole_context(family: str) -> None:
    """Q7: the last position of learned position embeddings is used, none beyond."""
    model = make_family(family)
    engine = LocalEngine(model, rows=2, batch="padded", chunk_tokens=50)
    prompt = tokens(engine.max_query_tokens - 3)
    assert serve(engine, prompt, 3) == solo_tokens(model, prompt, 3)


def test_a_model_with_own_logits_processors_is_measured_by_raw_logits() -> None:
    """A generation configuration that forbids tokens must not look like a wrong batch."""
    model = make_family("llama")
    model.generation_config.suppress_tokens = list(range(40))
    engine = LocalEngine(model, rows=2, batch="padded")
    assert engine.batch_kind == "padded"


def test_not_a_number_never_passes() -> None:
    model = make_family("llama")
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(UnsupportedModelError):
        LocalEngine(model, rows=2, batch="padded")
