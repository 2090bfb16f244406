"""Steps that wait are joined: nothing lost or moved, no end of a chunk shown that Redis does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batond.daemon.front.hub import CameBack, GotRow, LostRow
from batond.daemon.front.merge import MOST_TOKENS, Merger
from batond.daemon.front.steps import JobStep
from batond.daemon.queue import Chunk, JobState, StepCommit
from batond.daemon.wire.messages import TokenLogprobs, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = Usage(prompt_tokens=1, output_tokens=1, parks=0, recomputed_tokens=0, waited_s=0.0, parked_s=0.0)


def job(name: str) -> Any:
    return SimpleNamespace(job_id=name)


def chunk(first: int, count: int = 1, **kw: Any) -> Chunk:
    ids = list(range(first, first + count))
    return Chunk(first_index=first, token_ids=ids, text=kw.pop("text", f"<{first}>"), **kw)


def step(
    held: Any, *chunks: Chunk, before: Sequence[Any] = (), usage: Usage | None = None, **kw: Any
) -> JobStep:
    fields = {"state": JobState.RUNNING, "prompt_tokens": 1, "preemptions": 0} | kw
    commit = StepCommit(tenant="t", job_id=held.job_id, epoch=1, chunks=chunks, **cast("Any", fields))
    return JobStep(held=held, commit=commit, events=[*before, *chunks], usage=usage)


def test_a_job_that_goes_on_and_one_that_comes_and_one_that_ends() -> None:
    one, two, three = job("1"), job("2"), job("3")
    merger = Merger([step(one, chunk(0), before=[GotRow()]), step(two, chunk(7))])
    end = step(
        two, chunk(8), usage=USAGE, state=JobState.SUCCEEDED, recomputed_tokens=3, finish_reason="stop"
    )
    assert merger.add([step(one, chunk(1)), end, step(three, chunk(0))])
    first, second, third = merger.steps
    assert first.events == [GotRow(), chunk(0, 2, text="<0><1>")]
    assert first.commit.chunks == (chunk(0, 2, text="<0><1>"),)
    assert (first.commit.state, first.usage) == (JobState.RUNNING, None)
    assert (second.commit.state, second.commit.recomputed_tokens, second.usage) == (
        JobState.SUCCEEDED,
        3,
        USAGE,
    )
    assert second.commit.finish_reason == "stop"
    assert third.commit.chunks == (chunk(0),)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"chunks": [chunk(0)]}, {"chunks": [chunk(1)], "before": [CameBack()]}),
        ({"chunks": [chunk(0)]}, {"chunks": [], "before": [LostRow("row", kept=True)]}),
        ({"chunks": [chunk(0)]}, {"chunks": [chunk(2)]}),  # A gap is for Redis to refuse.
        ({"chunks": [chunk(0, 0, text="~")]}, {"chunks": [chunk(0)]}),
        ({"chunks": [chunk(0)]}, {"chunks": [chunk(1, 0, text="~")]}),
        ({"chunks": [chunk(0, MOST_TOKENS)]}, {"chunks": [chunk(MOST_TOKENS)]}),
        ({"chunks": [chunk(0, logprobs=[TokenLogprobs(-1.0, [])])]}, {"chunks": [chunk(1)]}),
        ({"chunks": [chunk(0, finish_reason="stop")]}, {"chunks": [chunk(1)]}),
        ({"chunks": [chunk(0)], "usage": USAGE}, {"chunks": []}),
    ],
)
def test_what_can_not_be_joined_waits_with_all_of_its_step(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    held, mate = job("1"), job("2")
    merger = Merger([step(held, *first.pop("chunks"), **first), step(mate, chunk(0))])
    before = merger.steps
    assert not merger.add([step(mate, chunk(1)), step(held, *second.pop("chunks"), **second)])
    assert merger.steps == before


def test_two_claims_of_a_job_are_not_in_one_commit() -> None:
    """A refusal names the job: it must not be taken for that of the other claim (D4)."""
    merger = Merger([step(job("1"), chunk(0))])
    assert not merger.add([step(job("1"), chunk(1))])


def test_a_job_that_is_twice_in_a_step_is_left_as_it_is() -> None:
    held = job("1")
    steps = [step(held, chunk(0)), step(held, chunk(1))]
    merger = Merger(steps)
    assert merger.steps == steps
    assert not merger.add([step(job("2"), chunk(0))])
    assert not Merger([]).add(steps)


def test_choices_are_joined_each_by_itself() -> None:
    held = job("1")
    merger = Merger([step(held, chunk(0), chunk(4, choice=1))])
    assert merger.add([step(held, chunk(5, choice=1), chunk(0, choice=2))])
    (one,) = merger.steps
    assert one.commit.chunks == (chunk(0), chunk(4, 2, choice=1, text="<4><5>"), chunk(0, choice=2))
    assert list(one.commit.chunks) == one.events


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=2, max_size=8))
def test_each_token_is_committed_and_shown_once_in_order(sizes: list[list[int]]) -> None:
    """D6, for any steps of three jobs; a job without tokens in a step is not in it."""
    jobs = [job(name) for name in "abc"]
    at = [0, 0, 0]
    merger: Merger | None = None
    for row in sizes:
        steps = []
        for place, size in enumerate(row):
            if size:
                steps.append(step(jobs[place], chunk(at[place], size)))
                at[place] += size
        if merger is None:
            merger = Merger(steps)
        else:
            assert merger.add(steps)
    assert merger is not None
    for one in merger.steps:
        total = at[jobs.index(one.held)]
        tokens = [token for part in one.commit.chunks for token in part.token_ids]
        assert tokens == list(range(total))
        assert one.events == list(one.commit.chunks)
