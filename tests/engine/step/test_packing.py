"""Short prompts packed into one forward: each comes out as it does alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batond.bench.families import make_family as random_family
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.proof.packing import find_packer
from batond.daemon.engine.proof.probe import references
from batond.daemon.engine.proof.serving import choose_batch
from batond.daemon.engine.step.packing import Packed, Packer, block_mask
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.engine.model.layout import RecordLayout
    from batond.offload.slice import KVSlice

WINDOW_TOKENS = 8  # Of the tiny models that have one.
RELATIVE = 1e-5
FAMILIES = ["llama", "mistral", "gpt2", "gemma2", "gpt_oss", "mixtral", "deepseek_v3", "mpt"]
MOST_PROMPTS = 6


class Pair:
    """A model's packer, and the same prompts computed alone."""

    def __init__(self, model: Any) -> None:
        self.model = CausalModel(model, "cpu")
        self.serving = choose_batch("padded", self.model, 2)
        self.layout: RecordLayout = self.serving.batch.layout
        self.packer = self.serving.packer

    def alone(self, prompt: Sequence[int]) -> tuple[KVSlice, torch.Tensor]:
        batch = self.serving.new_prefill_batch()
        logits = batch.step({0: list(prompt)})[0]
        return batch.extract(0), logits

    def differences(self, prompts: Sequence[Sequence[int]], packed: Packed) -> list[float]:
        """Relative differences of logits, keys and values, prompt by prompt."""
        found = []
        for prompt, kv, logits in zip(prompts, packed.slices, packed.logits, strict=True):
            expected, expected_logits = self.alone(prompt)
            found.append(distance(logits, expected_logits))
            assert (kv.tokens.shape, kv.state.shape) == (expected.tokens.shape, expected.state.shape)
            found += [
                distance(self.layout.token_part(slot, kv), self.layout.token_part(slot, expected))
                for slot in self.layout.token_slots
            ]
        return found


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-20))


def prompts_of(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    return [
        [(3 + 7 * place + place * place + 31 * number) % vocab_size for place in range(length)]
        for number, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(random_family(request.param))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, WINDOW_TOKENS), min_size=1, max_size=MOST_PROMPTS))
def test_packed_prompts_equal_each_alone(pair: Pair, lengths: list[int]) -> None:
    """Q9: logits, keys and values of every prompt, whatever stands before and behind it."""
    assert pair.packer is not None
    prompts = prompts_of(lengths, pair.model.vocab_size)
    assert max(pair.differences(prompts, pair.packer.run(prompts))) < RELATIVE


def test_full_pack_of_the_longest_prompts(pair: Pair) -> None:
    """Up to the last column, at lengths 1, window-1 and window."""
    packer = pair.packer
    assert packer is not None
    longest = min(packer.most_prompt_tokens, 100)
    lengths = [longest, 1, longest - 1]
    while sum(lengths) + longest <= packer.most_tokens:
        lengths.append(longest)
    lengths.append(packer.most_tokens - sum(lengths))
    prompts = prompts_of([length for length in lengths if length], pair.model.vocab_size)
    assert sum(map(len, prompts)) == packer.most_tokens
    assert max(pair.differences(prompts, packer.run(prompts))) < RELATIVE


def test_order_in_the_pack_changes_nothing(pair: Pair) -> None:
    packer = pair.packer
    assert packer is not None
    prompts = prompts_of([5, 1, 8, 3], pair.model.vocab_size)
    forth, back = packer.run(prompts), packer.run(prompts[::-1])
    for place, kv in enumerate(forth.slices):
        assert distance(back.logits[-1 - place], forth.logits[place]) < RELATIVE
        for slot in pair.layout.token_slots:
            other = pair.layout.token_part(slot, back.slices[-1 - place])
            assert distance(other, pair.layout.token_part(slot, kv)) < RELATIVE


