"""`engine.arena`: what is asked for, what a ring gets, and what is said where it can't be had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.arenas.choice import elastic_arena, plain_arena
from batond.daemon.engine.batch.ring_size import plan_ring
from batond.daemon.engine.governing import Governing, make_governing
from batond.daemon.engine.proof import rings
from batond.daemon.errors import ConfigError, RequestTooLargeError
from batond.daemon.memory.governor import Governor
from batond.daemon.memory.readings import MemoryReading, ReadingLost
from batond.daemon.wire.settings import MemorySettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.batch.arenas.arena import ArenaShape


def tokens(engine: LocalEngine) -> list[Sequence[int]]:
    """What six queries on two rows say, parked by turns."""
    queries = [
        engine.submit([3 + (3 + n) * place % 110 for place in range(4 + 5 * n)], SAMPLING, seed=n)
        for n in range(6)
    ]
    turn = 0
    while any(query.live for query in queries):
        engine.step()
        turn += 1
        for n, query in enumerate(queries):
            if query.held:
                engine.resume(query)
            elif query.live and turn % 5 == n:
                engine.park(query)
        engine.check_integrity()
    return [query.output_token_ids for query in queries]


SAMPLING = SamplingParams(max_tokens=14, ignore_eos=True)


def options(**more: Any) -> dict[str, Any]:
    return {"rows": 2, "batch": "ring", "max_query_tokens": 64, **more}


def test_an_engine_says_the_same_on_every_arena(llama: Any, make_engine: Callable[..., LocalEngine]) -> None:
    """R2, M5: parks and resumes; when all is said, nothing is held."""
    said = {}
    for arena in ("plain", "elastic", "auto"):
        engine = make_engine(llama, **options(arena=arena))
        said[arena] = tokens(engine)
        use = engine.residency.batch.memory
        assert use.elastic == (arena != "plain")
        assert bool(use.committed_bytes) == (arena == "plain")
    assert said["plain"] == said["elastic"] == said["auto"]


def test_an_engine_on_a_cards_memory_says_the_same(
    llama: Any,
    make_engine: Callable[..., LocalEngine],
    card_on_cpu: list[Any],
    driver: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R2, M5: captured steps, pages that come and go beneath them."""
    expected = tokens(make_engine(llama, **options(arena="plain", device="cpu")))

    def on_fake_card(shape: ArenaShape, _device: torch.device) -> CardArena:
        return CardArena(shape, driver, background=False)

    monkeypatch.setattr(rings, "choose_arena", lambda *_, **__: (on_fake_card, ""))
    engine = make_engine(llama, **options(arena="elastic", session_bytes=0))
    assert card_on_cpu
    assert tokens(engine) == expected
    batch = engine.residency.batch
    assert batch.memory.committed_bytes == 0
    assert batch.trim() > 0
    assert batch.memory.pooled_bytes == 0


def test_what_can_not_be_elastic_is_plain_and_says_why(
    llama: Any, make_engine: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "choose_arena", lambda *_, **__: (plain_arena, "cuda-bindings is missing"))
    engine = make_engine(llama, **options(arena="elastic", max_query_tokens=63))
    assert "; a plain arena: cuda-bindings is missing" in engine.batch_reason
    assert not engine.residency.batch.memory.elastic


