"""The daemon that faults and load are tried on: what it puts out must be known beforehand."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE, Fault, fake_text, fake_tokens
from batond.bench.local_daemon import LocalDaemon
from batond.clients import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    """Two rows, a millisecond a step."""
    with tempfile.TemporaryDirectory(prefix="bd-") as name:
        one = LocalDaemon(
            Path(name),
            ["red"],
            model={"path": name, "name": "fake"},
            engine={"rows": 2},
            environment={STEP_VARIABLE: "0.001"},
            program=PROGRAM,
        )
        one.wait_ready()
        yield one
        one.stop()


def test_puts_out_what_follows_from_prompt_and_seed(daemon: LocalDaemon) -> None:
    with (
        daemon.client("red") as client,
        client.generate(token_ids=[5, 6, 7], max_tokens=20, seed=3) as stream,
    ):
        job = stream.last_job()
    assert list(job.output_token_ids) == fake_tokens([5, 6, 7], 3, 20)
    assert job.text == fake_text(job.output_token_ids)


def test_an_urgent_job_takes_a_row_and_changes_nothing(daemon: LocalDaemon) -> None:
    with daemon.client("red") as client:
        slow = [
            client.generate(token_ids=[place], sla_class="batch", max_tokens=500, seed=place)
            for place in (1, 2)
        ]
        for stream in slow:
            while stream.next_token_index < 1:
                next(stream)
        with client.generate(token_ids=[9], sla_class="interactive", max_tokens=3, seed=1) as urgent:
            assert list(urgent.last_job().output_token_ids) == fake_tokens([9], 1, 3)
        jobs = [stream.last_job() for stream in slow]
    assert [list(job.output_token_ids) for job in jobs] == [fake_tokens([p], p, 500) for p in (1, 2)]
    assert sum(job.preemptions for job in jobs) == 1


def test_a_fault_fails_the_query_that_names_it(daemon: LocalDaemon) -> None:
    with daemon.client("red") as client:
        job = client.wait(client.submit(token_ids=[Fault.FAIL, 2], max_tokens=5, seed=1).job_id)
    assert (job.state, job.error_message) == (JobState.FAILED, "it was asked to")
    assert list(job.output_token_ids) == fake_tokens([Fault.FAIL, 2], 1, 2)
