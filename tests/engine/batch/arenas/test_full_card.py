"""M6, M8 on a card's arena: a neighbour takes all there is at once, and asks on for what it still lacks.

The card is the fake driver's; what torch would take of it (slices on their way to the host) counts, and is
refused where it does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.batch.arenas.card import CardArena
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.governing import Governing
from batond.daemon.engine.proof import rings
from batond.daemon.memory.governor import Governor, OwnUse
from batond.daemon.memory.readings import MemoryReading

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.engine.batch.arenas.arena import ArenaShape

ROWS = 10
CARD_PAGES = 60
TICK_S = 0.02
#: Readings until a slice has left the card.
COPY_READINGS = 5


@dataclass
class Card:
    """A card shared by the engine and a neighbour; the engine is told of it by each reading.

    Attributes:
        driver: Of the arena's part.
        wanted_bytes: What the neighbour wants.
        neighbour_bytes: What it has.
        leaving: Slices on their way to the host: bytes, and at which reading they are there.
    """

    driver: Any
    total_bytes: int
    wanted_bytes: int = 0
    neighbour_bytes: int = 0
    leaving: list[tuple[int, int]] = field(default_factory=list)
    readings: int = 0
    now_s: float = 100.0
    name: str = "a card"

    @property
    def slice_bytes(self) -> int:
        return sum(nbytes for nbytes, until in self.leaving if until > self.readings)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.neighbour_bytes - self.slice_bytes - int(self.driver.used_bytes)

    def want(self, part: float) -> None:
        """Let the neighbour want a part of the card; what is too much it gives back at once."""
        self.wanted_bytes = int(part * self.total_bytes)
        self.neighbour_bytes = min(self.neighbour_bytes, self.wanted_bytes)

    def settle(self) -> None:
        """The neighbour takes what it can get; pages can be had as far as there is room."""
        more = min(self.wanted_bytes - self.neighbour_bytes, self.free_bytes)
        self.neighbour_bytes += more
        self.driver.card_bytes = self.total_bytes - self.neighbour_bytes - self.slice_bytes

    def clock(self) -> float:
        return self.now_s

    def read(self) -> MemoryReading:
        self.now_s += TICK_S
        self.readings += 1
        self.settle()
        return MemoryReading(self.total_bytes, max(self.free_bytes, 0), self.now_s)

    def own_use(self, batch: Any) -> OwnUse:
        use = batch.memory
        written = sum(batch.layout.nbytes(tokens) for tokens in batch.lengths if tokens)
        slack = max(0, use.committed_bytes - written)
        return OwnUse(use.committed_bytes, use.pooled_bytes, self.slice_bytes, 0, slack_bytes=slack)

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def card(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card(driver, CARD_PAGES * driver.granularity)
    made.settle()

    def on_card(shape: ArenaShape, _device: torch.device) -> CardArena:
        return CardArena(shape, driver, background=False)

    monkeypatch.setattr(rings, "choose_arena", lambda *_, **__: (on_card, ""))
    extract = RingBatch.extract

    def extract_if_room(batch: RingBatch, row: int) -> Any:
        nbytes = batch.layout.nbytes(batch.lengths[row])
        made.settle()
        if made.free_bytes < nbytes:
            raise torch.OutOfMemoryError("the card is full")
        made.leaving.append((nbytes, made.readings + COPY_READINGS))
        return extract(batch, row)

    monkeypatch.setattr(RingBatch, "extract", extract_if_room)
    return made


@pytest.mark.usefixtures("card_on_cpu")
def test_a_neighbour_that_takes_all_at_once_gets_what_it_wants(
    llama: Any, make_engine: Callable[..., LocalEngine], card: Card, solo: Any, rng: random.Random
) -> None:
    """Within a second each time; rows return when it leaves, and no query has other tokens than alone."""
    governor = Governing(card, Governor(), threaded=False, own_use=card.own_use, clock=card.clock)
    engine = make_engine(
        llama,
        rows=ROWS,
        batch="ring",
        max_query_tokens=96,
        arena="elastic",
        session_bytes=0,
        governor=governor,
    )
    queries = [
        engine.submit(
            [rng.randrange(3, 150) for _ in range(rng.randrange(8, 40))],
            SamplingParams(max_tokens=rng.randrange(16, 50), ignore_eos=True),
        )
        for _ in range(24)
    ]
    script = {20: 0.45, 45: 0.6, 80: 0.3, 90: 0.0}
    asked_s, slowest_s, rows = 0.0, 0.0, []
    for step in range(3000):
        if not engine.busy:
            break
        if step in script:
            card.want(script[step])
            asked_s = card.now_s
        engine.step()
        if step % 8 == 0:
            engine.check_integrity()
        rows.append(len(engine.residency.occupied))
        if card.neighbour_bytes < card.wanted_bytes or card.free_bytes < 0.08 * card.total_bytes:
            slowest_s = max(slowest_s, card.now_s - asked_s)
    assert not engine.busy
    assert 0 < slowest_s <= 1.0
    assert engine.counters["parks"] > 0
    assert max(rows[60:80]) < max(rows[:20])
    assert max(rows[60:80]) < max(rows[90:])
    for query in queries:
        assert query.output_token_ids == solo(llama, query.prompt_token_ids, query.sampling.max_tokens)
