"""What a park may not change, whenever and however often it comes: on both batches, in fp32."""

from __future__ import annotations

import functools
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import families
from batond.bench.faults.counts import full_or
from batond.bench.schedules import Arrival, Player, Request
from batond.bench.solo import compare
from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.wire.messages import Preempted, QueryState
from batond.offload.copies import matching_pieces
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine.queries.query import Query
    from batond.offload.pool import Reservation

    MakeStand = Callable[[str, str], Any]
    MakeEngine = Callable[..., LocalEngine]
    Solo = Callable[..., list[int]]

make_family = functools.cache(families.make_family)  # No test here changes a model: a probe holds for all.
KINDS_OF_CACHE = ["llama", "mistral", "gemma2", "gpt_oss", "lfm2"]
EVERYTHING = SamplingParams(
    max_tokens=9,
    temperature=0.9,
    top_k=40,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={7: 1.5},
    min_tokens=3,
    stop_token_ids=(11, 12, 13),
    stop=("~~",),
    logprobs=2,
    prompt_logprobs=1,
)
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


def prompt(length: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place + place * place) % 120 for place in range(length)]


@pytest.mark.parametrize("length", full_or((1, 8, 9), (1, 7, 8, 9, 12)))
@pytest.mark.parametrize("family", KINDS_OF_CACHE)
def test_a_park_at_every_index(make_stand: MakeStand, family: str, batch_kind: str, length: int) -> None:
    """R1, Q8: also between chunks, at the last one and at the first token; prompts around the window of 8."""
    stand = make_stand(family, batch_kind)
    request = Request(tuple(prompt(length)), EVERYTHING, seed=5)
    steps, parked_in = 0, set()
    while True:
        player = Player(stand.engine)
        query = player.submit(Arrival(request))
        for _ in range(steps):
            player.step()
        if not query.live:
            break
        parked_in.add(query.state)
        stand.engine.park(query)
        player.step()
        player.drain()
        assert query.parks == 1
        assert compare(player, 0, request, stand.solo).faults == []
        steps += 1
    assert {QueryState.WAITING, QueryState.RUNNING} <= parked_in
    assert steps >= query.sampling.min_tokens


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2"])
def test_a_park_after_every_step(make_stand: MakeStand, family: str, batch_kind: str) -> None:
    """R3: never the same row twice; penalties, stops, log-probabilities and noise as alone."""
    stand = make_stand(family, batch_kind)
    player = Player(stand.engine)
    requests = [Request(tuple(prompt(4 + n)), EVERYTHING, seed=n) for n in range(2)]
    queries = [player.submit(Arrival(request)) for request in requests]
    rows: dict[str, list[int]] = {query.query_id: [] for query in queries}
    while any(query.live for query in queries):
        player.step()
        for query in queries:
            if query.row is not None:
                rows[query.query_id].append(query.row)
                stand.engine.park(query)
                stand.engine.resume(query)
    for used in rows.values():
        assert len(used) > 2
        assert all(left != right for left, right in itertools.pairwise(used))
    for place, request in enumerate(requests):
        assert compare(player, place, request, stand.solo).faults == []


