"""M8, M9: whatever neighbours do and readings say: every query has its tokens, and nothing is left over."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.engine.governing import Governing
from batond.daemon.memory.governor import Governor, OwnUse, Watermarks
from batond.daemon.memory.readings import MemoryReading, ReadingLost
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine.local import LocalEngine

    MakeEngine = Callable[..., LocalEngine]

#: Low, high and critical marks, and the reserve in tokens: some leave nothing at all.
SETTINGS = [
    (Watermarks(), None),
    (Watermarks(0.01, 0.02, 0.03), None),
    (Watermarks(0.98, 0.99, 1.0), 0),
    (Watermarks(), 10_000_000),
]


class Moods:
    """A memory of which every reading may be another one, true or not."""

    name = "a moody memory"

    def __init__(self, seed: int, record_bytes: int) -> None:
        self.dice, self.record_bytes, self.now_s = random.Random(seed), record_bytes, 10.0
        self.own_bytes, self.calm = 0, True

    def clock(self) -> float:
        return self.now_s

    def own_use(self, batch: Any) -> OwnUse:
        """Mostly the truth; now and then what can't be."""
        written = sum(batch.lengths) * self.record_bytes
        self.own_bytes = written
        return self.dice.choice(
            (OwnUse(written), OwnUse(written), OwnUse(written, written, written), OwnUse(-written), OwnUse())
        )

    def read(self) -> MemoryReading:
        self.now_s += self.dice.choice((0.01, 0.05, 0.3, 2.0))
        if self.calm:
            return MemoryReading(self.record_bytes, 0, self.now_s)
        total = self.dice.choice((1, 50, 400, 400, 400, 4000)) * self.record_bytes
        mood = self.dice.randrange(6)
        if mood == 0:
            raise ReadingLost("Unknown Error")
        if mood == 1:
            raise RuntimeError("out of the blue")
        free = self.dice.choice((0, total // 3, max(0, total - self.own_bytes), total, total + 1, -1))
        return MemoryReading(total, free, self.now_s - self.dice.choice((0.0, 0.0, 0.0, 9.0)))

    def close(self) -> None: ...


@pytest.mark.parametrize(("seed", "batch"), [(0, "ring"), (1, "ring"), (3, "ring"), (2, "padded")])
def test_odd_readings_change_no_token(
    llama: Any, make_engine: MakeEngine, solo: Callable[..., list[int]], seed: int, batch: str
) -> None:
    """M9: free above total, totals that change, own use below nothing, old readings, surprises."""
    marks, reserve_tokens = SETTINGS[seed]
    record = make_engine(llama, rows=4, batch=batch, max_query_tokens=64).residency.batch.layout.record_bytes
    if reserve_tokens is not None:
        marks = Watermarks(marks.low, marks.high, marks.critical, reserve_tokens * record)
    moods = Moods(seed, record)
    governor = Governing(moods, Governor(marks), threaded=False, own_use=moods.own_use, clock=moods.clock)
    engine = make_engine(llama, rows=4, batch=batch, max_query_tokens=64, governor=governor)
    moods.calm = False
    dice = random.Random(seed)
    prompts = [[dice.randrange(3, 150) for _ in range(dice.randint(1, 30))] for _ in range(8)]
    queries = []
    for step in range(3000):
        if step % 3 == 0 and len(queries) < len(prompts):
            queries.append(
                engine.submit(prompts[len(queries)], SamplingParams(max_tokens=14, ignore_eos=True))
            )
        if not engine.busy:
            engine.tend()
            if len(queries) == len(prompts):
                break
            continue
        engine.step()
        engine.check_integrity()
        status = engine.memory_status
        assert status is not None
        assert 1 <= status.limits.rows <= 4
    for query, prompt in zip(queries, prompts, strict=True):
        assert query.output_token_ids == solo(llama, prompt, 14)
    assert engine.residency.store.pool.used_bytes == 0
    assert engine.counters["parks_for_kv_limit"] or seed in {1, 3}, "there nobody ever has company"
    engine.close()
