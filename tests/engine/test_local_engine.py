"""The engine's promise: tokens don't depend on batch mates, rows, parks or the time of arrival."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.errors import (
    ConfigError,
    InvalidRequestError,
    RequestTooLargeError,
    StateError,
    UnsupportedModelError,
)
from batond.daemon.scheduler.chunks import MOST_TOKENS, ChunkBudget
from batond.daemon.scheduler.plan import Gate
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import Finished, Preempted, QueryState, Resumed, Started, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

    Solo = Callable[..., list[int]]
    MakeEngine = Callable[..., LocalEngine]

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def prompt(length: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place) % 150 for place in range(length)]


def test_one_query_equals_generate(any_model: Any, solo: Solo, make_engine: MakeEngine) -> None:
    engine = make_engine(any_model)
    query = engine.submit(prompt(9), GREEDY)
    engine.run_until_idle()
    assert query.output_token_ids == solo(any_model, prompt(9), 12)
    assert (query.state, query.finish_reason, query.parks) == ("finished", "length", 0)


@pytest.mark.parametrize("prefill", ["decoupled", "inline"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_staggered_queries_equal_generate(
    llama: Any, solo: Solo, make_engine: MakeEngine, rows: int, prefill: str
) -> None:
    """Rows are given away and taken again while others run; lengths differ."""
    engine = make_engine(llama, rows=rows, prefill=prefill)
    shapes = [(3, 10), (17, 4), (9, 15), (30, 1), (1, 9), (12, 12), (5, 2)]
    queries = []
    for place, (length, count) in enumerate(shapes):
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        queries.append(engine.submit(prompt(length, 3 + place), sampling))
        engine.step()
    engine.run_until_idle()
    for place, (query, (length, count)) in enumerate(zip(queries, shapes, strict=True)):
        assert query.output_token_ids == solo(llama, prompt(length, 3 + place), count)


@pytest.mark.parametrize("after_steps", range(16))
def test_park_at_every_step_changes_nothing(
    any_model: Any, solo: Solo, make_engine: MakeEngine, after_steps: int
) -> None:
    """R1: parked before prefill, between its chunks, at the first token and at every later one; R9."""
    engine = make_engine(any_model, rows=2, chunk_tokens=4)
    mate = engine.submit(prompt(7, 11), SamplingParams(max_tokens=30, ignore_eos=True))
    query = engine.submit(prompt(14), GREEDY)
    for _ in range(after_steps):
        engine.step()
    if query.live:
        engine.park(query)
        assert query.state is QueryState.PARKED
        tokens_when_parked = len(query.output_token_ids)
        for _ in range(3):
            engine.step()
        assert len(query.output_token_ids) == tokens_when_parked, "a held query must not run"
        engine.resume(query)
    engine.run_until_idle()
    assert query.output_token_ids == solo(any_model, prompt(14), 12)
    assert mate.output_token_ids == solo(any_model, prompt(7, 11), 30)
    assert query.recomputed_tokens == 0


def test_a_resumed_query_lands_in_another_row(llama: Any, solo: Solo, make_engine: MakeEngine) -> None:
    """R3."""
    engine = make_engine(llama, rows=3)
    query = engine.submit(prompt(5), GREEDY)
    rows = []
    while query.live:
        engine.step()
        if query.row is not None:
            rows.append(query.row)
            engine.park(query)
            engine.resume(query)
    assert query.parks == len(rows)
    assert all(left != right for left, right in itertools.pairwise(rows))
    assert query.output_token_ids == solo(llama, prompt(5), 12)


@pytest.mark.parametrize("seed", range(3))
def test_32_queries_with_random_parks_equal_solo(
    llama: Any, solo: Solo, make_engine: MakeEngine, seed: int
) -> None:
    """R2: 32 concurrent greedy queries with random forced parks."""
    rng = random.Random(seed)
    engine = make_engine(llama, rows=8, chunk_tokens=16)
    shapes = [(rng.randrange(1, 60), rng.randrange(1, 25), rng.randrange(2, 40)) for _ in range(32)]
    queries = [
        engine.submit(prompt(length, stride), SamplingParams(max_tokens=count, ignore_eos=True))
        for length, count, stride in shapes
    ]
    while any(query.live for query in queries):
        engine.step()
        for query in queries:
            if query.live and query.state is not QueryState.PARKED and rng.random() < 0.1:
                engine.park(query)
            elif query.held and rng.random() < 0.3:
                engine.resume(query)
        engine.check_integrity()
    for query, (length, count, stride) in zip(queries, shapes, strict=True):
        assert query.output_token_ids == solo(llama, prompt(length, stride), count)
    assert engine.counters["parks"] > 32
    assert engine.counters["recomputed_tokens"] == 0


def test_urgent_query_takes_the_row_of_exactly_one_low_query(
    llama: Any, solo: Solo, make_engine: MakeEngine
) -> None:
    """S1: all rows hold long low queries; the urgent one's first token comes in the next step."""
    engine = make_engine(llama, rows=3)
    low = [
        engine.submit(prompt(6, 5 + n), SamplingParams(max_tokens=60, ignore_eos=True), sla_class="batch")
        for n in range(3)
    ]
    for _ in range(25):
        engine.step()
    urgent = engine.submit(prompt(20), SamplingParams(max_tokens=8, ignore_eos=True), sla_class="interactive")
    engine.step()
    assert len(urgent.output_token_ids) == 2  # One from its prefill, one from the decode step it joined.
    assert [query.state for query in low].count(QueryState.PARKED) == 1
    engine.run_until_idle()
    assert sum(query.parks for query in low) == 1
    assert urgent.output_token_ids == solo(llama, prompt(20), 8)
    for n, query in enumerate(low):
        assert query.output_token_ids == solo(llama, prompt(6, 5 + n), 60)
        assert query.state is QueryState.FINISHED