@pytest.mark.parametrize("family", ["gemma2", "falcon_h1"])
def test_32_queries_under_random_parks(
    make_engine: MakeEngine, solo: Solo, family: str, batch_kind: str
) -> None:
    """R2: every one gives transformers' own greedy tokens."""
    rng = random.Random(4)
    model = make_family(family)
    engine = make_engine(model, rows=8, batch=batch_kind, chunk_tokens=6, max_query_tokens=48)
    shapes = [(rng.randrange(1, 30), rng.randrange(1, 14), rng.randrange(2, 40)) for _ in range(32)]
    queries = [
        engine.submit(prompt(length, stride), SamplingParams(max_tokens=count, ignore_eos=True))
        for length, count, stride in shapes
    ]
    while engine.queries:
        engine.step()
        engine.check_integrity()
        for query in queries:
            if query.live and not query.held and rng.random() < 0.15:
                engine.park(query)
            elif query.live and query.held and rng.random() < 0.4:
                engine.resume(query)
    assert engine.counters["parks"] > 32
    assert engine.counters["recomputed_tokens"] == 0
    for query, (length, count, stride) in zip(queries, shapes, strict=True):
        assert query.output_token_ids == solo(model, prompt(length, stride), count)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_everybody_reads_only_his_own_pattern(make_engine: MakeEngine, family: str, batch_kind: str) -> None:
    """R4: every query's KV is one byte repeated; 300 parks and resumes in random order."""
    rng = random.Random(8)
    engine = make_engine(
        make_family(family), rows=4, batch=batch_kind, max_query_tokens=40, ready_limit=9, chunk_tokens=None
    )
    queries = [engine.submit(prompt(rng.randrange(1, 30)), GREEDY) for _ in range(12)]
    engine.step()
    life, batch = engine._life, engine.residency.batch
    patterns = {}
    for number, query in enumerate(queries, start=1):
        engine.park(query)
        computed = query.on_host_tokens
        assert computed
        engine.residency.store.forget(query.query_id)
        query.on_host_tokens = 0
        patterns[query.query_id] = query.kv = KVSlice(
            torch.full((computed, batch.layout.record_bytes), number, dtype=torch.uint8),
            torch.full((batch.layout.state_bytes,), number, dtype=torch.uint8),
        )
        engine.resume(query)
    for _ in range(300):
        query = rng.choice(queries)
        if query.row is not None:
            engine.park(query)
            engine.resume(query)
        elif None in engine.residency.by_row:
            life.place(query)
        for row, owner in engine.residency.occupied:
            found = batch.extract(row)
            assert torch.equal(found.tokens, patterns[owner.query_id].tokens)
            assert torch.equal(found.state, patterns[owner.query_id].state)
        engine.check_integrity()
    assert engine.counters["resumes"] > 50
    for query in queries:
        engine.cancel(query)


