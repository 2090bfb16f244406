"""Any order of submit, step, park, resume and cancel, on four kinds of cache and both batches, in fp32."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from batond.bench.draws import CLASSES, TENANTS
from batond.bench.faults.counts import full_or
from batond.bench.schedules import Arrival, Move, Player, Request
from batond.bench.solo import compare
from batond.daemon.engine import SamplingParams
from batond.daemon.wire.messages import QueryState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.queries.query import Query
    from batond.offload.slice import KVSlice

    MakeStand = Callable[[str, str], Any]

# Full attention; a window; windows and full attention with soft caps; convolution beside attention.
FAMILIES = ["llama", "mistral", "gemma2", "lfm2"]
REQUESTS = 24

FEW = settings(
    max_examples=6,
    stateful_step_count=32,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # To make a failure smaller takes longer than the time limit.
)
# New ones in every run; `python -m batond.bench soak` is for thousands.
MANY = settings(
    FEW, max_examples=full_or(6, 60), stateful_step_count=60, derandomize=False, phases=list(Phase)
)

few_and_many = pytest.mark.parametrize(
    "size",
    [
        pytest.param(FEW, id="few"),
        pytest.param(MANY, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)


class AnyOrder(RuleBasedStateMachine):
    """Moves in any order; at the end everybody has what they get alone."""

    def __init__(self, on: Any) -> None:
        super().__init__()
        self.on, self.player = on, Player(on.engine)
        self.requests: list[Request] = []

    @rule(
        number=st.integers(0, REQUESTS - 1),
        sla_class=st.sampled_from(CLASSES),
        tenant=st.sampled_from(TENANTS),
        emitted=st.sampled_from([0, 0, 0, 0, 2]),
    )
    def submit(self, number: int, sla_class: str, tenant: str, emitted: int) -> None:
        request = self.on.draws.catalogued(number)
        given = self.on.solo.outcome(request).token_ids[:emitted]
        self.player.submit(Arrival(request, sla_class, tenant), given)
        self.requests.append(request)

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.player.step()

    @rule(number=st.integers(0, 7))
    def park(self, number: int) -> None:
        self.player.apply(Move.PARK, number)

    @rule(number=st.integers(0, 7))
    def resume(self, number: int) -> None:
        self.player.apply(Move.RESUME, number)

    @rule(number=st.integers(0, 7), seldom=st.integers(0, 3))
    def cancel(self, number: int, seldom: int) -> None:
        if not seldom:
            self.player.apply(Move.CANCEL, number)

    def teardown(self) -> None:
        self.player.drain()
        for place, request in enumerate(self.requests):
            assert compare(self.player, place, request, self.on.solo).faults == []


@few_and_many
@pytest.mark.parametrize("family", FAMILIES)
def test_any_order_of_moves_equals_solo(
    make_stand: MakeStand, family: str, batch_kind: str, size: settings
) -> None:
    """R1, R2, R3, R7, R10, Q3, Q4: tokens, text, log-probabilities, finish reasons, counts, streams."""
    run_state_machine_as_test(lambda: AnyOrder(make_stand(family, batch_kind)), settings=size)


def _copy_of(query: Query, engine: LocalEngine) -> KVSlice:
    """What the query has computed, wherever on the device it is."""
    if query.row is not None:
        return engine.residency.batch.extract(query.row)
    if query.kv is not None:
        return query.kv
    return engine.residency.prefill_of(query).slice()


@few_and_many
@pytest.mark.parametrize("family", FAMILIES)
def test_a_park_brings_back_every_byte(
    make_stand: MakeStand, family: str, batch_kind: str, size: settings
) -> None:
    """R4: extract, park, load, embed, extract: equal bytes, at every stage of a query, in another row."""

    @size
    @given(
        length=st.integers(1, 30),
        before=st.integers(1, 14),
        between=st.integers(0, 40),
        mates=st.integers(0, 2),
        noise=st.integers(0, 99),
    )
    def check(length: int, before: int, between: int, mates: int, noise: int) -> None:
        engine = make_stand(family, batch_kind).engine
        engine.on_event = None
        rng = random.Random(noise)
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        query = engine.submit([rng.randrange(3, 120) for _ in range(length)], sampling)
        for _ in range(before):
            engine.step()
        if query.live:
            _round_trip(engine, query, mates, between, rng)
        engine.run_until_idle()
        assert len(query.output_token_ids) == 12
        engine.check_integrity()

    check()


def _round_trip(engine: LocalEngine, query: Query, mates: int, between: int, rng: random.Random) -> None:
    old, old_row = _copy_of(query, engine), query.row
    engine.park(query)
    for _ in range(mates):
        length = rng.randrange(1, 30)
        engine.submit([rng.randrange(3, 120) for _ in range(length)], SamplingParams(max_tokens=8))
    for _ in range(between):
        engine.step()
    engine.resume(query)
    if not query.to_prefill_tokens:
        engine._life.place(query)
        assert query.state is QueryState.RUNNING
        assert query.row != old_row
    new = _copy_of(query, engine)
    assert torch.equal(new.tokens, old.tokens)
    assert torch.equal(new.state, old.state)
    assert query.recomputed_tokens == 0
