"""Memory that runs out in a step is survived: all but the culprit get the tokens they get undisturbed."""

from __future__ import annotations

import logging
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench.faults.allocations import Allocations
from batond.bench.faults.counts import full_or
from batond.bench.schedules import Arrival, Player, Request
from batond.bench.solo import compare
from batond.daemon.engine import SamplingParams
from batond.daemon.engine.batch.prefill import Prefill
from batond.daemon.engine.model.shortage import is_shortage
from batond.daemon.engine.step.faults import breaks_device
from batond.daemon.wire.messages import QueryFailed, QueryState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.wire.messages import QueryEvent

    MakeStand = Callable[[str, str], Any]
    Calm = Callable[[LocalEngine], list[float]]

KINDS_OF_CACHE = ["llama", "gemma2", "lfm2"]  # Full attention; windows; a state, which can't be rolled back.
SAMPLED = SamplingParams(
    max_tokens=4, temperature=0.9, repetition_penalty=1.3, logprobs=1, prompt_logprobs=1, ignore_eos=True
)
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
#: More prompts than rows; the last one is urgent and takes somebody's row.
WORKLOAD = (
    Arrival(Request((5, 9, 11, 40, 41, 42, 43), SAMPLED, seed=3), "batch"),
    Arrival(Request((8, 14, 21), GREEDY, seed=4), "batch"),
    Arrival(Request((9, 3, 77, 70), GREEDY, seed=5), "standard"),
    Arrival(Request((30, 31, 32), SAMPLED, seed=6), "interactive"),
)


@pytest.mark.parametrize(
    ("error", "shortage"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory:"
                " you tried to allocate 8796093022208 bytes. Error code 12 (Cannot allocate memory)"
            ),
            True,
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory"),
            True,
        ),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("not enough memory of the past"), False),
    ],
)
def test_what_is_a_shortage(error: Exception, shortage: bool) -> None:  # noqa: FBT001 - a parameter
    assert is_shortage(error) is shortage
    assert not (shortage and breaks_device(error))


def test_what_torch_raises_on_this_machine_is_a_shortage() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_shortage(raised.value)


def run_workload(
    engine: LocalEngine,
    arrivals: tuple[Arrival, ...] = WORKLOAD,
    note: Callable[[QueryEvent], None] | None = None,
) -> Player:
    """All but the urgent one at once, which comes when rows are taken; books are checked after each step."""
    player = Player(engine)
    take = engine.on_event
    if note is not None:
        engine.on_event = lambda event: (note(event), take(event))
    for arrival in arrivals[:-1]:
        player.submit(arrival)
    for _ in range(3):
        player.step()
    player.submit(arrivals[-1])
    player.drain()
    return player


def faults(
    player: Player, stand: Any, arrivals: tuple[Arrival, ...] = WORKLOAD, *, but: int = -1
) -> list[str]:
    return [
        f"{place}: {fault}"
        for place, arrival in enumerate(arrivals)
        if place != but
        for fault in compare(player, place, arrival.request, stand.solo).faults
    ]


@pytest.fixture
def stand(make_stand: MakeStand, family: str, batch_kind: str, calm: Calm) -> Any:
    stand = make_stand(family, batch_kind)
    for arrival in WORKLOAD:
        stand.solo.outcome(arrival.request)
    calm(stand.engine)
    return stand


@pytest.mark.parametrize("family", KINDS_OF_CACHE)
@pytest.mark.parametrize("times", full_or((1, 2, 4), (1, 2, 3, 4, 9)))
def test_memory_runs_out_in_the_nth_forward(
    stand: Any, forwards: Any, calm: Calm, family: str, times: int
) -> None:
    """M6: once, and several times in a row until rows are parked, at every forward of a workload."""
    run_workload(stand.engine)
    total, n = forwards.count, 0
    while n < total:
        calm(stand.engine)
        forwards.count, forwards.failed = 0, []
        forwards.fails = lambda number, _, n=n: n <= number < n + times
        player = run_workload(stand.engine)
        assert n in forwards.failed
        assert stand.engine.counters["out_of_memory"] >= 1
        failed = [place for place, query in enumerate(player.queries) if query.state is QueryState.FAILED]
        if times <= 2:  # A third time is the last when nobody else is there.
            assert failed == [], f"forward {n}"
        assert len(failed) <= 3
        for place in failed:
            assert player.queries[place].error[0] == "RESOURCE_EXHAUSTED"
        found = [fault for fault in faults(player, stand) if int(fault[0]) not in failed]
        assert found == [], f"forward {n}"
        n += 1 if times == 1 and family != "gemma2" else full_or(5, 1)
    forwards.fails = lambda *_: False
    assert faults(run_workload(stand.engine), stand) == []


