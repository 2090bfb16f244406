"""Memory that runs out on cue, inside a forward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench.faults.allocations import Allocations
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.scheduler.caps import LearnedCap
from batond.daemon.scheduler.culprits import Culprits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.daemon.engine import LocalEngine


@dataclass
class Forwards:
    """Every forward of every model, counted; the chosen ones fail.

    Attributes:
        count: Begun so far.
        fails: Whether a forward fails, by its number and inputs.
        depth: Allocation of a forward at which it fails, by its number.
        failed: Numbers of those that did.
    """

    count: int = 0
    fails: Callable[[int, torch.Tensor], bool] = lambda _number, _ids: False
    depth: Callable[[int], int] = lambda number: 7 * number % 40
    failed: list[int] = field(default_factory=list)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forwards]:
    """Forwards fail half-way, when some layers have written what they compute."""
    forwards = Forwards()
    run = CausalModel.run

    def counted(self: CausalModel, input_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        number = forwards.count
        forwards.count += 1
        if not forwards.fails(number, input_ids):
            return run(self, input_ids, *arguments, **options)
        forwards.failed.append(number)
        with Allocations({forwards.depth(number)}) as mode:
            run(self, input_ids, *arguments, **options)
        # It ended before: what it computed is thrown away all the same.
        raise torch.OutOfMemoryError(f"CUDA out of memory behind {mode.count} allocations")

    monkeypatch.setattr(CausalModel, "run", counted)
    return forwards


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> Callable[[LocalEngine], list[float]]:
    """Let an engine forget what it has learned, and wait without waiting; returns its waits."""

    def prepare(engine: LocalEngine) -> list[float]:
        waits: list[float] = []
        monkeypatch.setattr(engine._relief, "_wait", waits.append)
        monkeypatch.setattr(engine._relief, "_clock", lambda: sum(waits))
        engine._relief.culprits = Culprits()
        engine._relief.rows, engine._relief.chunk = LearnedCap(9 / 8), LearnedCap(5 / 4)
        engine.counters.clear()
        engine._relief._logged_s = -math.inf
        return waits

    return prepare
