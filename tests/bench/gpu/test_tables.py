"""What the tables say of made-up figures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from batond.bench.gpu import tables
from batond.bench.gpu.decode import Attention, DecodeStep
from batond.bench.gpu.machine import CardState
from batond.bench.gpu.parking import OneWay, Parking
from batond.bench.gpu.prompts import PromptTime
from batond.bench.gpu.timing import Spread
from batond.bench.gpu.urgent import Answers, Urgent
from batond.bench.gpu.witness import Seen

if TYPE_CHECKING:
    from rich.table import Table

SEEN = Seen(kernels=900, launches=2, graphs=1, busy_ms=11.5, attention=("attend_kernel",), attention_ms=4.25)


def some(*values: float) -> Spread:
    return Spread.of(values)


def printed(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return [" ".join(line.replace("│", " ").split()) for line in out.getvalue().splitlines()]


def test_a_step_stands_beside_its_floor() -> None:
    step = DecodeStep(rows=32, context=511.5, step_ms=some(12.0), floor_ms=9.0, ready_s=1.25, seen=SEEN)
    unseen = DecodeStep(rows=1, context=8, step_ms=some(2.0, 4.0), floor_ms=1.5, ready_s=0.0, seen=None)
    lines = printed(tables.steps_table([step, unseen]))
    assert "32 x 512 9.00 12.00 (12.00-12.00) 0.75 11.50 4.25 1.2" in lines
    assert "1 x 8 1.50 3.00 (2.20-3.80) 0.50 0.0" in lines


def test_attention_stands_beside_the_copy_bandwidth() -> None:
    one = Attention(rows=8, context=1024, time_ms=some(1.25), kv_bytes=4 * 10**9, gb_s=3200.0, of_copy=0.8)
    assert "8 x 1024 4,000 1.250 (1.250-1.250) 3,200 0.80" in printed(tables.attention_table([one]))


def test_a_prompt_is_held_against_its_higher_floor() -> None:
    short = PromptTime(
        tokens=64,
        time_ms=some(4.0),
        slice_ms=some(0.5),
        compute_floor_ms=1.0,
        weights_floor_ms=3.0,
        seen=None,
    )
    long = PromptTime(
        tokens=2048,
        time_ms=some(40.0),
        slice_ms=some(0.5),
        compute_floor_ms=30.0,
        weights_floor_ms=3.0,
        seen=SEEN,
    )
    assert (short.of_floor, long.of_floor) == (0.75, 0.75)
    assert "2048 30.00 3.00 40.00 (40.00-40.00) 0.75 11.50 0.50 (0.50-0.50)" in printed(
        tables.prompts_table([short, long])
    )


def test_parks_say_what_the_step_loses() -> None:
    way = OneWay(time_ms=some(10.0), gb_s=53.7, of_copy=0.97, finish_ms=some(1.0))
    parking = Parking(
        tokens=1024,
        nbytes=537 * 10**6,
        out=way,
        back=way,
        extract_ms=some(0.3),
        embed_ms=some(0.3),
        rows=32,
        step_ms=some(10.0),
        beside_ms=some(10.1),
    )
    assert parking.slowdown == pytest.approx(0.01)
    lines = printed(tables.parking_table(parking))
    assert lines[0] == "Parking 1024 tokens, 537 MB"
    assert "device to host, of a page-locked copy 0.97" in lines
    assert "longer by +1.0%" in lines


def test_the_bound_of_an_urgent_query_takes_the_worst_of_a_full_engine() -> None:
    urgent = Urgent(
        rows=32,
        prompt_tokens=512,
        row_tokens=1100,
        engine_step_ms=some(10.0),
        idle=Answers(first_ms=some(20.0, 20.0, 90.0), second_ms=some(20.0), same_step=1, parks=0),
        full=Answers(first_ms=some(30.0, 30.0, 54.0), second_ms=some(40.0), same_step=0, parks=3),
        park_ms=some(0.2),
        resume_ms=some(0.1),
        parked_tokens=1050,
    )
    assert urgent.of_bound == pytest.approx(54.0 / (10.0 + 1.3 * 20.0))
    lines = printed(tables.urgent_table(urgent))
    assert "rows taken for them 3 in 3 urgent queries" in lines
    assert "first token, full engine, ms 30.00 (30.00-49.20), worst 54.00" in lines
    assert "second token, full engine, ms 40.00 (40.00-40.00), 0 of 1 with the first" in lines
    assert "worst first token / (step + 1.3 x idle) 1.50" in lines


def test_the_path_is_what_was_seen_last() -> None:
    assert tables.path_text([None, SEEN]) == SEEN.text()
    assert tables.path_text([None]) == "not watched"


def test_the_cards_state_in_a_line() -> None:
    state = CardState(sm_mhz="1980 of 1980", power_w="163 of 700", state="P0")
    assert tables.state_text(state).startswith("SM 1980 of 1980 MHz, memory unknown MHz, 163 of 700 W, P0")