class LateTransfer:
    """A copy that happens when somebody waits for it, not before."""

    def __init__(self, pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pieces = pieces

    def done(self) -> bool:
        return not self._pieces

    def wait(self) -> None:
        for target, source in self._pieces:
            target.copy_(source)
        self._pieces = []


class LateCopier:
    """Starts copies that are as late as they can be."""

    def store(self, kv: KVSlice, reservation: Reservation) -> LateTransfer:
        return LateTransfer([(host, device) for device, host in matching_pieces(kv, reservation)])

    def load(self, reservation: Reservation, kv: KVSlice) -> LateTransfer:
        return LateTransfer(list(matching_pieces(kv, reservation)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2"])
def test_late_copies_and_poisoned_memory_change_nothing(
    make_engine: MakeEngine, solo: Solo, monkeypatch: pytest.MonkeyPatch, family: str, batch_kind: str
) -> None:
    """R5: a row's bytes turn to NaN as soon as it is free, host bytes as soon as they are given back."""
    monkeypatch.setattr("batond.daemon.engine.queries.tiers.copier_for", lambda _: LateCopier())
    model = make_family(family)
    engine = make_engine(model, rows=3, batch=batch_kind, chunk_tokens=4, max_query_tokens=40)
    batch, rng = engine.residency.batch, random.Random(2)
    free = batch.free

    def poisoning_free(row: int) -> None:
        length = batch.lengths[row]
        free(row)
        batch.embed(
            row,
            KVSlice(
                torch.full((length, batch.layout.record_bytes), 0xFF, dtype=torch.uint8),
                torch.full((batch.layout.state_bytes,), 0xFF, dtype=torch.uint8),
            ),
        )
        free(row)

    monkeypatch.setattr(batch, "free", poisoning_free)
    shapes = [(3, 12), (21, 9), (8, 10), (14, 12), (1, 12), (9, 5)]
    queries = [
        engine.submit(prompt(length, 3 + n), SamplingParams(max_tokens=count, ignore_eos=True))
        for n, (length, count) in enumerate(shapes)
    ]
    while engine.queries:
        engine.step()
        for query in queries:
            if query.live and not query.held and rng.random() < 0.3:
                engine.park(query)
            elif query.live and query.held and rng.random() < 0.7:
                engine.resume(query)
    assert engine.counters["parks"] > 6
    for n, (query, (length, count)) in enumerate(zip(queries, shapes, strict=True)):
        assert query.output_token_ids == solo(model, prompt(length, 3 + n), count)


def _flip_body(engine: LocalEngine, query: Query, place: float) -> None:
    views = engine.residency.store._entries[query.query_id].reservation.views()
    at = int(place * (sum(view.numel() for view in views) - 1))
    for view in views:
        if at < view.numel():
            view[at] ^= 16
            return
        at -= view.numel()


def _flip_header(engine: LocalEngine, query: Query, place: float) -> None:
    entry = engine.residency.store._entries[query.query_id]
    entry.sealed[int(place * (len(entry.sealed) - 1))] ^= 16


@pytest.mark.parametrize("flip", [_flip_body, _flip_header], ids=["body", "header"])
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_flipped_bits_cost_one_recomputation(
    make_stand: MakeStand, family: str, batch_kind: str, flip: Callable[..., None]
) -> None:
    """R6: first, middle and last byte; that query alone is computed again, and the metric counts it."""
    stand = make_stand(family, batch_kind)
    engine = stand.engine
    requests = [Request(tuple(prompt(length)), EVERYTHING, seed=length) for length in (13, 9)]
    for place in (0.0, 0.2, 0.5, 0.8, 1.0):
        before = engine.snapshot().counters["corrupt_slices"]
        player = Player(engine)
        query, mate = (player.submit(Arrival(request)) for request in requests)
        for _ in range(4):
            player.step()
        for one in (query, mate):
            engine.park(one)
        flip(engine, query, place)
        player.drain()
        assert engine.snapshot().counters["corrupt_slices"] == before + 1
        assert query.recomputed_tokens > 0
        assert mate.recomputed_tokens == 0
        for number, request in enumerate(requests):
            assert compare(player, number, request, stand.solo).faults == []


def test_what_can_not_be_carried_is_computed_again(make_engine: MakeEngine, solo: Solo) -> None:
    """R8: announced at start; an urgent query takes the only row, and the tokens stay the same."""
    model = make_family("rwkv")
    engine = make_engine(model, one_at_a_time=True, max_query_tokens=60)
    assert engine.preemption_mode == "recompute"
    assert engine.batch_reason
    low = engine.submit(prompt(9), SamplingParams(max_tokens=24, ignore_eos=True), sla_class="batch")
    for _ in range(20):
        engine.step()
    urgent = engine.submit(prompt(6, 5), GREEDY, sla_class="interactive")
    forced = 0
    while engine.queries:
        engine.step()
        if low.row is not None and not urgent.live and forced < 2:
            forced += 1
            engine.park(low)
            engine.resume(low)
    assert (low.parks, low.planner_parks) == (3, 1)
    assert engine.residency.store.pool.used_bytes == 0
    assert low.output_token_ids == solo(model, prompt(9), 24)
    assert urgent.output_token_ids == solo(model, prompt(6, 5), 10)


@pytest.mark.parametrize("family", ["llama", "mistral", "lfm2", "falcon_h1"])
def test_a_hundred_parks_recompute_nothing(
    make_engine: MakeEngine, solo: Solo, family: str, batch_kind: str
) -> None:
    """R9: each prompt token is computed once; the metric says so."""
    model = make_family(family)
    engine = make_engine(model, rows=2, batch=batch_kind, chunk_tokens=5, max_query_tokens=124)
    query = engine.submit(prompt(13), SamplingParams(max_tokens=110, ignore_eos=True))
    while query.live:
        engine.step()
        if query.live and query.parks < 100:
            engine.park(query)
            engine.resume(query)
    assert query.parks == 100
    counters = engine.snapshot().counters
    assert (counters["parks"], counters.get("recomputed_tokens", 0)) == (100, 0)
    assert counters["prefill_tokens"] == 13
    assert query.usage().recomputed_tokens == 0
    assert query.output_token_ids == solo(model, prompt(13), 110)


def test_a_query_without_any_kv_is_parked_for_nothing(
    make_engine: MakeEngine, solo: Solo, batch_kind: str
) -> None:
    """R10: no byte is reserved or copied, and it runs from its start later."""
    model = make_family("llama")
    engine = make_engine(model, rows=1, batch=batch_kind, max_query_tokens=40, host_pool_bytes=0)
    events: list[Any] = []
    engine.on_event = events.append
    query = engine.submit(prompt(9), GREEDY)
    engine.park(query)
    engine.step()
    parked = [event for event in events if isinstance(event, Preempted)]
    assert [(event.kept, event.parked_bytes) for event in parked] == [(True, 0)]
    assert engine.residency.store.owners == ()
    assert engine.counters["prefill_tokens"] == 0
    engine.resume(query)
    engine.run_until_idle()
    assert query.output_token_ids == solo(model, prompt(9), 10)
    assert query.recomputed_tokens == 0
