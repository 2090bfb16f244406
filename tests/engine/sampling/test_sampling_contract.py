"""Every sampling parameter in the engine against a plain loop of transformers' own logits processors."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.engine.sampling.filters import gumbel_noise
from batond.daemon.errors import InvalidRequestError, RequestTooLargeError
from batond.daemon.requests.params import sequence_seed, split_sequences
from batond.daemon.wire.messages import QueryState, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.engine.queries.query import Query

    MakeEngine = Callable[..., LocalEngine]

VOCABULARY = 160
EOS = 2


def prompt(length: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place) % 150 for place in range(length)]


def _processors(sampling: SamplingParams, prompt_tokens: int) -> LogitsProcessorList:
    """The processors of transformers, in the order it applies them."""
    found = LogitsProcessorList()
    if sampling.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[i], float(b)] for i, b in sampling.logit_bias.items()]))
    if sampling.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    stops = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])]
    if sampling.min_tokens and stops:
        found.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, sampling.min_tokens, stops))
    if sampling.temperature > 0.0:
        found.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            found.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            found.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0.0:
            found.append(MinPLogitsWarper(sampling.min_p))
    return found


def reference(
    model: Any, given_ids: Sequence[int], sampling: SamplingParams, seed: int
) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, alone and without any cache."""
    ids, emitted, logprobs = list(given_ids), [], []
    processors = _processors(sampling, len(given_ids))
    while len(emitted) < sampling.max_tokens:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            raw = model(input_ids=tokens, use_cache=False).logits[:, -1].float()
        # OpenAI's penalties have no processor in transformers; they commute with all that follows bias
        # and repetition penalty, so they are taken off between.
        counts = torch.bincount(torch.tensor(emitted, dtype=torch.int64), minlength=VOCABULARY).float()
        early = [p for p in processors if isinstance(p, _EARLY)]
        late = [p for p in processors if not isinstance(p, _EARLY)]
        scores = LogitsProcessorList(early)(tokens, raw.clone())
        scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
        scores = LogitsProcessorList(late)(tokens, scores).double()
        if sampling.temperature > 0.0:
            scores = scores + gumbel_noise([seed], [len(emitted)], VOCABULARY, torch.device("cpu"))
        token = int(scores.argmax())
        emitted.append(token)
        ids.append(token)
        logprobs.append(float(raw.double().log_softmax(-1)[0, token]))
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            break
    return emitted, logprobs


_EARLY = (SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor)

_FAVOURITES = {5: 12.0, 6: 11.0}  # Two tokens that the model would repeat for ever.

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.7, "logit_bias": _FAVOURITES},
    "repetition encouraged": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 2.0, "logit_bias": _FAVOURITES},
    "frequency": {"frequency_penalty": 1.5, "logit_bias": _FAVOURITES},
    "frequency encouraged": {"frequency_penalty": -2.0, "temperature": 0.7},
    "bias": {"logit_bias": {5: 6.0, 17: -100.0, 159: 2.5}},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False, "logit_bias": {EOS: 100.0}},
    "stops early": {"ignore_eos": False, "logit_bias": {EOS: 4.0}, "temperature": 2.0},
    "min_tokens and stop ids": {"min_tokens": 4, "stop_token_ids": tuple(range(20, 70))},
    "temperature": {"temperature": 1.5},
    "top_k": {"temperature": 2.0, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 2.0, "min_p": 0.2},
    "all": {
        "temperature": 1.2,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {7: 3.0, 8: -3.0},
        "min_tokens": 3,
        "stop_token_ids": (9, 11),
    },
}


def params(kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "ignore_eos": True, "logprobs": 2, **KINDS[kind], **more})


def assert_equal(query: Query, expected: tuple[list[int], list[float]]) -> None:
    tokens, logprobs = expected
    assert query.output_token_ids == tokens
    found = [one.logprob for one in query.output_logprobs if one is not None]
    assert found == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_alone(llama: Any, make_engine: MakeEngine, kind: str) -> None:
    engine = make_engine(llama)
    query = engine.submit(prompt(9), params(kind), seed=41)
    engine.run_until_idle()
    assert_equal(query, reference(llama, prompt(9), params(kind), 41))
    if kind != "greedy":
        bias = {} if kind == "bias" else KINDS[kind].get("logit_bias", {})
        plain, _ = reference(llama, prompt(9), params("greedy", logit_bias=bias), 41)
        assert query.output_token_ids != plain, (
            "the parameter has no effect here: the test would prove nothing"
        )


