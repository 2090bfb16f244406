"""Sessions of chat: a turn that begins with a kept slice equals a cold one, whatever became of the slice."""

from __future__ import annotations

import functools
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batond.bench.families import make_family as tiny_model
from batond.bench.faults.counts import full_or
from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.engine.model.layout import RecordLayout, Slot
from batond.daemon.engine.process import EngineProcess
from batond.daemon.engine.queries.outgoing import Outgoing
from batond.daemon.engine.queries.sessions import SessionKey, Sessions, reusable_tokens
from batond.daemon.errors import ConfigError, InvalidRequestError
from batond.daemon.requests.params import MAX_CLIENT_ID_CHARS
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import Finished, QueryState, Submit
from batond.offload.copies import InlineCopier
from batond.offload.pool import HostPool
from batond.offload.slice import KVSlice
from batond.offload.store import ParkedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batond.daemon.engine.queries.query import Query
    from batond.daemon.wire.channel import EngineChannel

    MakeEngine = Callable[..., LocalEngine]
    Run = Callable[..., Query]

#: Token-major alone, sliding windows, learned positions, and recurrent state beside attention.
KINDS = ("llama", "mistral", "gpt2", "lfm2")
HYBRID = "lfm2"
LOGPROB_TOLERANCE = 1e-4
ANSWER = SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2)


def opening(length: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place) % 100 for place in range(length)]


@pytest.fixture(scope="session")
def kind_of(make_family: Callable[[str], Any]) -> Callable[[str], Any]:
    hybrid = functools.cache(tiny_model)
    return lambda kind: hybrid(kind) if kind == HYBRID else make_family(kind)


@pytest.fixture(scope="session")
def cold() -> Callable[..., Query]:
    """The turn as an engine computes it that has never seen a session; the same one is computed once."""

    @functools.cache
    def engine_of(model: Any) -> LocalEngine:
        return LocalEngine(model, rows=2, session_bytes=0)

    known: dict[Any, Query] = {}

    def run(model: Any, prompt: Sequence[int], sampling: SamplingParams = ANSWER, **options: Any) -> Query:
        key = (model, tuple(prompt), repr(sampling), repr(options))
        if key not in known:
            engine = engine_of(model)
            known[key] = engine.submit(prompt, sampling, **options)
            engine.run_until_idle()
            assert known[key].cached_prompt_tokens == 0
        return known[key]

    return run


def turn(engine: LocalEngine, prompt: Sequence[int], session_id: str = "chat", **options: Any) -> Query:
    query = engine.submit(prompt, options.pop("sampling", ANSWER), session_id=session_id, **options)
    engine.run_until_idle()
    assert query.state is QueryState.FINISHED
    engine.check_integrity()
    return query