def test_equals_never_preempt_each_other(llama: Any, make_engine: MakeEngine) -> None:
    """S2."""
    engine = make_engine(llama, rows=1)
    queries = [engine.submit(prompt(4, n + 3), GREEDY) for n in range(6)]
    engine.run_until_idle()
    assert [query.parks for query in queries] == [0] * 6


def test_the_parked_query_comes_before_a_fresh_one(llama: Any, make_engine: MakeEngine) -> None:
    """S3: also if the fresh one was submitted earlier."""
    engine = make_engine(llama, rows=1, limits=PlannerLimits(quantum_tokens=1, max_parks=8))
    first = engine.submit(prompt(4), SamplingParams(max_tokens=20, ignore_eos=True), sla_class="batch")
    fresh = engine.submit(prompt(5), SamplingParams(max_tokens=20, ignore_eos=True), sla_class="batch")
    for _ in range(4):
        engine.step()
    urgent = engine.submit(prompt(3), SamplingParams(max_tokens=3, ignore_eos=True), sla_class="interactive")
    while urgent.live:
        engine.step()
    assert first.state is QueryState.PARKED
    engine.step()
    assert first.state is QueryState.RUNNING
    assert fresh.row is None
    engine.run_until_idle()


def test_a_full_host_pool_costs_recomputation_not_failure(
    llama: Any, solo: Solo, make_engine: MakeEngine
) -> None:
    """M1: the pool holds one slice, three parks are forced: all finish."""
    engine = make_engine(llama, rows=4, host_pool_bytes=12_000)
    queries = [engine.submit(prompt(20, 3 + n), GREEDY) for n in range(4)]
    for _ in range(5):
        engine.step()
    for query in queries[:3]:
        engine.park(query)
    engine.run_until_idle()
    for n, query in enumerate(queries):
        assert query.output_token_ids == solo(llama, prompt(20, 3 + n), 12)
    assert sorted(query.recomputed_tokens > 0 for query in queries) == [False, False, True, True]


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_a_damaged_slice_is_computed_again(
    llama: Any, solo: Solo, make_engine: MakeEngine, steps: int
) -> None:
    """R6: one flipped bit in a parked slice, of a prompt half done too; nobody else is touched."""
    engine = make_engine(llama, rows=2, chunk_tokens=8)
    query, mate = engine.submit(prompt(14), GREEDY), engine.submit(prompt(9, 11), GREEDY)
    for _ in range(steps):
        engine.step()
    engine.park(query)
    store = engine.residency.store
    store._entries[query.query_id].reservation.views()[0][3] ^= 4
    engine.run_until_idle()
    assert query.output_token_ids == solo(llama, prompt(14), 12)
    assert mate.output_token_ids == solo(llama, prompt(9, 11), 12)
    assert query.recomputed_tokens > 0
    assert mate.recomputed_tokens == 0
    assert store.stats.corruptions == 1