@pytest.mark.parametrize("family", KINDS_OF_CACHE)
def test_a_prompt_for_which_there_is_never_memory_fails_alone(stand: Any, forwards: Any, calm: Calm) -> None:
    """M6: after a retry, with a reason that says what to do; its mates, and later jobs, are undisturbed."""
    waits = calm(stand.engine)
    events: list[Any] = []
    culprit = Arrival(Request((*range(20, 30), 99), GREEDY, seed=7), "interactive")
    arrivals = (*WORKLOAD[:3], culprit)
    forwards.fails = lambda _, ids: 99 in ids
    player = run_workload(stand.engine, arrivals, events.append)
    query = player.queries[3]
    assert query.state is QueryState.FAILED
    [failed] = [event for event in events if isinstance(event, QueryFailed)]
    assert (failed.query_id, failed.reason) == (query.query_id, "RESOURCE_EXHAUSTED")
    assert "shorten the prompt of 11 tokens" in failed.message
    assert faults(player, stand, arrivals, but=3) == []
    assert waits, "the last try came at once"
    counters = stand.engine.counters
    assert counters["out_of_memory_failures"] == 1
    assert counters["parks_for_out_of_memory"] >= 1, "somebody's memory was not asked for"
    forwards.fails = lambda *_: False
    assert faults(run_workload(stand.engine), stand) == []