def assert_equal_answers(warm: Query, alone: Query) -> None:
    assert warm.output_token_ids == alone.output_token_ids
    for mine, theirs in zip(warm.output_logprobs, alone.output_logprobs, strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.logprob == pytest.approx(theirs.logprob, abs=LOGPROB_TOLERANCE)
        tops = [number for _, number in theirs.top]
        assert [number for _, number in mine.top] == pytest.approx(tops, abs=LOGPROB_TOLERANCE)


# -- equality ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["auto", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_turn_equals_a_cold_run_and_computes_only_what_is_new(
    kind_of: Callable[[str], Any], cold: Run, make_engine: MakeEngine, kind: str, batch: str
) -> None:
    model = kind_of(kind)
    engine = make_engine(model, rows=2, chunk_tokens=8, batch=batch)
    assert engine.keeps_sessions
    prompt, kept, spared = opening(20), 0, 0
    for number in range(4):
        computed = engine.counters["prefill_tokens"]
        query = turn(engine, prompt)
        assert_equal_answers(query, cold(model, prompt))
        assert query.cached_prompt_tokens == query.usage().cached_prompt_tokens == kept
        assert engine.counters["prefill_tokens"] - computed == len(prompt) - kept
        assert query.recomputed_tokens == 0
        spared += kept
        kept = len(prompt) + len(query.output_token_ids) - 1
        prompt = [*prompt, *query.output_token_ids, *opening(4 + 9 * number, 3 + number)]
    assert (engine.counters["session_hits"], engine.counters["sessions_kept"]) == (3, 4)
    assert engine.counters["session_tokens_reused"] == spared


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after_steps", [0, 1, 2, 3, 5, 8])
def test_turns_with_parks_in_between_equal_a_cold_run(
    kind_of: Callable[[str], Any], cold: Run, make_engine: MakeEngine, kind: str, after_steps: int
) -> None:
    """R1: parked before its slice is loaded, between chunks, and while it decodes, beside a mate."""
    model = kind_of(kind)
    engine = make_engine(model, rows=2, chunk_tokens=4)
    prompt = opening(11)
    first = turn(engine, prompt)
    prompt = [*prompt, *first.output_token_ids, *opening(9, 5)]
    mate = engine.submit(opening(6, 11), SamplingParams(max_tokens=30, ignore_eos=True))
    query = engine.submit(prompt, ANSWER, session_id="chat")
    for _ in range(after_steps):
        engine.step()
    engine.park(query)
    for _ in range(2):
        engine.step()
        engine.check_integrity()
    engine.run_until_idle()
    assert query.parks == 1
    assert query.recomputed_tokens == 0
    assert query.cached_prompt_tokens == 20
    assert_equal_answers(query, cold(model, prompt))
    assert mate.output_token_ids == cold(model, opening(6, 11), mate.sampling).output_token_ids
    prompt = [*prompt, *query.output_token_ids, 5, 6]
    assert_equal_answers(turn(engine, prompt), cold(model, prompt))


def test_sampled_turns_equal_a_cold_run(llama: Any, cold: Run, make_engine: MakeEngine) -> None:
    """Noise, penalties and biases count the whole conversation, reused or not."""
    sampling = SamplingParams(
        max_tokens=12, ignore_eos=True, logprobs=2, temperature=0.9, top_p=0.95, repetition_penalty=1.2
    )
    engine = make_engine(llama, rows=2)
    prompt = opening(15)
    for seed in range(4):
        query = turn(engine, prompt, sampling=sampling, seed=seed)
        assert_equal_answers(query, cold(llama, prompt, sampling, seed=seed))
        prompt = [*prompt, *query.output_token_ids, 7 + seed]
    assert engine.counters["session_hits"] == 3