def test_close_gives_everything_back(llama: Any) -> None:
    engine = LocalEngine(llama)
    queries = [engine.submit(prompt(5), GREEDY) for _ in range(3)]
    engine.step()
    engine.park(queries[0])
    engine.close()
    assert {str(query.state) for query in queries} == {"cancelled"}
    assert engine.residency.store.pool.used_bytes == 0


def test_eos_in_the_middle_of_a_prompt_is_a_token_like_any_other(
    llama: Any, solo: Solo, make_engine: MakeEngine
) -> None:
    """Q5: pad token = eos, no mask is ever derived from a token's value."""
    engine = make_engine(llama, rows=2)
    odd = [5, 2, 2, 9, 2]
    query, mate = engine.submit(odd, GREEDY), engine.submit(prompt(21), GREEDY)
    engine.run_until_idle()
    assert query.output_token_ids == solo(llama, odd, 12)
    assert mate.output_token_ids == solo(llama, prompt(21), 12)


def test_eos_ends_and_is_the_last_token(llama: Any, solo: Solo, make_engine: MakeEngine) -> None:
    free = solo(llama, prompt(9), 40)
    stop_id = free[5]
    engine = make_engine(llama)
    query = engine.submit(
        prompt(9), SamplingParams(max_tokens=40, stop_token_ids=(stop_id,), ignore_eos=True)
    )
    engine.run_until_idle()
    assert query.output_token_ids == free[: free.index(stop_id) + 1]
    assert query.finish_reason == "stop"


def test_seeded_sampling_ignores_mates_rows_and_parks(llama: Any, make_engine: MakeEngine) -> None:
    """Q3: same tokens alone, and beside unseeded ones, parked twice; five seeds give five outputs."""
    hot = SamplingParams(max_tokens=16, temperature=1.2, top_k=60, top_p=0.95, ignore_eos=True)

    def alone(seed: int) -> list[int]:
        engine = make_engine(llama)
        query = engine.submit(prompt(6), hot, seed=seed)
        engine.run_until_idle()
        return query.output_token_ids

    expected = {seed: alone(seed) for seed in range(5)}
    assert len({tuple(tokens) for tokens in expected.values()}) == 5
    engine = make_engine(llama, rows=4)
    others = [engine.submit(prompt(13, n), hot) for n in (3, 4)]
    queries = {seed: engine.submit(prompt(6), hot, seed=seed) for seed in range(5)}
    for _ in range(2):
        for _ in range(4):
            engine.step()
        for query in queries.values():
            if query.row is not None:
                engine.park(query)
                engine.resume(query)
    engine.run_until_idle()
    assert {seed: query.output_token_ids for seed, query in queries.items()} == expected
    assert all(len(query.output_token_ids) == 16 for query in others)


def test_stream_of_events_is_the_unary_result(
    llama: Any, make_engine: MakeEngine, byte_tokenizer: Tokenizer
) -> None:
    """R7: token chunks carry their index and join to the result, also over parks."""
    engine = make_engine(llama, byte_tokenizer, rows=1)
    events: list[Any] = []
    engine.on_event = events.append
    query = engine.submit(prompt(6), GREEDY)
    for _ in range(4):
        engine.step()
    engine.park(query)
    engine.run_until_idle()
    chunks = [event for event in events if isinstance(event, Tokens)]
    assert [chunk.first_index for chunk in chunks] == list(range(12))
    assert [token for chunk in chunks for token in chunk.token_ids] == query.output_token_ids
    assert "".join(chunk.text for chunk in chunks) == query.output_text
    assert query.output_text == byte_tokenizer.decode(query.output_token_ids)
    kinds = [type(event) for event in events if not isinstance(event, Tokens)]
    assert kinds == [Started, Preempted, Resumed, Finished]


def test_stop_strings_end_a_query(llama: Any, make_engine: MakeEngine, byte_tokenizer: Tokenizer) -> None:
    engine = make_engine(llama, byte_tokenizer)
    whole = engine.submit(prompt(6), SamplingParams(max_tokens=30, ignore_eos=True))
    engine.run_until_idle()
    stop = whole.output_text[4:6]
    query = engine.submit(prompt(6), SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)))
    engine.run_until_idle()
    assert query.output_text == whole.output_text[: whole.output_text.index(stop)]
    assert query.finish_reason == "stop"
    assert query.output_token_ids == whole.output_token_ids[: len(query.output_token_ids)]


