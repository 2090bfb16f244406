"""`bench neighbour`: M8, M9 by script here, and with a real neighbour on a card by hand."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import torch
from typer.testing import CliRunner

from batond.bench import neighbour, neighbour_child, neighbour_show, neighbour_stand
from batond.bench.__main__ import app
from batond.bench.neighbour import Course, Moment
from batond.bench.neighbours import CardNeighbour
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GIB = 1 << 30
CALM = Moment(
    at_s=0.0,
    wanted_bytes=0,
    neighbour_bytes=0,
    used_bytes=50 * GIB,
    total_bytes=100 * GIB,
    kv_bytes=40 * GIB,
    rows=4,
    row_limit=4,
    parked=0,
    live=9,
    tokens=0,
    state="steady",
)


@pytest.fixture(scope="module")
def courses() -> tuple[Course, Course]:
    """A real engine on the CPU, beside a script."""
    torch.set_num_threads(1)
    told: list[str] = []
    alone, beside, _ = neighbour.measure(neighbour_stand.make_stand("cpu", queries=24, seed=0), told.append)
    assert [line.split(":")[0] for line in told[1:]] == ["undisturbed", "beside the neighbour"]
    return alone, beside


def test_queries_beside_a_neighbour_end_as_they_would_alone(courses: tuple[Course, Course]) -> None:
    """M8: it takes up to 60 % of the memory and leaves; rows shrink and return, all tokens are the same."""
    alone, beside = courses
    assert beside.outputs == alone.outputs
    assert sum(map(len, beside.outputs)) == beside.moments[-1].tokens > 700
    found = {check.what: check for check in neighbour_show.checks(alone, beside)}
    assert all(check.holds for check in found.values()), found
    assert [round(take.part, 2) for take in neighbour.takes(beside)] == [0.3, 0.45, 0.6]
    assert beside.parks > 0
    assert min(one.rows for one in beside.moments if one.live >= beside.rows) < beside.rows
    assert {one.neighbour_bytes for one in alone.moments} == {0}
    assert beside.moments[-1].wanted_bytes == 0


def made_up(*moments: Moment, outputs: int = 3) -> Course:
    return Course(outputs=[[5, 6]] * outputs, moments=list(moments), total_bytes=100 * GIB, rows=4)


def steady(since_s: float, tokens: int, rate: float, seconds: float = 4.0) -> list[Moment]:
    """A full batch, ten steps a second."""
    count = int(10 * seconds)
    return [
        CALM._replace(at_s=since_s + place / 10, tokens=tokens + int(place * rate / 10))
        for place in range(count)
    ]


def beside_course(relief_s: float, rate: float) -> Course:
    """The neighbour wants 60 GiB after 4 s, has them `relief_s` later, and leaves after 8 s."""
    before, after = steady(0.0, 0, 100.0), steady(8.0, 800, rate)
    during = []
    for place in range(40):
        over = place / 10 < relief_s
        during.append(
            CALM._replace(
                at_s=4.0 + place / 10,
                wanted_bytes=60 * GIB,
                neighbour_bytes=(55 if over else 60) * GIB,
                used_bytes=(99 if over else 90) * GIB,
                kv_bytes=(38 if over else 25) * GIB,
                rows=2,
                tokens=400 + 5 * place,
            )
        )
    return made_up(*before, *during, *after)


def failing(alone: Course, beside: Course) -> list[str]:
    return [check.what for check in neighbour_show.checks(alone, beside) if not check.holds]


def test_each_check_can_fail() -> None:
    alone = made_up(*steady(0.0, 0, 100.0))
    good = beside_course(0.6, 99.0)
    assert failing(alone, good) == []
    (take,) = neighbour.takes(good)
    assert take.pressed
    assert take.relieved_s == pytest.approx(0.7)
    assert neighbour.left_at_s(good) == 8.0
    assert failing(alone, beside_course(1.2, 100.0)) == ["it has it, and the batch has shrunk, within 1 s"]
    assert failing(alone, beside_course(9.0, 100.0)) == ["it has it, and the batch has shrunk, within 1 s"]
    assert failing(alone, beside_course(0.6, 90.0)) == ["throughput is back within 5% after it left"]
    assert failing(alone, replace(good, failed=["q1: no"])) == ["no query failed"]
    lost = replace(good, outputs=[[5, 6], [5], [5, 6]])
    assert failing(alone, lost) == ["no token lost or changed"]
    never = failing(alone, alone)
    assert "the neighbour wanted more than was free" in never
    assert "throughput is back within 5% after it left" in never


def test_one_calm_reading_of_before_counts_for_nothing() -> None:
    """A reading is up to 50 ms old: that the memory is used up is seen a little later."""
    course = beside_course(0.6, 100.0)
    late = course.moments[41]
    course.moments[41] = late._replace(neighbour_bytes=60 * GIB, used_bytes=50 * GIB)
    (take,) = neighbour.takes(course)
    assert take.relieved_s == pytest.approx(0.7)


def test_any_few_queries_in_a_row_are_as_long_as_all() -> None:
    requests = neighbour_stand.make_requests(100, 64, (100, 499), (10, 89), seed=3)
    outputs = [request.output_tokens for request in requests]
    assert min(outputs) < 20
    assert max(outputs) > 80
    for first in range(0, 64, 8):
        assert sum(outputs[first : first + 8]) / 8 == pytest.approx(50, abs=6)


def test_the_command_prints_draws_and_judges(
    courses: tuple[Course, Course], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(neighbour_stand, "make_stand", lambda *_: None)
    monkeypatch.setattr(neighbour, "measure", lambda *_: (*courses, 1.0))
    drawn, output = tmp_path / "neighbour.svg", tmp_path / "moments.json"
    arguments = ["neighbour", "--device", "cpu", "--plot", str(drawn), "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "no token lost or changed" in result.output
    assert drawn.read_bytes().startswith(b"<?xml")
    assert len(json.loads(output.read_text())["beside"]) == len(courses[1].moments)
    lost = replace(courses[1], outputs=[[]] * len(courses[1].outputs))
    monkeypatch.setattr(neighbour, "measure", lambda *_: (courses[0], lost, 1.0))
    assert CliRunner().invoke(app, arguments).exit_code == 1


# -- the process on a card ----------------------------------------------------------------------------


class Orders:
    """Input and output of the process: the next order comes when the last one is carried out."""

    def __init__(self, orders: list[int]) -> None:
        self.said: list[int] = []
        self._orders, self._carried_out = orders, threading.Semaphore(0)

    def __iter__(self) -> Iterator[str]:
        for nbytes in self._orders:
            self._wanted = nbytes
            yield f"{nbytes}\n"
            assert self._carried_out.acquire(timeout=30)

    def write(self, line: str) -> None:
        self.said.append(int(line))
        if len(self.said) > 1 and self.said[-1] == self._wanted:
            self._carried_out.release()

    def flush(self) -> None:
        """All is said at once."""


def test_the_process_holds_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, and more or less; while there is no room it asks again."""
    orders, empty, refusals = Orders([1000, 300, 500, 0]), torch.empty, [False, True, True]

    def full_for_a_while(*given: int, **options: Any) -> torch.Tensor:
        if refusals and refusals.pop(0):
            raise torch.OutOfMemoryError("full")
        return empty(*given, **options)

    monkeypatch.setattr(neighbour_child, "PIECE_BYTES", 400)
    monkeypatch.setattr(neighbour_child, "RETRY_S", 0.0)
    monkeypatch.setattr(torch, "empty", full_for_a_while)
    monkeypatch.setattr(sys, "stdin", orders)
    monkeypatch.setattr(sys, "stdout", orders)
    neighbour_child.main("cpu")
    assert refusals == []
    assert orders.said == [0, 400, 800, 1000, 0, 300, 500, 0]