@pytest.mark.parametrize("family", KINDS_OF_CACHE)
def test_a_row_for_which_there_is_never_memory_fails_alone(
    stand: Any, forwards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: whoever is in the batch with it is parked and goes on, be it the least or the most urgent."""
    batch, by_row = stand.engine.residency.batch, stand.engine.residency.by_row
    step = batch.step
    for culprit in (0, 3):

        def fails(tokens: Any, culprit: int = culprit) -> Any:
            if any(by_row[row].query_id == f"s{culprit}" for row in tokens):
                forwards.fails = lambda *_: True
            try:
                return step(tokens)
            finally:
                forwards.fails = lambda *_: False

        monkeypatch.setattr(batch, "step", fails)
        player = run_workload(stand.engine)
        query = player.queries[culprit]
        assert query.error is not None
        assert query.error[0] == "RESOURCE_EXHAUSTED"
        assert len(query.output_token_ids) == 1, "its prompt was computed"
        assert faults(player, stand, but=culprit) == []


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@pytest.mark.parametrize("seed", range(full_or(1, 40)))
def test_memory_runs_out_anywhere_in_a_step(
    stand: Any, calm: Calm, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """M6: in forwards, embeds, extracts, copies ahead and the choice of tokens: any operation of torch."""
    engine, step = stand.engine, stand.engine.step
    mode = Allocations()

    def counted() -> bool:
        with mode:
            return bool(step())

    monkeypatch.setattr(engine, "step", counted)
    run_workload(engine)
    total, rng = mode.count, random.Random(seed)
    for _ in range(full_or(4, 100)):
        calm(engine)
        mode = Allocations(rng.sample(range(total), rng.choice([1, 3, 20])))
        player = run_workload(engine)
        assert mode.failed
        failed = [place for place, query in enumerate(player.queries) if query.error is not None]
        for place in failed:
            assert player.queries[place].error[0] == "RESOURCE_EXHAUSTED"
        assert [fault for fault in faults(player, stand) if int(fault[0]) not in failed] == []


@pytest.mark.parametrize("family", ["llama"])
def test_after_a_shortage_fewer_rows_are_used_for_a_while(stand: Any, forwards: Any) -> None:
    """Not the same wall in every step; and the rows come back."""
    engine = stand.engine
    width = 0

    def fails(number: int, ids: torch.Tensor) -> bool:
        nonlocal width
        width = max(width, len(engine.residency.occupied))
        return len(engine.residency.occupied) > 2

    forwards.fails = fails
    long = SamplingParams(max_tokens=12, ignore_eos=True)
    arrivals = tuple(Arrival(Request((5 + n, 9, 11), long, seed=n), "standard") for n in range(4))
    player = run_workload(engine, arrivals)
    assert width == 3
    assert faults(player, stand, arrivals) == []
    assert engine._relief.rows.most == engine.snapshot().memory.row_limit == 2, "operators see it"
    assert engine.counters["out_of_memory"] <= 4, "it ran into the wall again and again"
    forwards.fails = lambda *_: False
    while engine._relief.rows.most is not None:
        player = run_workload(engine, arrivals)
    assert faults(player, stand, arrivals) == []


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_chunk_that_is_too_large_is_computed_in_smaller_ones(
    make_engine: Any, make_stand: MakeStand, calm: Calm, forwards: Any, family: str
) -> None:
    """And the next prompt is not tried at full size."""
    model = make_stand(family, "ring").model
    engine = make_engine(model, rows=2, chunk_tokens=64, max_query_tokens=128, batch="ring")
    calm(engine)
    most = 0

    def fails(_: int, ids: torch.Tensor) -> bool:
        nonlocal most
        most = max(most, ids.shape[1])
        return ids.shape[1] > 20

    prompts = [[3 + (7 * n + place) % 90 for place in range(60)] for n in range(2)]
    expected = []
    for prompt in prompts:
        query = engine.submit(prompt, GREEDY)
        engine.run_until_idle()
        expected.append(query.output_token_ids)
    calm(engine)
    forwards.fails = fails
    for prompt, tokens in zip(prompts, expected, strict=True):
        query = engine.submit(prompt, GREEDY)
        engine.run_until_idle()
        assert query.output_token_ids == tokens
        assert engine._relief.chunk.most == 16
    assert most == 60
    assert engine.counters["out_of_memory"] == 3, "60, again 60 and 30; then 15 or 16 at once"
    assert engine.counters["out_of_memory_failures"] == 0
    assert engine.counters["parks"] == 0


def test_a_row_without_memory_is_given_later(
    make_stand: MakeStand, calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy stays good wherever it is; alone, it fails."""
    stand = make_stand("llama", "ring")
    engine, batch = stand.engine, stand.engine.residency.batch
    for arrival in WORKLOAD:
        stand.solo.outcome(arrival.request)
    calm(engine)
    embed = batch.embed

    def full(row: int, kv: Any) -> None:
        if sum(1 for length in batch.lengths if length) >= 2:
            raise torch.OutOfMemoryError("no page")
        embed(row, kv)

    monkeypatch.setattr(batch, "embed", full)
    assert faults(run_workload(engine), stand) == []
    assert engine.counters["placements_put_off"] >= 1
    monkeypatch.setattr(batch, "embed", lambda *_: full_of_nothing())
    player = run_workload(engine)
    assert {query.error[0] for query in player.queries} == {"RESOURCE_EXHAUSTED"}
    monkeypatch.setattr(batch, "embed", embed)
    calm(engine)
    assert faults(run_workload(engine), stand) == []


def full_of_nothing() -> None:
    raise MemoryError


@pytest.mark.parametrize("family", ["llama"])
def test_a_shortage_is_logged_with_sizes_and_not_in_every_step(
    stand: Any, forwards: Any, caplog: pytest.LogCaptureFixture
) -> None:
    forwards.fails = lambda number, _: number % 4 == 3
    with caplog.at_level(logging.WARNING, logger="batond.daemon.engine.step.relief"):
        assert faults(run_workload(stand.engine), stand) == []
    assert stand.engine.counters["out_of_memory"] == len(forwards.failed) > 2
    [line] = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert re.search(r"rows hold \d+ tokens, \d+ bytes of KV committed", line)


def test_half_a_chunk_of_log_probabilities_is_computed_again(make_bench: Any, llama: Any) -> None:
    """Tokens whose logits nobody has seen can't be gone on from: the prompt is begun anew."""
    prefill = Prefill(make_bench(llama).batch(1))

    def note(_first: int, _logits: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no memory for the numbers")

    assert prefill.intact
    with pytest.raises(torch.OutOfMemoryError):
        prefill.run_noting([5, 6, 7], note)
    assert not prefill.intact