def test_a_query_continues_after_tokens_emitted_elsewhere(
    llama: Any, solo: Solo, make_engine: MakeEngine
) -> None:
    """D3: what another process committed is prefilled, not produced again."""
    expected = solo(llama, prompt(9), 12)
    engine = make_engine(llama)
    events: list[Any] = []
    engine.on_event = events.append
    query = engine.submit(prompt(9), GREEDY, emitted_token_ids=expected[:5])
    engine.run_until_idle()
    assert query.output_token_ids == expected
    assert [event.first_index for event in events if isinstance(event, Tokens)] == list(range(5, 12))


def test_a_replay_that_is_complete_ends_at_once(llama: Any, solo: Solo, make_engine: MakeEngine) -> None:
    expected = solo(llama, prompt(9), 12)
    engine = make_engine(llama)
    query = engine.submit(prompt(9), GREEDY, emitted_token_ids=expected)
    assert query.state is QueryState.FINISHED
    assert query.output_token_ids == expected


@pytest.mark.parametrize("state_steps", [0, 1, 2, 3, 6])
def test_cancel_in_every_state_gives_everything_back(
    llama: Any, make_engine: MakeEngine, state_steps: int
) -> None:
    """C1 in small: waiting, prefilling, ready, running, parked."""
    engine = make_engine(llama, rows=1, chunk_tokens=4)
    queries = [engine.submit(prompt(10, 3 + n), GREEDY) for n in range(3)]
    for _ in range(state_steps):
        engine.step()
    engine.park(queries[0])
    for query in queries:
        assert engine.cancel(query)
        assert (query.state, query.finish_reason) == ("cancelled", "cancelled")
        assert not engine.cancel(query)
    assert not engine.queries
    assert engine.residency.occupied == []
    engine.check_integrity()