def test_a_process_is_told_and_heard() -> None:
    echo = "import sys; print(0, flush=True)\nfor line in sys.stdin: print(line, end='', flush=True)"
    told = CardNeighbour(torch.device("cpu"), [sys.executable, "-S", "-c", echo])
    told.wait_ready()  # It says that it holds nothing.
    for nbytes in (500, 700):
        told.want(nbytes)
    assert told.wanted_bytes == 700
    told.close()
    assert told.held_bytes == 700


def test_a_process_that_does_not_come_up_is_not_waited_for() -> None:
    told = CardNeighbour(torch.device("cpu"), [sys.executable, "-S", "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="did not come up"):
        told.wait_ready()
    told.close()


@pytest.mark.parametrize("elastic", [False, True])
def test_a_stand_that_can_not_be_made_leaves_neither_engine_nor_process(
    monkeypatch: pytest.MonkeyPatch, *, elastic: bool
) -> None:
    """The batch does not follow memory, or the neighbour does not come up."""
    beside, engine = MagicMock(), MagicMock()
    engine.residency.batch.memory.elastic = elastic
    beside.wait_ready.side_effect = RuntimeError("it never came")
    for name, made in (("make_governing", None), ("CardNeighbour", beside), ("LocalEngine", engine)):
        monkeypatch.setattr(neighbour_stand, name, lambda *_, made=made, **__: made)
    for name in ("AutoModelForCausalLM", "CausalModel"):
        monkeypatch.setattr(neighbour_stand, name, MagicMock())
    properties = SimpleNamespace(total_memory=GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with pytest.raises(RuntimeError if elastic else ConfigError):
        neighbour_stand.on_card(torch.device("cpu"), 8, 0)
    engine.close.assert_called_once_with()
    beside.close.assert_called_once_with()