@pytest.mark.parametrize("prefill", ["decoupled", "inline"])
def test_every_row_has_other_parameters(llama: Any, make_engine: MakeEngine, prefill: str) -> None:
    """R1, R3, Q3: one batch of all kinds, parked at random, in other rows; each equals its solo run."""
    rng = random.Random(3)
    engine = make_engine(llama, rows=5, chunk_tokens=8, prefill=prefill)
    queries = []
    for place, kind in enumerate(KINDS):
        queries.append(engine.submit(prompt(3 + 2 * place, 5 + place), params(kind), seed=place))
        engine.step()
    while any(query.live for query in queries):
        engine.step()
        for query in queries:
            if query.live and query.state is not QueryState.PARKED and rng.random() < 0.25:
                engine.park(query)
            elif query.held and rng.random() < 0.4:
                engine.resume(query)
        engine.check_integrity()
    assert engine.counters["parks"] > 10
    for place, (kind, query) in enumerate(zip(KINDS, queries, strict=True)):
        assert_equal(query, reference(llama, prompt(3 + 2 * place, 5 + place), params(kind), place))


@pytest.mark.parametrize("kind", ["all", "repetition", "min_tokens", "frequency encouraged"])
@pytest.mark.parametrize("after_steps", range(12))
def test_park_at_every_step(llama: Any, make_engine: MakeEngine, kind: str, after_steps: int) -> None:
    """R1: the prompt's log-probabilities too, when the park falls between its chunks."""
    engine = make_engine(llama, rows=2, chunk_tokens=4)
    engine.submit(prompt(5, 11), SamplingParams(max_tokens=25, ignore_eos=True))
    query = engine.submit(prompt(14), params(kind, prompt_logprobs=1), seed=8)
    for _ in range(after_steps):
        engine.step()
    if query.live:
        engine.park(query)
        engine.step()
        engine.resume(query)
    engine.run_until_idle()
    assert_equal(query, reference(llama, prompt(14), params(kind), 8))
    assert_prompt_logprobs(llama, query, 1)


def assert_prompt_logprobs(model: Any, query: Query, top: int) -> None:
    ids = query.prompt_token_ids
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert len(query.prompt_logprobs) == len(ids)
    assert query.prompt_logprobs[0] is None
    for place, one in enumerate(query.prompt_logprobs[1:], start=1):
        assert one is not None
        assert one.logprob == pytest.approx(float(expected[place - 1, ids[place]]), abs=1e-4)
        values, best = expected[place - 1].topk(top) if top else (torch.zeros(0), torch.zeros(0))
        assert [token for token, _ in one.top] == best.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 200])
def test_prompt_logprobs_of_any_length(llama: Any, make_engine: MakeEngine, length: int) -> None:
    """The lengths lie around the parts in which a chunk's logits are taken."""
    engine = make_engine(llama, chunk_tokens=None)
    events: list[Any] = []
    engine.on_event = events.append
    query = engine.submit(prompt(length), params("greedy", prompt_logprobs=3))
    engine.run_until_idle()
    assert_prompt_logprobs(llama, query, 3)
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert tokens[0].prompt_logprobs == query.prompt_logprobs
    assert all(event.prompt_logprobs is None for event in tokens[1:])
    assert [one for event in tokens for one in event.logprobs or []] == query.output_logprobs