def test_windows_bound_the_prompts() -> None:
    """Q8: a window hides nothing of a prompt that is not longer; longer ones are computed alone."""
    for family in ("mistral", "gemma2", "gpt_oss", "llama4_text"):
        packer = Pair(random_family(family)).packer
        assert packer is not None
        assert packer.most_prompt_tokens == WINDOW_TOKENS
        with pytest.raises(ValueError, match="don't fit"):
            packer.run([[5] * (WINDOW_TOKENS + 1)])


@pytest.mark.parametrize("family", ["jamba", "mamba2", "lfm2", "bloom"])
def test_models_that_mix_packed_prompts_are_not_packed(family: str) -> None:
    """Recurrent or convolution state, masks of their own, selection among the columns of a pack."""
    assert Pair(random_family(family)).packer is None


def test_model_that_ignores_the_mask_is_not_packed(make_family: Callable[[str], Any]) -> None:
    """The probe tells, not a list of names."""
    model = CausalModel(make_family("gpt2"), "cpu")
    serving = choose_batch("padded", model, 2)

    def causal_only(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None}

    def found() -> Packer | None:
        return find_packer(model, serving.batch.layout, serving.new_prefill_batch, queries, most_tokens=64)

    queries = references(model)
    handle = model.model.register_forward_pre_hook(causal_only, with_kwargs=True)
    try:
        assert found() is None
    finally:
        handle.remove()
    assert found() is not None


def test_model_without_named_places_computes_all_logits(make_family: Callable[[str], Any]) -> None:
    model = CausalModel(make_family("llama"), "cpu")
    layout = choose_batch("padded", model, 2).batch.layout
    prompts = prompts_of([4, 9, 1], model.vocab_size)
    sparing, full = (Packer(model, layout, 64, sparing=kind).run(prompts) for kind in (True, False))
    assert distance(sparing.logits, full.logits) < RELATIVE


def test_block_mask_is_causal_within_blocks() -> None:
    mask = block_mask([2, 1, 2], torch.float32, torch.device("cpu"))
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@given(lengths=st.lists(st.integers(1, 40), max_size=30))
def test_packs_hold_every_prompt_once_within_bounds(lengths: list[int]) -> None:
    packer = Packer.__new__(Packer)
    packer.most_tokens, packer.most_prompt_tokens, packer.most_prompts = 64, 20, 5
    packs = packer.packs(lengths)
    assert [index for pack in packs for index in pack] == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) <= packer.most_prompts
        assert len(pack) == 1 or (
            sum(lengths[index] for index in pack) <= packer.most_tokens
            and max(lengths[index] for index in pack) <= packer.most_prompt_tokens
        )


# The engine


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_engine_packs_what_waits_together(
    make_family: Callable[[str], Any],
    make_engine: Callable[..., Any],
    solo: Callable[..., list[int]],
    family: str,
) -> None:
    """Q9: four free rows, four short prompts: one step, one forward, solo's tokens."""
    model = make_family(family)
    engine = make_engine(model, rows=4)
    forwards = count_prompt_forwards(engine)
    prompts = prompts_of([3, 8, 1, 6], 160)
    queries = [engine.submit(prompt, greedy(12)) for prompt in prompts]
    engine.step()
    assert [len(query.output_token_ids) for query in queries] == [2, 2, 2, 2]
    assert engine.counters["packed_prompts"] == 4
    assert engine.counters["prefill_tokens"] == 18
    assert forwards == [[3, 8, 1, 6]]
    engine.run_until_idle()
    assert [query.output_token_ids for query in queries] == [solo(model, prompt, 12) for prompt in prompts]


