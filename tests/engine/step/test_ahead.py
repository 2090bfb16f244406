"""The overlapped loop against the plain one: the same tokens, whoever comes, goes or is parked."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import families
from batond.bench.draws import LONGEST_QUERY_TOKENS, Draws, byte_tokenizer
from batond.bench.schedules import Move, Outcome, Player
from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.engine.batch.card_steps import CardSteps
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.schedules import Schedule
    from batond.daemon.engine.queries.query import Query

    MakeOne = Callable[..., LocalEngine]

ROWS = 3


@functools.cache
def _model(dtype: torch.dtype) -> Any:
    return copy.deepcopy(families.make_family("llama")).to(dtype)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[RingBatch]:
    """A batch for each step that it begins ahead."""
    steps: list[RingBatch] = []
    begin = RingBatch.begin_ahead

    def noted(batch: RingBatch) -> None:
        steps.append(batch)
        begin(batch)

    monkeypatch.setattr(RingBatch, "begin_ahead", noted)
    return steps


@pytest.fixture
def make_one(card_on_cpu: list[Any]) -> MakeOne:
    """Engines of the same model on what passes for a card."""

    def make(**options: Any) -> LocalEngine:
        dtype = torch.bfloat16 if options.get("deterministic") else torch.float32
        defaults = {
            "rows": ROWS,
            "batch": "ring",
            "chunk_tokens": 5,
            "max_query_tokens": LONGEST_QUERY_TOKENS,
            "host_pool_bytes": 1 << 22,
            "limits": PlannerLimits(quantum_tokens=1, max_parks=1000),
            "poison": True,
        }
        return LocalEngine(_model(dtype), byte_tokenizer(), **{**defaults, **options})

    return make


def _unaided(rng: random.Random) -> SamplingParams:
    """What goes ahead, greedy or with noise; ends by number, by id and by text."""
    fields: dict[str, Any] = {"temperature": 0.8, "top_k": 9} if rng.randrange(2) else {}
    fields |= {"max_tokens": rng.randrange(1, 13), "ignore_eos": rng.randrange(2) == 0}
    if rng.randrange(3) == 0:
        fields["stop"] = tuple(chr(rng.randrange(33, 127)) for _ in range(rng.randrange(1, 9)))
    if rng.randrange(3) == 0:
        fields["stop_token_ids"] = tuple(rng.sample(range(120), 3))
    return SamplingParams(**fields)


def _play(engine: LocalEngine, schedule: Schedule) -> Player:
    player, arrivals = Player(engine), iter(schedule.arrivals)
    for move, number in schedule.moves:
        if move is Move.SUBMIT:
            player.submit(next(arrivals))
        else:
            player.apply(move, number)
    player.drain()
    return player


def _told(query: Query, *, exact: bool) -> Outcome:
    """In float32, log-probabilities differ in the last bits with the rows that are computed together."""
    outcome = Outcome.of(query)
    return outcome if exact else replace(outcome, logprobs=(), prompt_logprobs=())


def test_a_step_that_finds_no_memory_when_it_is_begun_is_done_in_its_turn(
    make_one: MakeOne, begun: list[RingBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: a launch on a full card may fail."""
    found = []
    run_on, runs = CardSteps.run_on, [0]

    def fails_at_every_third(steps: CardSteps) -> None:
        runs[0] += 1
        if runs[0] % 3 == 1:
            raise torch.AcceleratorError("CUDA error: out of memory")
        run_on(steps)

    for overlap in (False, True):
        monkeypatch.setattr(CardSteps, "run_on", fails_at_every_third)
        engine = make_one(overlap=overlap)
        queries = _fill(engine, ROWS)
        engine.run_until_idle()
        found.append([query.output_token_ids for query in queries])
    assert found[0] == found[1]
    assert runs[0] >= 3
    assert len(begun) == runs[0]


def test_noise_goes_ahead_too(make_one: MakeOne, begun: list[RingBatch]) -> None:
    """R2: the numbers drawn depend on seed and place, whichever loop draws them."""
    found = []
    for overlap in (True, False):
        engine = make_one(overlap=overlap)
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, top_p=0.9)
        queries = [engine.submit([5, 6, 7], sampling, seed=seed) for seed in range(ROWS - 1)]
        queries += _fill(engine, 1)
        engine.run_until_idle()
        found.append([query.output_token_ids for query in queries])
    assert found[0] == found[1]
    assert len(begun) > 5