def test_kv_dropped_in_mid_prompt_repeats_no_logprobs(llama: Any, make_engine: MakeEngine) -> None:
    """R1, M1: without a host pool every park drops the KV, and the prompt is computed again."""
    engine = make_engine(llama, chunk_tokens=4, host_pool_bytes=0)
    query = engine.submit(prompt(15), params("all", prompt_logprobs=2), seed=5)
    for step in itertools.count():
        if not query.live:
            break
        engine.step()
        if step % 3 == 2 and query.live and query.state is not QueryState.PARKED:
            engine.park(query)
            engine.resume(query)
    assert query.parks > 2
    assert query.recomputed_tokens > 0
    assert_equal(query, reference(llama, prompt(15), params("all"), 5))
    assert_prompt_logprobs(llama, query, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_tokens_continue_as_if_nothing_had_happened(
    llama: Any, make_engine: MakeEngine, kind: str
) -> None:
    """R1, D3: penalties and log-probabilities of tokens emitted before a crash are rebuilt from the lists."""
    expected = reference(llama, prompt(9), params(kind), 13)
    for emitted in {0, 1, len(expected[0]) // 2, len(expected[0]) - 1}:
        engine = make_engine(llama, chunk_tokens=4)
        query = engine.submit(
            prompt(9), params(kind, prompt_logprobs=0), seed=13, emitted_token_ids=expected[0][:emitted]
        )
        engine.run_until_idle()
        assert_equal(query, expected)
        assert_prompt_logprobs(llama, query, 0)


def test_repetition_penalty_beside_a_long_mate(llama: Any, make_engine: MakeEngine) -> None:
    """Q4: token 0 is what padding is made of; it must not count as seen."""
    wanted = params("repetition", logit_bias={0: 12.0}, max_tokens=4)
    engine = make_engine(llama, rows=2)
    engine.submit(prompt(120), SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    query = engine.submit(prompt(4), wanted, seed=1)
    engine.run_until_idle()
    assert query.output_token_ids[0] == 0, "the pad id must be the favourite for this test to mean anything"
    assert_equal(query, reference(llama, prompt(4), wanted, 1))


def test_five_seeds_give_five_reproducible_texts(llama: Any, make_engine: MakeEngine) -> None:
    """Q3."""
    sampling = params("temperature", max_tokens=12)
    engine = make_engine(llama, rows=3)
    together = [engine.submit(prompt(6), sampling, seed=seed) for seed in range(5)]
    engine.submit(prompt(6), sampling)
    engine.run_until_idle()
    assert len({tuple(query.output_token_ids) for query in together}) == 5
    for seed, query in enumerate(together):
        alone = make_engine(llama, rows=1)
        again = alone.submit(prompt(6), sampling, seed=seed)
        alone.run_until_idle()
        assert again.output_token_ids == query.output_token_ids


def test_a_job_of_n_is_n_reproducible_queries(llama: Any, make_engine: MakeEngine) -> None:
    job = params("temperature", n=4, prompt_logprobs=1)
    engine = make_engine(llama)
    with pytest.raises(InvalidRequestError, match="submit 4 queries") as caught:
        engine.submit(prompt(5), job)
    assert caught.value.details["field"] == "n"
    parts = split_sequences(job, 99)
    assert [part.prompt_logprobs for part, _ in parts] == [1, None, None, None]
    assert [seed for _, seed in parts] == [sequence_seed(99, index) for index in range(4)]
    queries = [engine.submit(prompt(5), part, seed=seed) for part, seed in parts]
    engine.run_until_idle()
    assert len({tuple(query.output_token_ids) for query in queries}) == 4
    for query, (part, seed) in zip(queries, parts, strict=True):
        assert_equal(query, reference(llama, prompt(5), part, seed))


def test_sequence_seeds_differ_and_fit_every_number_format() -> None:
    seeds = [
        sequence_seed(seed, index)
        for seed, index in itertools.product((0, 1, 2**63 - 1, 2**64 - 1), range(128))
    ]
    derived = [seed for place, seed in enumerate(seeds) if place % 128]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in derived)
    assert [sequence_seed(seed, 0) for seed in (7, 2**64 - 1)] == [7, 2**64 - 1]


def test_min_tokens_holds_for_stop_strings_too(
    llama: Any, make_engine: MakeEngine, byte_tokenizer: Any
) -> None:
    """Q6: text of the first tokens passes whatever it says; later the same string ends the generation."""
    z = byte_tokenizer.token_to_id("z")
    sampling = SamplingParams(
        max_tokens=9, min_tokens=4, stop=("zz",), ignore_eos=True, logit_bias={z: 100.0}
    )
    engine = make_engine(llama, byte_tokenizer)
    query = engine.submit(prompt(3), sampling)
    engine.run_until_idle()
    assert (query.output_text, query.finish_reason) == ("zzzz", "stop")
    assert query.output_token_ids == [z] * 6


def test_what_this_engine_can_not_do_is_refused_by_name(llama: Any, make_engine: MakeEngine) -> None:
    """Q1."""
    engine = make_engine(llama)
    good = engine.submit(prompt(4), params("all"), seed=3)
    for _ in range(5):
        with pytest.raises(InvalidRequestError, match="below 160"):
            engine.submit(prompt(3), SamplingParams(logit_bias={160: 1.0}))
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            engine.submit(prompt(3), SamplingParams(regex="a+"))
        engine.step()
    engine.run_until_idle()
    assert_equal(good, reference(llama, prompt(4), params("all"), 3))
    with pytest.raises(InvalidRequestError, match="decoupled"):
        make_engine(llama, prefill="inline").submit(prompt(3), SamplingParams(prompt_logprobs=1))


def test_prompt_logprobs_that_fill_a_frame_are_refused(
    llama: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batond.daemon.engine.queries.admission.MAX_PROMPT_LOGPROBS", 30)
    engine = make_engine(llama)
    engine.submit(prompt(10), SamplingParams(prompt_logprobs=2, max_tokens=1))
    with pytest.raises(RequestTooLargeError, match="limit is 30"):
        engine.submit(prompt(11), SamplingParams(prompt_logprobs=2, max_tokens=1))
    engine.run_until_idle()


def test_penalty_memory_is_given_back(llama: Any, make_engine: MakeEngine) -> None:
    """M5: ended, cancelled and parked queries hold no slot."""
    engine = make_engine(llama, rows=3)
    queries = [engine.submit(prompt(5, place), params("all"), seed=place) for place in range(1, 7)]
    for _ in range(6):
        engine.step()
    counts = engine._sampler._counts
    assert counts.slots > 0
    engine.cancel(queries[0])
    for query in queries:
        if query.live and not query.held:
            engine.park(query)
    assert counts.slots == 0
    engine.run_until_idle()
    assert counts.slots == 0
    assert not engine._sampler._biases
    assert not engine._sampler._bans


def test_greedy_batches_cost_one_argmax(
    llama: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the contract is touched by queries that don't ask for it."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a greedy query reached what it never asked for")

    for name in ("penalties.TokenCounts.rows", "sampler.token_logprobs", "sampler.penalize"):
        monkeypatch.setattr(f"batond.daemon.engine.sampling.{name}", never)
    monkeypatch.setattr("batond.daemon.engine.sampling.filters._sample_noisy", never)
    monkeypatch.setattr("batond.daemon.engine.sampling.sampler.Sampler._new_offsets", never)
    engine = make_engine(llama)
    query = engine.submit(prompt(5), SamplingParams(max_tokens=5, ignore_eos=True))
    engine.run_until_idle()
    assert len(query.output_token_ids) == 5


sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(8, 12),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.2, 3.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, 159), st.floats(-20.0, 20.0, width=16), max_size=6),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(st.integers(0, 159), max_size=20).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.just(1),
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    wanted=st.lists(st.tuples(st.integers(1, 20), sampling_params), min_size=1, max_size=5),
    rows=st.integers(1, 4),
    moves=st.randoms(use_true_random=False),
)
def test_any_mixture_under_any_parks_equals_solo(
    llama: Any,
    make_engine: MakeEngine,
    wanted: list[tuple[int, SamplingParams]],
    rows: int,
    moves: random.Random,
) -> None:
    """R1, R3, Q3, Q4."""
    engine = make_engine(llama, rows=rows, chunk_tokens=8)
    queries = [
        engine.submit(prompt(length, 3 + place), sampling, seed=place)
        for place, (length, sampling) in enumerate(wanted)
    ]
    while any(query.live for query in queries):
        engine.step()
        for query in queries:
            if query.live and query.state is not QueryState.PARKED and moves.random() < 0.2:
                engine.park(query)
            elif query.held and moves.random() < 0.5:
                engine.resume(query)
    for place, (query, (length, sampling)) in enumerate(zip(queries, wanted, strict=True)):
        assert_equal(query, reference(llama, prompt(length, 3 + place), sampling, place))