def test_an_arena_of_a_card_is_tried_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives other numbers, or fails, is not taken, and the reason of other ways is kept."""

    class Trial:
        longest_query_tokens, deterministic = 20, False

        def __init__(self, error: float | None) -> None:
            self.model = type("Model", (), {"device": torch.device("cuda", 0)})()
            self.reasons, self._error = ["of before"], error

        def error(self, *_: Any) -> float | None:
            if self._error is None:
                self.reasons.append("elastic arena: DriverError: no")
            return self._error

        @property
        def why(self) -> str:
            return "; ".join(self.reasons)

    monkeypatch.setattr(rings, "choose_arena", lambda *_, **__: (elastic_arena, ""))
    proof, way = rings.RingProof(0.0, rings.NO_CARD), rings.Way(lambda _: None, lambda: None)
    good, bad = Trial(1e-6), Trial(None)
    assert rings.prove_arena(good, None, way, proof, "elastic") == (elastic_arena, "")
    assert rings.prove_arena(bad, None, way, proof, "elastic") == (
        plain_arena,
        "elastic arena: DriverError: no",
    )
    assert bad.reasons == ["of before"]


def test_an_unknown_arena_is_refused(llama: Any, make_engine: Callable[..., LocalEngine]) -> None:
    with pytest.raises(ConfigError, match='arena must be "auto", "plain" or "elastic"'):
        make_engine(llama, **options(arena="rubber"))


def test_an_elastic_ring_may_be_larger_than_memory(
    llama: Any, make_bench: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 7: rows of mixed lengths, more of them than would fit at their longest; each alone must fit."""
    bench = make_bench(llama)
    room = 100 * bench.layout.record_bytes
    monkeypatch.setattr("batond.daemon.engine.batch.ring_size.ring_room_bytes", lambda _: room)
    assert plan_ring(bench.model, bench.layout, 50, 100, elastic=True).columns == 100
    with pytest.raises(ConfigError):
        plan_ring(bench.model, bench.layout, 50, 100)
    with pytest.raises(ConfigError):
        plan_ring(bench.model, bench.layout, 50, 101, elastic=True)


def test_only_a_governed_ring_is_larger_than_memory(
    llama: Any, make_engine: Callable[..., LocalEngine], make_bench: Callable[[Any], Any], monkeypatch: Any
) -> None:
    """Issue 7: where nobody bounds the rows, an elastic ring is sized as a plain one."""
    room = 100 * make_bench(llama).layout.record_bytes
    monkeypatch.setattr("batond.daemon.engine.batch.ring_size.ring_room_bytes", lambda _: room)
    asked = options(arena="elastic", max_query_tokens=100)
    with pytest.raises(ConfigError, match="a ring of 2 rows"):
        make_engine(llama, **asked)
    governor = make_governing(MemorySettings(governor="on"), "cpu")
    engine = make_engine(llama, **asked, governor=governor)
    assert engine.max_query_tokens == 100
    engine.close()


def test_a_ring_larger_than_memory_that_nobody_watches_is_bounded_by_its_room(
    llama: Any, make_engine: Callable[..., LocalEngine], make_bench: Callable[[Any], Any], monkeypatch: Any
) -> None:
    """M9: the card's library does not answer: rows share what was free at the start, one query fits alone."""
    record = make_bench(llama).layout.record_bytes
    monkeypatch.setattr("batond.daemon.engine.batch.ring_size.ring_room_bytes", lambda _: 100 * record)
    monkeypatch.setattr("batond.daemon.engine.local.ring_room_bytes", lambda _: 70 * record)

    class Unreadable:
        name = "a card"

        def read(self) -> MemoryReading:
            raise ReadingLost("no driver")

        def close(self) -> None:
            """Nothing is held."""

    governor = Governing(Unreadable(), Governor(), mode="auto", threaded=False)
    asked = options(arena="elastic", max_query_tokens=100, governor=governor)
    engine = make_engine(llama, **asked)
    assert not governor.on
    assert engine.max_query_tokens == 70
    expected = tokens(make_engine(llama, **options(arena="plain", max_query_tokens=64)))
    most = 0
    step = engine.step

    def counted() -> bool:
        nonlocal most
        moved = step()
        most = max(most, sum(engine.residency.batch.lengths))
        return moved

    monkeypatch.setattr(engine, "step", counted)
    assert tokens(engine) == expected
    assert 30 < most <= 70
    with pytest.raises(RequestTooLargeError, match="as many as kv_budget_bytes"):
        engine.submit([3] * 60, SamplingParams(max_tokens=20))