def test_wrong_state_is_a_clear_error(llama: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(llama)
    query = engine.submit(prompt(4), GREEDY)
    with pytest.raises(StateError, match="only a parked one"):
        engine.resume(query)
    engine.park(query)  # R10: not yet prefilled, nothing is copied.
    assert engine.residency.store.pool.used_bytes == 0
    with pytest.raises(StateError, match="can be parked"):
        engine.park(query)
    engine.run_until_idle()
    for call in (engine.park, engine.resume):
        with pytest.raises(StateError, match="finished"):
            call(query)


def test_resumed_then_parked_again_holds(llama: Any, solo: Solo, make_engine: MakeEngine) -> None:
    engine = make_engine(llama)
    query = engine.submit(prompt(4), GREEDY)
    for _ in range(3):
        engine.step()
    for _ in range(3):
        engine.park(query)
        engine.resume(query)
    engine.park(query)
    for _ in range(3):
        engine.step()
    assert (query.state, query.parks) == ("parked", 1)
    engine.run_until_idle()
    assert query.output_token_ids == solo(llama, prompt(4), 12)


def test_a_query_of_another_engine_is_refused(llama: Any, make_engine: MakeEngine) -> None:
    one, other = make_engine(llama), make_engine(llama)
    query = one.submit(prompt(4), GREEDY)
    for call in (other.park, other.cancel):
        with pytest.raises(InvalidRequestError, match="not in this engine"):
            call(query)
    one.run_until_idle()
    assert query.finish_reason == "length"


def test_wrong_types_never_reach_the_batch(llama: Any, make_engine: MakeEngine) -> None:
    """Q1."""
    engine = make_engine(llama, kv_budget_bytes=20_000)
    for bad in ([5.7], "567", [None], [[1, 2]]):
        with pytest.raises(InvalidRequestError):
            engine.submit(bad, GREEDY)  # type: ignore[arg-type]
    for seed in (1.5, "a", True):
        with pytest.raises(InvalidRequestError, match="seed"):
            engine.submit([5], GREEDY, seed=seed)  # type: ignore[arg-type]
    with pytest.raises(RequestTooLargeError, match="as many as kv_budget_bytes of 20000 hold"):
        engine.submit(prompt(40), SamplingParams(max_tokens=80))
    assert not engine.queries


def test_wrong_arguments_stop_the_start(llama: Any) -> None:
    for arguments in ({"rows": 0}, {"rows": 1.5}, {"host_pool_bytes": -1}, {"policy": None}, {"policy": "x"}):
        with pytest.raises(ConfigError):
            LocalEngine(llama, **arguments)
    for model in (None, 5, {}):
        with pytest.raises(UnsupportedModelError):
            LocalEngine(model)


def test_bad_requests_leave_good_ones_alone(llama: Any, solo: Solo, make_engine: MakeEngine) -> None:
    """Q1: the same clean answer every time, 100 times between good jobs which all finish."""
    engine = make_engine(llama, max_query_tokens=64)
    good = []
    for n in range(20):
        good.append(engine.submit(prompt(5, n + 3), GREEDY))
        for bad, error in (
            ([], InvalidRequestError),
            ([-1], InvalidRequestError),
            ([160], InvalidRequestError),
            (prompt(53), RequestTooLargeError),
        ):
            with pytest.raises(error):
                engine.submit(bad, GREEDY)
        with pytest.raises(InvalidRequestError, match="interactive, standard, batch"):
            engine.submit(prompt(3), GREEDY, sla_class="gold")
        engine.step()
    engine.run_until_idle()
    for n, query in enumerate(good):
        assert query.output_token_ids == solo(llama, prompt(5, n + 3), 12)


def test_the_limit_is_one_number(llama: Any, make_engine: MakeEngine) -> None:
    """M7: limit + 1 is refused with the limit in the message; the limit itself works."""
    engine = make_engine(llama, max_query_tokens=64)
    with pytest.raises(RequestTooLargeError, match="limit is 64") as caught:
        engine.submit(prompt(64), SamplingParams(max_tokens=1))
    assert caught.value.details["limit"] == "64"
    query = engine.submit(prompt(63), SamplingParams(max_tokens=1, ignore_eos=True))
    engine.run_until_idle()
    assert len(query.output_token_ids) == 1


def test_run_to_completion_admits_only_into_an_empty_batch(llama: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(llama, rows=2, prefill="inline", gate=Gate.BATCH)
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    queries = [
        engine.submit(prompt(5), GREEDY),
        engine.submit(prompt(6), short),
        engine.submit(prompt(7), short),
    ]
    while queries[0].live:
        engine.step()
        assert queries[2].row is None
    engine.run_until_idle()
    assert engine.counters["decode_steps"] == 12 + 2
    assert engine.counters["waiting_idle_row_steps"] == 10


def test_an_unknown_batch_is_refused(llama: Any) -> None:
    with pytest.raises(ConfigError, match="sideways"):
        LocalEngine(llama, batch="sideways")


def test_chunks_follow_the_target_of_the_most_urgent_row(
    llama: Any, solo: Solo, make_engine: MakeEngine
) -> None:
    """A slow machine cuts a long prompt finer while somebody urgent runs; tokens stay what they are."""
    engine = make_engine(llama, rows=2, chunk_tokens="auto")
    assert engine._bounds.step_tokens() == MOST_TOKENS  # Nobody runs.
    urgent = engine.submit([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True), sla_class="interactive")
    engine.step()
    budget = ChunkBudget()
    budget.note(0.05, 0)
    budget.note(0.05 + 0.4, 1000)  # Leaves 40 ms, a token takes 0.4 ms.
    budget.note = lambda *_: None  # type: ignore[method-assign] # the machine's own times don't matter here
    engine._bounds.chunk_budget = budget
    long_prompt = [3 + place % 100 for place in range(250)]
    long = engine.submit(long_prompt, SamplingParams(max_tokens=4, ignore_eos=True), sla_class="batch")
    done = []
    while len(done) < 3:
        engine.step()
        done.append(long.prefilled_tokens)
    assert done[:2] == [100, 200]  # And the rest, with the first token decoded behind it.
    engine.run_until_idle()
    assert long.output_token_ids == solo(llama, long_prompt, 4)
    assert engine._bounds.step_tokens() == MOST_TOKENS
    assert urgent.output_token_ids == solo(llama, [5, 6, 7], 60)


@pytest.mark.parametrize("chunk_tokens", ["some", 0, -1, 2.5])
def test_chunk_sizes_without_meaning_are_refused(
    llama: Any, make_engine: MakeEngine, chunk_tokens: Any
) -> None:
    with pytest.raises(ConfigError, match="chunk_tokens"):
        make_engine(llama, rows=1, chunk_tokens=chunk_tokens)