def test_what_can_t_be_packed_is_computed_alone_beside_the_pack(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]]
) -> None:
    """Prompts' log-probabilities, replayed outputs, prompts in chunks."""
    engine = make_engine(llama, rows=8, chunk_tokens=64)
    forwards = count_prompt_forwards(engine)
    prompts = prompts_of([5, 6, 7, 8, 60], 160)
    emitted = solo(llama, prompts[3], 3)
    queries = [
        engine.submit(prompts[0], greedy(6)),
        engine.submit(prompts[1], greedy(6, prompt_logprobs=2)),
        engine.submit(prompts[2], greedy(6)),
        engine.submit(prompts[3], greedy(6), emitted_token_ids=emitted),
        engine.submit(prompts[4], greedy(6)),
    ]
    engine.run_until_idle()
    assert forwards == [[5, 7]]
    assert [query.output_token_ids for query in queries] == [solo(llama, prompt, 6) for prompt in prompts]
    assert len(queries[1].prompt_logprobs) == 6


@pytest.mark.parametrize("raised", [RuntimeError, TypeError, KeyError, AssertionError])
def test_failure_of_a_pack_falls_back_to_one_by_one(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]], raised: type[Exception]
) -> None:
    """Only the culprit fails, whatever a model's code raises."""
    engine = make_engine(llama, rows=4)
    prompts = prompts_of([4, 5, 6], 160)
    culprit = 150
    prompts[1][2] = culprit

    def refuse(_module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        if bool((kwargs["input_ids"] == culprit).any()):
            raise raised("this token breaks the model")

    handle = llama.register_forward_hook(refuse, with_kwargs=True)
    queries = [engine.submit(prompt, greedy(5)) for prompt in prompts]
    engine.step()
    handle.remove()
    engine.run_until_idle()
    assert engine.counters["failed_packs"] == 1
    assert [query.finish_reason.value for query in queries] == ["length", "error", "length"]
    assert queries[0].output_token_ids == solo(llama, prompts[0], 5)
    assert queries[2].output_token_ids == solo(llama, prompts[2], 5)


def test_sampled_tokens_do_not_depend_on_the_pack(llama: Any, make_engine: Callable[..., Any]) -> None:
    """Q3: temperature and seeds, packed in two orders and alone."""
    prompts = prompts_of([4, 9, 2, 7], 160)
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        engine = make_engine(llama, rows=4)
        queries = {
            place: engine.submit(
                prompts[place], SamplingParams(max_tokens=8, temperature=0.9, ignore_eos=True), seed=place
            )
            for place in order
        }
        engine.run_until_idle()
        assert engine.counters["packed_prompts"] == 4
        found.append([queries[place].output_token_ids for place in range(4)])
    alone = []
    for place, prompt in enumerate(prompts):
        engine = make_engine(llama, rows=1)
        query = engine.submit(
            prompt, SamplingParams(max_tokens=8, temperature=0.9, ignore_eos=True), seed=place
        )
        engine.run_until_idle()
        assert engine.counters["packed_prompts"] == 0
        alone.append(query.output_token_ids)
    assert found == [alone, alone]


def test_packed_query_parked_before_its_row_goes_on(
    llama: Any, make_engine: Callable[..., Any], solo: Callable[..., list[int]]
) -> None:
    """R1: a slice out of a pack is a slice like any other."""
    engine = make_engine(llama, rows=2, ready_limit=2)
    prompts = prompts_of([5, 3, 7, 4], 160)
    queries = [engine.submit(prompt, greedy(10)) for prompt in prompts]
    engine.step()
    assert engine.counters["packed_prompts"] == 4
    for query in queries:
        engine.park(query)
    for query in queries[::-1]:
        engine.resume(query)
    engine.run_until_idle()
    assert [query.output_token_ids for query in queries] == [solo(llama, prompt, 10) for prompt in prompts]
    assert engine.counters["recomputed_tokens"] == 0


def count_prompt_forwards(engine: Any) -> list[list[int]]:
    """Lengths of the prompts of every packed forward from now on."""
    packs: list[list[int]] = []
    packer = engine._prompts._packer
    run = packer.run

    def noted(prompts: Sequence[Sequence[int]]) -> Packed:
        packs.append([len(prompt) for prompt in prompts])
        return run(prompts)

    packer.run = noted
    return packs
