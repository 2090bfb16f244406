"""Dead jobs through both clients and batonctl."""

from __future__ import annotations

import datetime as dt
import io
import json
import sys
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from batond.clients import DeadJob, JobState, cli, errors
from batond.v1 import admin_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., tuple[int, str, str]]

POISON = admin_pb2.DeadJob(
    name="t%200/poison",
    tenant="t 0",
    job_id="poison",
    sla_class="standard",
    reason="ATTEMPTS",
    message="given up after 3 attempts; the last: the lease ran out",
    attempts=3,
    evidence=[
        "1700000000000 epoch 1 owner d1: the lease ran out",
        "1700000001000 epoch 2 owner d[red]2: engine",
    ],
    can_retry=True,
)
POISON.died_time.FromSeconds(1_700_000_000)
GARBAGE = admin_pb2.DeadJob(name="garbage:\\x80", reason="GARBAGE", message="found", obstacle="it is no job")


@pytest.fixture
def batonctl(daemon: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs batonctl in this process; gives exit code, output and errors."""
    for name in ("BATOND_TOKEN", "BATOND_TOKEN_FILE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATOND_SERVER", daemon.target)
    monkeypatch.setenv("COLUMNS", "60")

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batonctl", "dead", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.run()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def test_an_entry_arrives_whole(daemon: Any, client: Any) -> None:
    daemon.dead = [POISON, GARBAGE]
    page = client.dead_jobs_page()
    assert page.next_page_token == ""
    poison, garbage = page.dead_jobs
    assert poison == DeadJob(
        name="t%200/poison",
        tenant="t 0",
        job_id="poison",
        sla_class="standard",
        reason="ATTEMPTS",
        message=POISON.message,
        attempts=3,
        evidence=tuple(POISON.evidence),
        died_time=dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=dt.UTC),
        can_retry=True,
    )
    assert (garbage.died_time, garbage.can_retry, garbage.obstacle) == (None, False, "it is no job")


def test_pages_are_fetched_as_needed(daemon: Any, client: Any) -> None:
    assert [one.name for one in client.dead_jobs(page_size=1)] == ["t0/j0", "t0/j1", "t0/j2"]
    assert [(request.page_size, request.page_token) for _, request in daemon.calls] == [
        (1, ""),
        (1, "1"),
        (1, "2"),
    ]
    with pytest.raises(errors.InvalidRequestError):
        client.dead_jobs_page(page_size=-1)


def test_retry_and_drop(daemon: Any, client: Any) -> None:
    job = client.retry_dead_job("t0/j1")
    assert (job.tenant, job.job_id, job.state) == ("t0", "j1", JobState.QUEUED)
    assert client.drop_dead_job("t0/j0") is None
    assert [one.name for one in daemon.dead] == ["t0/j2"]
    for call in (client.retry_dead_job, client.drop_dead_job):
        with pytest.raises(errors.NotFoundError):
            call("t0/j1")


@pytest.mark.parametrize("name", ["RetryDeadJob", "DropDeadJob"])
def test_what_changes_the_list_is_asked_for_once(daemon: Any, client: Any, fault: Any, name: str) -> None:
    """A lost answer is told: a second call would say NOT_FOUND of what the first has done."""
    daemon.faults[name] = [fault(grpc.StatusCode.UNAVAILABLE)]
    call = client.retry_dead_job if name == "RetryDeadJob" else client.drop_dead_job
    with pytest.raises(errors.UnavailableError):
        call("t0/j1")
    assert daemon.names() == [name]


def test_the_list_shows_the_evidence(daemon: Any, batonctl: Run) -> None:
    daemon.dead = [POISON, GARBAGE]
    code, out, err = batonctl("list")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "t%200/poison",
        "  died     2023-11-14 22:13:20+00:00",
        "  why      given up after 3 attempts; the last: the lease ran out [ATTEMPTS]",
        "  class    standard, 3 attempts",
        "  retry    possible",
        "  evidence 1700000000000 epoch 1 owner d1: the lease ran out",
        "           1700000001000 epoch 2 owner d[red]2: engine",
        "garbage:\\x80",
        "  died     unknown",
        "  why      found [GARBAGE]",
        "  retry    not possible: it is no job",
    ]


def test_the_list_is_bounded_and_speaks_json(daemon: Any, batonctl: Run) -> None:
    code, out, _ = batonctl("list", "--limit", "2", "--json")
    assert code == 0
    assert [json.loads(line)["name"] for line in out.splitlines()] == ["t0/j0", "t0/j1"]
    assert daemon.calls[-1][1].page_size == 2
    daemon.dead = []
    assert batonctl("list") == (0, "", "there are no dead jobs\n")
    assert batonctl("list", "--json") == (0, "", "")


def test_one_is_retried_or_dropped(daemon: Any, batonctl: Run) -> None:
    assert batonctl("retry", "t0/j0") == (0, "j0 queued\n", "")
    assert json.loads(batonctl("retry", "t0/j1", "--json")[1])["job_id"] == "j1"
    assert batonctl("drop", "t0/j2") == (0, "t0/j2 dropped\n", "")
    assert daemon.dead == []
    assert batonctl("drop", "t0/j2")[0] == 4
    assert batonctl("retry", "t0/j2")[0] == 4


def test_what_cant_be_retried_has_a_code_of_its_own(daemon: Any, batonctl: Run, fault: Any) -> None:
    daemon.faults["RetryDeadJob"] = [fault(grpc.StatusCode.FAILED_PRECONDITION, reason="NOT_RETRYABLE")]
    code, _, err = batonctl("retry", "garbage:x")
    assert code == 5
    assert "NOT_RETRYABLE" in err


@pytest.mark.parametrize(("options", "answer"), [(("--yes",), ""), (("-y",), ""), ((), "y\n")])
def test_all_are_dropped_when_that_is_wanted(daemon: Any, batonctl: Run, options: Any, answer: str) -> None:
    code, out, err = batonctl("drop", "--all", *options, stdin=answer)
    assert (code, out.strip()) == (0, "3 dropped")  # The prompt's last blank goes to standard output.
    assert ("Throw 3 dead jobs away" in err) is bool(answer)
    assert daemon.dead == []


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_none_is_dropped_without_a_yes(daemon: Any, batonctl: Run, answer: str) -> None:
    code, out, _ = batonctl("drop", "--all", stdin=answer)
    assert code != 0
    assert out.strip() == ""
    assert len(daemon.dead) == 3
    assert "DropDeadJob" not in daemon.names()


def test_those_that_somebody_else_dropped_are_no_error(daemon: Any, batonctl: Run, fault: Any) -> None:
    daemon.faults["DropDeadJob"] = [fault(grpc.StatusCode.NOT_FOUND)]
    assert batonctl("drop", "--all", "--yes")[:2] == (0, "2 dropped\n")


@pytest.mark.parametrize(
    "arguments", [("drop",), ("drop", "t0/j0", "--all"), ("list", "--limit", "0"), ("retry",)]
)
def test_wrong_usage(daemon: Any, batonctl: Run, arguments: tuple[str, ...]) -> None:
    assert batonctl(*arguments)[0] == 2
    assert daemon.calls == []