@pytest.mark.parametrize("deterministic", [False, True])
def test_random_schedules_give_the_same_overlapped_and_plain(
    make_one: MakeOne, begun: list[RingBatch], *, deterministic: bool
) -> None:
    """R1, R2, R3: tokens, text, log-probabilities and ends, through parks and all kinds of sampling."""
    overlapped, plain = (make_one(overlap=on, deterministic=deterministic) for on in (True, False))
    draws, rng = Draws(overlapped, replays=False), random.Random(3)
    draw_any = draws.sampling
    for number in range(8):
        draws.sampling = _unaided if number % 3 else draw_any  # type: ignore[method-assign]
        schedule = draws.schedule(rng)
        player = _play(overlapped, schedule)
        for mine, other in zip(player.queries, _play(plain, schedule).queries, strict=True):
            assert list(player.stream_faults(mine)) == [], schedule
            if QueryState.CANCELLED not in {mine.state, other.state}:
                told = (_told(query, exact=deterministic) for query in (mine, other))
                assert len(set(map(repr, told))) == 1, schedule
    assert len(begun) > 10
    assert all(batch is overlapped.residency.batch for batch in begun)


def _fill(engine: LocalEngine, count: int, **fields: Any) -> list[Query]:
    sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **fields})
    return [engine.submit([5 + number, 6, 7], sampling) for number in range(count)]


def _until_begun(engine: LocalEngine) -> None:
    for _ in range(20):
        engine.step()
        if engine.residency.batch.ahead:
            return
    pytest.fail("no step was begun ahead")


def test_nobody_coming_or_going_both_loops_count_the_same(make_one: MakeOne, begun: list[RingBatch]) -> None:
    """Each step of the engine brings one token a row; with a line before it, no row idles longer."""
    counts = []
    for overlap in (True, False):
        engine = make_one(overlap=overlap)
        queries = _fill(engine, ROWS + 2)
        engine.run_until_idle()
        counts.append((engine.counters, [query.output_token_ids for query in queries]))
    assert counts[0] == counts[1]
    assert len(begun) > 10


def test_beside_the_chunks_of_a_prompt_steps_go_on_until_it_is_nearly_complete(
    make_one: MakeOne, begun: list[RingBatch]
) -> None:
    """Its query gets its row in the same step as in the plain loop."""
    counts = []
    for overlap in (True, False):
        engine = make_one(overlap=overlap)
        queries = _fill(engine, 1, max_tokens=16)
        for _ in range(3):
            engine.step()
        queries.append(engine.submit([9] * 29, SamplingParams(max_tokens=4, ignore_eos=True)))
        before = len(begun)
        while not queries[1].output_token_ids:
            engine.step()
        counts.append([len(query.output_token_ids) for query in queries])
        assert len(begun) - before == (4 if overlap else 0), "6 chunks, and none begun beside the last two"
        engine.run_until_idle()
    assert counts[0] == counts[1]


def test_what_came_is_heard_before_the_next_step_is_begun(make_one: MakeOne, begun: list[RingBatch]) -> None:
    """An arrival waits for the step that runs, and not for one more."""
    engine = make_one()
    _fill(engine, 2)
    _until_begun(engine)
    engine.arrivals = lambda: True
    engine.step()
    assert not engine.residency.batch.ahead
    count = len(begun)
    engine.step()
    assert len(begun) == count
    engine.arrivals = lambda: False
    engine.step()
    assert len(begun) == count + 1
    engine.run_until_idle()


def test_rows_leave_a_step_that_was_begun(make_one: MakeOne) -> None:
    """R4, Q3: parked, cancelled or ended by a stop string, nobody gets the token that was computed for it."""
    engine, plain = make_one(), make_one(overlap=False)
    alone, _ = _fill(plain, 2)
    plain.run_until_idle()
    parked, cancelled = _fill(engine, 2)
    _until_begun(engine)
    emitted = len(parked.output_token_ids)
    engine.park(parked)
    engine.check_integrity()
    assert parked.on_host_tokens == 3 + emitted - 1
    assert engine.residency.batch.ahead, "the other row's is still under way"
    engine.cancel(cancelled)
    engine.check_integrity()
    assert not engine.residency.batch.ahead
    stopped = _fill(engine, 1, stop=(alone.output_text[4:6],))[0]
    engine.run_until_idle()
    assert parked.output_token_ids == alone.output_token_ids
    assert alone.output_text.startswith(stopped.output_text)
    assert len(stopped.output_token_ids) < len(alone.output_token_ids)
    assert len(parked.output_token_ids) == 12


def test_nobody_is_embedded_beside_a_step_that_is_not_in_the_books(make_one: MakeOne) -> None:
    engine = make_one()
    _fill(engine, 2)
    _until_begun(engine)
    batch = engine.residency.batch
    with pytest.raises(RuntimeError, match="begun ahead"):
        batch.embed(2, batch.extract(0))
    with pytest.raises(RuntimeError, match="begun ahead"):
        batch.step({0: [5]})
    engine.run_until_idle()
    with pytest.raises(RuntimeError, match="no step was begun"):
        batch.take_ahead()
    with pytest.raises(RuntimeError, match="no step was prepared"):
        batch.begin_ahead()