@pytest.mark.parametrize("cut", [1, 2, 17, 28, 29, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_history_is_reused_up_to_the_edit(
    kind_of: Callable[[str], Any], cold: Run, make_engine: MakeEngine, kind: str, cut: int
) -> None:
    """With recurrent state, which can't be cut, only a whole match is of use."""
    model = kind_of(kind)
    engine = make_engine(model, rows=2)
    first = turn(engine, opening(20))  # Keeps 29 tokens.
    history = [*opening(20), *first.output_token_ids][:cut]
    edited = [*history, 120 if cut < 30 and history[-1] != 120 else 119, 9, 8]
    query = turn(engine, edited)
    common = min(cut, 29)
    assert query.cached_prompt_tokens == (common if kind != HYBRID or common == 29 else 0)
    assert_equal_answers(query, cold(model, edited))
    again = [*edited, *query.output_token_ids, 4]
    assert_equal_answers(turn(engine, again), cold(model, again))


@pytest.mark.parametrize("length", [1, 5, 28, 29, 30])
def test_the_last_token_of_the_prompt_is_always_computed(
    llama: Any, cold: Run, make_engine: MakeEngine, length: int
) -> None:
    """A prompt that lies within what is kept: asked again, or shortened."""
    engine = make_engine(llama)
    first = turn(engine, opening(20))
    prompt = [*opening(20), *first.output_token_ids][:length]
    query = turn(engine, prompt)
    assert query.cached_prompt_tokens == min(length - 1, 29)
    assert_equal_answers(query, cold(llama, prompt))


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_ends_with_its_first_token_is_kept_from_its_prefill(
    kind_of: Callable[[str], Any], cold: Run, make_engine: MakeEngine, kind: str
) -> None:
    model = kind_of(kind)
    engine = make_engine(model)
    turn(engine, opening(9), sampling=SamplingParams(max_tokens=1, ignore_eos=True))
    query = turn(engine, opening(12))
    assert query.cached_prompt_tokens == 9
    assert_equal_answers(query, cold(model, opening(12)))


def test_a_turn_with_tokens_emitted_elsewhere_reuses_the_session(
    llama: Any, cold: Run, make_engine: MakeEngine
) -> None:
    """Another daemon had begun the job; log-probabilities of what it emitted are found out again."""
    engine = make_engine(llama, chunk_tokens=4)
    first = turn(engine, opening(14))
    prompt = [*opening(14), *first.output_token_ids, 5, 6, 7]
    alone = cold(llama, prompt)
    query = turn(engine, prompt, emitted_token_ids=alone.output_token_ids[:6])
    assert query.cached_prompt_tokens == 23
    assert_equal_answers(query, alone)


def test_two_turns_at_once_both_read_and_the_later_finisher_is_kept(
    llama: Any, cold: Run, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, rows=3, chunk_tokens=8)
    first = turn(engine, opening(12))
    history = [*opening(12), *first.output_token_ids]
    short, long = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2), ANSWER
    left = engine.submit([*history, 9], long, session_id="chat")
    right = engine.submit([*history, 8, 8, 8], short, session_id="chat")
    while right.live:
        engine.step()
        engine.check_integrity()
    assert left.live, "it has loaded its slice already; the replacement is nothing to it"
    kept = engine.residency.sessions.get(SessionKey("default", "chat"))
    assert kept is not None
    assert kept.token_ids.tolist() == [*history, 8, 8, 8, *right.output_token_ids[:-1]]
    engine.run_until_idle()
    assert (left.cached_prompt_tokens, right.cached_prompt_tokens) == (21, 21)
    assert_equal_answers(left, cold(llama, [*history, 9], long))
    assert_equal_answers(right, cold(llama, [*history, 8, 8, 8], short))
    kept = engine.residency.sessions.get(SessionKey("default", "chat"))
    assert kept is not None
    assert kept.token_ids.tolist() == [*history, 9, *left.output_token_ids[:-1]]
    assert engine.residency.sessions.count == 1


@pytest.mark.parametrize("change", ["replaced", "evicted"])
def test_a_session_that_changes_while_a_turn_waits_is_looked_up_again(
    llama: Any, cold: Run, make_engine: MakeEngine, change: str
) -> None:
    engine = make_engine(llama, rows=1, ready_limit=0, chunk_tokens=8)
    first = turn(engine, opening(12))
    history = [*opening(12), *first.output_token_ids, 5]
    if change == "replaced":
        running = engine.submit(history, ANSWER, session_id="chat")
    else:
        running = engine.submit(opening(5, 11), ANSWER)
    engine.step()
    waiting = engine.submit([*history, 6, 7], ANSWER, session_id="chat")
    engine.step()
    assert (waiting.state, waiting.session_tokens) == (QueryState.WAITING, 21)
    if change == "evicted":
        engine.residency.sessions.make_room(engine.residency.store.pool.capacity_bytes)
    engine.run_until_idle()
    assert running.state is QueryState.FINISHED
    # The running turn's answer follows `history` where the waiting one has other words.
    assert waiting.cached_prompt_tokens == (
        23 + (running.output_token_ids[0] == 6) if change == "replaced" else 0
    )
    assert_equal_answers(waiting, cold(llama, [*history, 6, 7]))


# -- bounds, eviction, damage, scope -------------------------------------------------------------------------


def test_the_least_recently_used_session_goes_first(llama: Any, make_engine: MakeEngine) -> None:
    record = 384
    engine = make_engine(llama, session_bytes=3 * 29 * record)
    assert engine.residency.batch.layout.record_bytes == record
    for name in ("a", "b", "c"):
        turn(engine, opening(20, ord(name)), name)
    assert engine.residency.sessions.nbytes == 3 * 29 * record
    turn(engine, [*opening(20, ord("a")), 9], "a", sampling=SamplingParams(max_tokens=1, ignore_eos=True))
    turn(engine, opening(20, ord("d")), "d")
    names = [name for name in "abcd" if engine.residency.sessions.get(SessionKey("default", name))]
    assert names == ["a", "c", "d"]
    assert engine.counters["sessions_evicted"] == 1


def test_a_slice_above_the_bound_is_not_kept_and_evicts_nobody(llama: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(llama, session_bytes=384 * 30)
    turn(engine, opening(20), "a")
    turn(engine, opening(22), "a")
    turn(engine, opening(22), "b")
    assert (engine.residency.sessions.count, engine.counters["sessions_evicted"]) == (1, 0)
    assert turn(engine, opening(21), "a").cached_prompt_tokens == 20, "the older one is still there"


@pytest.mark.parametrize("kind", ["llama", HYBRID])
def test_a_park_that_needs_the_room_of_sessions_keeps_its_kv(
    kind_of: Callable[[str], Any], cold: Run, make_engine: MakeEngine, kind: str
) -> None:
    """Sessions go, least recently used first, and only as many as it takes; nothing is computed again."""
    model = kind_of(kind)
    size = make_engine(model).residency.batch.layout.nbytes
    engine = make_engine(model, rows=2, host_pool_bytes=3 * size(29), session_bytes=3 * size(29))
    for name in ("a", "b", "c"):
        turn(engine, opening(20, 5 + ord(name)), name)
    assert engine.residency.store.pool.free_bytes == 0
    assert engine.residency.host_free_bytes == 3 * size(29)
    query = engine.submit(opening(25), ANSWER)
    for _ in range(4):
        engine.step()
    engine.park(query)
    engine.check_integrity()
    assert query.on_host_tokens > 25
    assert [n for n in "abc" if engine.residency.sessions.get(SessionKey("default", n))] == ["b", "c"]
    engine.run_until_idle()
    assert (query.recomputed_tokens, engine.counters["parks_dropped"]) == (0, 0)
    assert engine.counters["sessions_evicted"] == 1
    assert_equal_answers(query, cold(model, opening(25)))


def test_the_planner_counts_the_room_of_sessions_as_free(
    llama: Any, cold: Run, make_engine: MakeEngine
) -> None:
    """S1: an urgent query takes a row; its victim is offloaded over a pool that idle sessions fill."""
    limits = PlannerLimits(quantum_tokens=1, max_parks=8)
    engine = make_engine(llama, rows=1, host_pool_bytes=384 * 60, session_bytes=384 * 60, limits=limits)
    turn(engine, opening(20), "a")
    turn(engine, opening(20, 9), "b")
    low = engine.submit(opening(30), SamplingParams(max_tokens=20, ignore_eos=True), sla_class="batch")
    for _ in range(5):
        engine.step()
    urgent = engine.submit(opening(8), ANSWER, sla_class="interactive")
    engine.run_until_idle()
    assert (low.planner_parks, low.recomputed_tokens) == (1, 0)
    assert low.output_token_ids == cold(llama, opening(30), low.sampling).output_token_ids
    assert_equal_answers(urgent, cold(llama, opening(8)))


def test_a_park_larger_than_pool_and_sessions_evicts_nobody(
    llama: Any, cold: Run, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, rows=1, host_pool_bytes=384 * 40, session_bytes=384 * 40)
    turn(engine, opening(20), "a")
    query = engine.submit(opening(45), ANSWER)
    for _ in range(3):
        engine.step()
    engine.park(query)
    engine.run_until_idle()
    assert query.recomputed_tokens > 0
    assert (engine.residency.sessions.count, engine.counters["sessions_evicted"]) == (1, 0)
    assert_equal_answers(query, cold(llama, opening(45)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_session_costs_computation_alone(
    kind_of: Callable[[str], Any], cold: Run, make_engine: MakeEngine, kind: str
) -> None:
    """R6: one flipped bit in a kept slice."""
    model = kind_of(kind)
    engine = make_engine(model, rows=2)
    first, other = turn(engine, opening(20), "a"), turn(engine, opening(20, 9), "b")
    kept = engine.residency.sessions.get(SessionKey("default", "a"))
    assert kept is not None
    engine.residency.store._entries[kept.owner_id].reservation.views()[0][5] ^= 4
    prompt = [*opening(20), *first.output_token_ids, 5]
    query = turn(engine, prompt, "a")
    assert query.cached_prompt_tokens == 0
    assert_equal_answers(query, cold(model, prompt))
    assert engine.residency.store.stats.corruptions == 1
    assert turn(engine, [*prompt, *query.output_token_ids, 6], "a").cached_prompt_tokens == 40
    assert turn(engine, [*opening(20, 9), *other.output_token_ids, 5], "b").cached_prompt_tokens == 29


def test_a_slice_that_is_lost_with_its_parked_query_is_asked_for_again(
    llama: Any, cold: Run, make_engine: MakeEngine
) -> None:
    """R6: the parked copy of a second turn is damaged; what the session kept still spares most of it."""
    engine = make_engine(llama, rows=1)
    first = turn(engine, opening(20))
    prompt = [*opening(20), *first.output_token_ids, 5]
    query = engine.submit(prompt, ANSWER, session_id="chat")
    for _ in range(3):
        engine.step()
    engine.park(query)
    engine.residency.store._entries[query.query_id].reservation.views()[0][5] ^= 4
    engine.run_until_idle()
    assert engine.counters["session_hits"] == 2
    assert 0 < query.recomputed_tokens < 10
    assert query.cached_prompt_tokens == 29
    assert_equal_answers(query, cold(llama, prompt))


def test_sessions_of_different_tenants_never_meet(llama: Any, make_engine: MakeEngine) -> None:
    """R4: the same id, the same words."""
    engine = make_engine(llama)
    turn(engine, opening(20), tenant="a")
    assert turn(engine, opening(20), tenant="b").cached_prompt_tokens == 0
    assert turn(engine, opening(20), tenant="a").cached_prompt_tokens == 19
    assert turn(engine, opening(20), "other", tenant="a").cached_prompt_tokens == 0
    assert engine.residency.sessions.count == 3


def test_a_query_without_a_session_reuses_and_keeps_nothing(llama: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(llama)
    turn(engine, opening(20))
    nbytes = engine.residency.sessions.nbytes
    stores = engine.residency.store.stats.stores
    query = engine.submit(opening(20), ANSWER)
    engine.run_until_idle()
    assert query.cached_prompt_tokens == 0
    assert (engine.residency.sessions.nbytes, engine.residency.store.stats.stores) == (nbytes, stores)


@pytest.mark.parametrize("end", ["cancel", "forget"])
def test_a_turn_that_does_not_finish_leaves_the_session_as_it_was(
    llama: Any, make_engine: MakeEngine, end: str
) -> None:
    engine = make_engine(llama)
    turn(engine, opening(20))
    kept = engine.residency.sessions.get(SessionKey("default", "chat"))
    assert kept is not None
    query = engine.submit([*opening(20), 9], ANSWER, session_id="chat")
    for _ in range(3):
        engine.step()
    getattr(engine, end)(query)
    now = engine.residency.sessions.get(SessionKey("default", "chat"))
    assert now is not None
    assert now.owner_id == kept.owner_id
    assert engine.residency.store.pool.used_bytes == kept.nbytes


def test_many_cycles_of_turns_leak_nothing(llama: Any, cold: Run, make_engine: MakeEngine) -> None:
    """R8, R2: finished, cancelled and handed back, parked and not, over a pool that is too small for all."""
    chance = random.Random(3)
    engine = make_engine(llama, rows=3, chunk_tokens=8, host_pool_bytes=384 * 150, session_bytes=384 * 100)
    histories: dict[str, list[int]] = {}
    live: list[tuple[str, Query]] = []
    reused: list[Query] = []
    for _ in range(full_or(300, 3000)):
        name = f"s{chance.randrange(8)}"
        history = histories.get(name) or opening(chance.randrange(1, 12), chance.randrange(3, 90))
        prompt = [*history[: chance.randrange(1, 30)], chance.randrange(3, 100)]
        sampling = SamplingParams(max_tokens=chance.randrange(1, 7), ignore_eos=True)
        tenant = chance.choice("ab")
        live.append((name, engine.submit(prompt, sampling, tenant=tenant, session_id=name)))
        for _ in range(chance.randrange(3)):
            engine.step()
        for _, query in live:
            if query.live and query.state is not QueryState.PARKED and chance.random() < 0.1:
                engine.park(query)
            elif query.held and chance.random() < 0.5:
                engine.resume(query)
            elif query.live and chance.random() < 0.1:
                engine.cancel(query) if chance.random() < 0.5 else engine.forget(query)
        histories |= {n: [*q.prompt_token_ids, *q.output_token_ids] for n, q in live if not q.live}
        reused += [q for _, q in live if q.state is QueryState.FINISHED and q.cached_prompt_tokens]
        live = [(n, q) for n, q in live if q.live]
        engine.check_integrity()
    engine.run_until_idle()
    engine.check_integrity()
    sessions = engine.residency.sessions
    assert engine.residency.store.pool.used_bytes == sessions.nbytes > 0
    for counter in ("session_hits", "sessions_evicted", "queries_cancelled", "parks"):
        assert engine.counters[counter] > 20
    for query in chance.sample(reused, full_or(30, 300)):
        alone = cold(llama, query.prompt_token_ids, query.sampling)
        assert query.output_token_ids == alone.output_token_ids
    engine.close()
    assert engine.residency.store.pool.used_bytes == 0
    engine.check_integrity()
    assert sessions.count == sessions.nbytes == 0


# -- who keeps none, and what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"session_bytes": 0}, {"prefill": "inline"}, {"host_pool_bytes": 3}],
    ids=["off", "inline", "no pool"],
)
def test_an_engine_that_keeps_none_takes_the_hint_and_ignores_it(
    llama: Any, cold: Run, make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    engine = make_engine(llama, **options)
    assert not engine.keeps_sessions
    for _ in range(2):
        query = turn(engine, opening(9))
        assert query.cached_prompt_tokens == 0
        assert query.output_token_ids == cold(llama, opening(9)).output_token_ids
    assert engine.residency.store.stats.stores == 0


def test_a_model_without_a_cache_keeps_none(make_engine: MakeEngine) -> None:
    """preemption_mode "recompute": there is nothing to keep but tokens."""
    engine = make_engine(tiny_model("openai-gpt"), rows=2)
    assert engine.preemption_mode == "recompute"
    assert not engine.keeps_sessions
    turn(engine, opening(6))
    assert engine.residency.store.pool.used_bytes == 0


@pytest.mark.parametrize("family", ["mamba"])
def test_a_model_whose_slices_can_not_be_extended_exactly_keeps_none(
    make_engine: MakeEngine, family: str
) -> None:
    """Selection among equal scores, as repeated tokens have them; state that chunks would change."""
    engine = make_engine(tiny_model(family), rows=2)
    assert not engine.keeps_sessions
    assert not engine.residency.batch.columns, "the question left its row"
    turn(engine, opening(6))
    assert engine.residency.store.pool.used_bytes == 0


def test_what_names_no_session_is_refused(llama: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(llama)
    bad: list[Any] = ["", "x" * (MAX_CLIENT_ID_CHARS + 1), 5, b"chat"]
    for session_id in bad:
        with pytest.raises(InvalidRequestError, match="session_id") as caught:
            engine.submit(opening(4), ANSWER, session_id=session_id)
        assert caught.value.details["field"] == "session_id"
    with pytest.raises(InvalidRequestError, match="without session_id") as caught:
        engine.submit(opening(4), SamplingParams(prompt_logprobs=1), session_id="chat")
    assert caught.value.details["field"] == "prompt_logprobs"
    with pytest.raises(InvalidRequestError, match="NUL"):
        engine.submit(opening(4), ANSWER, query_id="\0session 1")
    assert not engine.queries
    turn(engine, opening(4), "x" * MAX_CLIENT_ID_CHARS)
    wrong: list[dict[str, Any]] = [{"session_bytes": -1}, {"session_bytes": 1.5}, {"session_ttl_s": 0}]
    for arguments in wrong:
        with pytest.raises(ConfigError):
            LocalEngine(llama, **arguments)


def test_the_default_bound_is_a_quarter_of_the_pool(llama: Any, make_engine: MakeEngine) -> None:
    assert make_engine(llama, host_pool_bytes=1 << 20).residency.sessions.most_bytes == 1 << 18


# -- the books alone -----------------------------------------------------------------------------------------

_SLOT = Slot(0, "keys", -1, (4,), torch.float32, 0, 16, 0, 2)


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _slice(tokens: int) -> KVSlice:
    return KVSlice(torch.randint(0, 255, (tokens, 16), dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_sessions(clock: Clock) -> Iterator[Callable[..., Sessions]]:
    made: list[tuple[Sessions, ParkedStore]] = []

    def make(pool_bytes: int = 1600, most_bytes: int = 800, copier: Any = None) -> Sessions:
        store = ParkedStore(HostPool(pool_bytes), copier or InlineCopier(), poison=True)
        layout = RecordLayout((_SLOT,), ())
        sessions = Sessions(
            store,
            Outgoing(store),
            layout,
            torch.device("cpu"),
            Counter(),
            most_bytes=most_bytes,
            ttl_s=10.0,
            clock=clock,
        )
        made.append((sessions, store))
        return sessions

    yield make
    for sessions, store in made:
        sessions.check_integrity()
        store.check_integrity()
        store.close()


KEY = SessionKey("tenant", "chat")


def test_a_session_unused_for_its_time_to_live_is_dropped(
    make_sessions: Callable[..., Sessions], clock: Clock
) -> None:
    sessions = make_sessions()
    old, used = SessionKey("t", "old"), SessionKey("t", "used")
    for key in (old, used):
        assert sessions.keep(key, [1, 2, 3], _slice(3))
    clock.now_s += 9
    assert sessions.load(used, [1, 2, 9]) is not None
    clock.now_s += 2
    sessions.expire()
    assert (sessions.get(old), sessions.count, sessions.nbytes) == (None, 1, 48)
    clock.now_s += 11
    sessions.expire()
    assert (sessions.count, sessions.nbytes) == (0, 0)


class DyingCopier(InlineCopier):
    """Refuses copies while it is told to."""

    dead = False

    def store(self, kv: Any, reservation: Any) -> Any:
        if self.dead:
            raise RuntimeError("the copy engine is on fire")
        return super().store(kv, reservation)

    def load(self, reservation: Any, kv: Any) -> Any:
        if self.dead:
            raise RuntimeError("the copy engine is on fire")
        return super().load(reservation, kv)


def test_copies_that_fail_leave_the_older_session(make_sessions: Callable[..., Sessions]) -> None:
    """R7: while both have room, the older slice goes after the newer one is complete."""
    copier = DyingCopier()
    sessions = make_sessions(copier=copier)
    assert sessions.keep(KEY, [1, 2, 3], _slice(3))
    copier.dead = True
    assert not sessions.keep(KEY, [1, 2, 3, 4], _slice(4))
    assert sessions.load(KEY, [1, 2, 3, 4]) is None
    copier.dead = False
    loaded = sessions.load(KEY, [1, 2, 3, 4])
    assert loaded is not None
    assert loaded.n_tokens == 3


def test_a_growing_session_replaces_itself_before_others_go(make_sessions: Callable[..., Sessions]) -> None:
    sessions = make_sessions(pool_bytes=800, most_bytes=800)
    other = SessionKey("tenant", "other")
    assert sessions.keep(other, range(20), _slice(20))
    for tokens in (10, 20, 29, 30):
        assert sessions.keep(KEY, range(tokens), _slice(tokens))
    assert sessions.get(other) is not None
    assert sessions.nbytes == 800
    assert sessions.keep(KEY, range(31), _slice(31))
    assert (sessions.get(other), sessions.nbytes) == (None, 31 * 16)


def test_a_slice_of_other_tokens_is_a_mistake(make_sessions: Callable[..., Sessions]) -> None:
    with pytest.raises(ValueError, match="2 token ids for a slice of 3"):
        make_sessions().keep(KEY, [1, 2], _slice(3))


def test_integrity_finds_what_is_wrong(make_sessions: Callable[..., Sessions]) -> None:
    sessions = make_sessions()
    sessions.keep(KEY, [1, 2, 3], _slice(3))
    kept = sessions._kept.pop(KEY)
    with pytest.raises(AssertionError, match="not kept"):
        sessions.check_integrity()
    sessions._kept[KEY] = kept
    sessions._nbytes += 1
    with pytest.raises(AssertionError, match="counted 49"):
        sessions.check_integrity()
    sessions._nbytes -= 1
    sessions._store.forget(kept.owner_id)
    with pytest.raises(AssertionError, match="has 0 bytes"):
        sessions.check_integrity()
    sessions._drop(KEY)


_TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(common=_TOKENS, kept=_TOKENS, new=_TOKENS, divisible=st.booleans())
def test_what_is_reused_is_the_longest_prefix_that_may_be(
    common: list[int], kept: list[int], new: list[int], *, divisible: bool
) -> None:
    kept, prompt = common + kept, common + new
    count = reusable_tokens(np.array(kept, dtype=np.int64), prompt, divisible=divisible)
    fitting = [
        size
        for size in range(min(len(kept), len(prompt) - 1) + 1)
        if kept[:size] == prompt[:size] and (divisible or size == len(kept))
    ]
    assert count == max(fitting, default=0)


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 30), st.booleans(), st.integers(0, 40)), max_size=40
    )
)
def test_bounds_hold_and_what_is_loaded_is_what_was_kept(turns: list[tuple[int, int, bool, int]]) -> None:
    """R4: against a plain model of the books; parks take room in between."""
    store = ParkedStore(HostPool(40 * 16, chunk_bytes=70), InlineCopier(), poison=True)
    counters: Counter[str] = Counter()
    sessions = Sessions(
        store,
        Outgoing(store),
        RecordLayout((_SLOT,), ()),
        torch.device("cpu"),
        counters,
        most_bytes=25 * 16,
        ttl_s=1e9,
    )
    newest: dict[SessionKey, tuple[list[int], torch.Tensor]] = {}
    for number, (name, length, same, room) in enumerate(turns):
        key = SessionKey("t", str(name))
        before = newest.get(key, ([], torch.empty(0)))[0] if same else []
        token_ids = [*before, *range(1000 * number, 1000 * number + length)][:30]
        kv = _slice(len(token_ids))
        copy = kv.tokens.clone()
        had = sessions.get(key)
        if sessions.keep(key, token_ids, kv):
            newest[key] = (token_ids, copy)
        else:
            assert len(token_ids) > 25
            assert sessions.get(key) is had
        if room:
            sessions.make_room(room * 16)
            assert store.pool.free_bytes >= room * 16
        sessions.check_integrity()
        store.check_integrity()
        for each, (ids, body) in newest.items():
            loaded = sessions.load(each, [*ids, -1]) if sessions.get(each) else None
            assert (loaded is None) == (sessions.get(each) is None)
            if loaded is not None:
                assert torch.equal(loaded.tokens, body)
    store.close()
    store.pool.close()


def test_the_engine_process_hands_sessions_on_and_shows_them(llama: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(llama)
    process = EngineProcess(engine, cast("EngineChannel", Mock()))
    for number, session_id in enumerate(("chat", "chat", "")):
        process._apply(
            Submit(
                query_id=f"q{number}",
                tenant="a",
                sla_class="standard",
                prompt_token_ids=opening(20),
                sampling=ANSWER,
                seed=1,
                session_id=session_id,
            )
        )
        engine.run_until_idle()
    usages = [event.usage for event in process._events if isinstance(event, Finished)]
    assert [usage.cached_prompt_tokens for usage in usages] == [0, 19, 0]
    shot = engine.snapshot()
    assert (shot.sessions, shot.session_bytes) == (1, 29 * 384)
    assert (shot.counters["session_hits"], shot.counters["session_tokens_reused"]) == (1, 19)


def test_a_turn_that_ends_in_the_step_of_the_next_brings_more_than_was_planned(
    llama: Any, cold: Run, make_engine: MakeEngine
) -> None:
    """The next one's chunk was planned for a prompt of which nothing was known."""
    engine = make_engine(llama, rows=2, chunk_tokens=20)
    prompt = opening(14)
    engine.submit(prompt, SamplingParams(max_tokens=1, ignore_eos=True), session_id="a")
    query = engine.submit([*prompt, 3, 4], ANSWER, session_id="a")
    engine.run_until_idle()
    assert query.cached_prompt_tokens == 14
    assert_equal_answers(query, cold(llama, [*prompt, 3, 4]))
