"""`batonctl bulk`: every line once, whatever happens in between."""

import asyncio
import fcntl
import functools
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from batond.clients import JobInfo, JobState, RetryPolicy
from batond.clients.bulk import Bulk
from batond.clients.bulk_input import line_of, raw_lines
from batond.clients.bulk_output import Results, Stream, UnusableOutputError, record_of
from batond.v1 import types_pb2

if TYPE_CHECKING:
    from batond.clients.aio import AsyncClient


def lines_in(path: Path) -> list[dict[str, Any]]:
    """The output's lines, in the input's order."""
    return sorted((json.loads(text) for text in path.read_text().splitlines()), key=lambda line: line["line"])


@pytest.fixture
def jobs(tmp_path: Path) -> Callable[..., Path]:
    """Writes the input."""

    def write(*lines: object) -> Path:
        path = tmp_path / "jobs.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{text}\n" for text in texts))
        return path

    return write


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the daemon says, and hardly longer."""
    monkeypatch.setattr("batond.clients.bulk.PAUSES", RetryPolicy(base_s=0.001, cap_s=0.01))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where results go."""
    return tmp_path / "results.jsonl"


def test_every_line_has_its_job_or_its_error(
    daemon: Any, batonctl: Callable[..., Any], jobs: Callable[..., Path], output: Path, chunks: Any
) -> None:
    path = jobs(
        {"prompt": "one", "max_tokens": 3, "labels": {"part": "a"}},
        "",
        {"messages": [{"role": "user", "content": "hi"}], "job_id": "mine", "logit_bias": {"5": 2.5}},
        "{broken",
        {"prompt": "x", "max_token": 3},
        {"prompt": "x", "deadline": "soon"},
        [1],
    )
    how = ("-c", "batch", "-n", "9", "--label", "run=7")
    result = batonctl("bulk", str(path), "--output", str(output), *how)
    assert result.code == 1
    assert result.out == ""
    assert result.err == "-- 6 lines: 2 succeeded, 0 failed, 4 rejected\n"
    found = lines_in(output)
    assert [line["line"] for line in found] == [1, 3, 4, 5, 6, 7]
    assert all(set(line) == {"line", "job_id", "job", "error"} for line in found)
    text = "".join(text for _, text in chunks)
    assert [line["job"]["text"] for line in found[:2]] == [text, text]
    assert found[1]["job_id"] == "mine"
    assert {line["error"]["kind"] for line in found[2:]} == {"invalid_request"}
    assert "max_token" in found[3]["error"]["message"]
    assert "deadline" in found[4]["error"]["fields"]
    spec = daemon.jobs[found[0]["job_id"]][0]
    assert (spec.sla_class, spec.sampling.max_tokens) == ("batch", 3)
    assert dict(spec.labels) == {"run": "7", "part": "a"}
    assert daemon.jobs["mine"][0].sampling.logit_bias[5] == 2.5
    assert daemon.jobs["mine"][0].sampling.max_tokens == 9
    again = batonctl("bulk", str(path), "--output", str(output), *how, "--json")
    assert again.code == 1
    assert json.loads(again.out) == {
        "lines": 6,
        "succeeded": 2,
        "failed": 0,
        "rejected": 4,
        "earlier": 6,
        "complete": True,
    }
    assert daemon.names().count("SubmitJob") == 2, "nothing is left to do"


def test_a_crash_in_the_middle_of_a_line_costs_nothing(
    daemon: Any, batonctl: Callable[..., Any], jobs: Callable[..., Path], output: Path
) -> None:
    """R: the line that was cut off comes again, from the job that ran; the others stay as they are."""
    path = jobs(*({"prompt": f"p{number}"} for number in range(12)))
    assert batonctl("bulk", str(path), "-o", str(output)).code == 0
    ran = set(daemon.jobs)
    assert len(ran) == 12
    whole = output.read_bytes()
    kept = whole.splitlines(keepends=True)[:5]
    output.write_bytes(b"".join(kept) + whole.splitlines()[5][:40])
    daemon.calls.clear()
    result = batonctl("bulk", str(path), "-o", str(output))
    assert result.code == 0
    assert "12 succeeded" in result.err
    assert "5 of them before" in result.err
    assert output.read_bytes().startswith(b"".join(kept))
    assert [line["line"] for line in lines_in(output)] == list(range(1, 13))
    assert set(daemon.jobs) == ran, "no job is submitted under another name"
    assert daemon.names().count("SubmitJob") == 7
    path.write_text(path.read_text() + '{"prompt": "late"}\n')
    assert "13 lines" in batonctl("bulk", str(path), "-o", str(output)).err


def test_what_is_not_the_same_run_is_refused(
    daemon: Any, batonctl: Callable[..., Any], jobs: Callable[..., Path], output: Path
) -> None:
    path = jobs({"prompt": "a"}, {"prompt": "b"})
    assert batonctl("bulk", str(path), "-o", str(output)).code == 0
    before = output.read_bytes()
    jobs({"prompt": "b"}, {"prompt": "a"})
    for options in ([], ["-n", "5"]):
        result = batonctl("bulk", str(path), "-o", str(output), *options)
        assert result.code == 2
        assert "have changed" in result.err
    assert output.read_bytes() == before
    other = output.with_name("other.txt")
    other.write_text("precious\n")
    refused = batonctl("bulk", str(path), "-o", str(other))
    assert (refused.code, other.read_text()) == (2, "precious\n")
    assert "no output of this command" in refused.err
    assert batonctl("bulk", str(path), "-o", str(path)).code == 2
    with Path(f"{output}.run").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another batonctl writes" in batonctl("bulk", str(path), "-o", str(output)).err
    output.write_bytes(before + b"garbage\n")
    assert "mend it" in batonctl("bulk", str(path), "-o", str(output)).err
    output.unlink()
    assert batonctl("bulk", str(path), "-o", str(output)).code == 0, "removed, it is begun anew"


def test_a_full_queue_is_waited_for_and_a_quota_of_size_is_not(
    daemon: Any, batonctl: Callable[..., Any], jobs: Callable[..., Path], output: Path, fault: Any
) -> None:
    """C: RetryInfo says that waiting helps; without it the line has the error."""
    full = fault(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", retry_after_s=0.01)
    daemon.faults["SubmitJob"] = [full] * 30
    path = jobs(*({"prompt": f"p{number}"} for number in range(4)))
    assert batonctl("bulk", str(path), "-o", str(output)).code == 0
    assert not daemon.faults["SubmitJob"]
    daemon.faults["SubmitJob"] = [fault(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="TOO_LARGE")]
    jobs(*({"prompt": f"p{number}"} for number in range(5)))
    assert batonctl("bulk", str(path), "-o", str(output)).code == 1
    assert lines_in(output)[4]["error"]["reason"] == "TOO_LARGE"


def test_who_is_not_let_in_is_told_and_nothing_is_written(
    daemon: Any, batonctl: Callable[..., Any], jobs: Callable[..., Path], output: Path, fault: Any
) -> None:
    path = jobs({"prompt": "a"}, {"prompt": "b"})
    daemon.faults["SubmitJob"] = [fault(grpc.StatusCode.UNAUTHENTICATED, reason="BAD_TOKEN")]
    result = batonctl("bulk", str(path), "-o", str(output))
    assert result.code == 6
    assert "BAD_TOKEN" in result.err
    assert "the same command goes on" in result.err
    away = fault(grpc.StatusCode.UNAVAILABLE, reason="LOADING")
    daemon.faults["SubmitJob"] = [away] * 40
    assert batonctl("bulk", str(path), "-o", str(output), "--patience", "0").code == 7
    daemon.faults.clear()
    assert batonctl("bulk", str(path), "-o", str(output)).code == 0
    assert [line["line"] for line in lines_in(output)] == [1, 2]


def test_a_job_that_fails_has_both_and_one_that_expired_runs_again(
    daemon: Any, batonctl: Callable[..., Any], jobs: Callable[..., Path], output: Path, fault: Any
) -> None:
    daemon.faults["WatchJob"] = [fault(grpc.StatusCode.NOT_FOUND)]
    error = types_pb2.JobError(code=8, reason="KV_BYTES", message="too large")
    daemon.final = types_pb2.Job(state=types_pb2.JOB_STATE_FAILED, text="half", error=error)
    result = batonctl("bulk", str(jobs({"prompt": "a"})), "-o", str(output), "--json")
    assert result.code == 1
    assert json.loads(result.out)["failed"] == 1
    (line,) = lines_in(output)
    assert (line["job"]["text"], line["error"]["kind"], line["error"]["reason"]) == (
        "half",
        "job_failed",
        "KV_BYTES",
    )


def start(daemon: Any, *arguments: str, **pipes: Any) -> subprocess.Popen[bytes]:
    """Starts the program, as a terminal would."""
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-m", "batond.clients.batonctl", "--server", daemon.target, "bulk", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed,  # noqa: PLW1509 -- it only sets a signal's handler
        **pipes,
    )


def test_an_interrupt_leaves_jobs_alone_and_the_next_run_finds_them(
    daemon: Any, batonctl: Callable[..., Any], output: Path
) -> None:
    """C5: even while the pipe that is read says nothing. Then the same lines go on, and none runs twice."""
    daemon.endless = True
    process = start(daemon, "-", "-o", str(output), stdin=subprocess.PIPE)
    assert process.stdin is not None
    text = b'{"prompt": "a"}\n{"prompt": "b"}\n'
    process.stdin.write(text)
    process.stdin.flush()
    assert daemon.waiting.wait(60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr is not None
    assert process.stderr.read().decode().endswith("the same command goes on\n")
    process.stdin.close()
    process.stderr.close()
    assert output.read_bytes() == b""
    assert "CancelJob" not in daemon.names()
    submitted = set(daemon.jobs)
    assert submitted
    daemon.endless = False
    path = output.with_name("same.jsonl")
    path.write_bytes(text)
    assert batonctl("bulk", str(path), "-o", str(output)).code == 0
    assert submitted <= set(daemon.jobs)
    assert len(daemon.jobs) == 2
    assert [line["line"] for line in lines_in(output)] == [1, 2]


def test_results_may_go_to_a_pipe(daemon: Any, jobs: Callable[..., Path]) -> None:
    process = start(daemon, str(jobs({"prompt": "a"}, {"prompt": "b"})), "-o", "-")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(json.loads(line)["line"] for line in out.splitlines()) == [1, 2]
    assert err == b"-- 2 lines: 2 succeeded, 0 failed, 0 rejected\n"


class Counted(io.BytesIO):
    """Counts what is read."""

    read_lines = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        self.read_lines += 1
        return super().readline(size)


class Slow:
    """A client whose jobs end when they are told to."""

    def __init__(self, parallel: int) -> None:
        self.parallel, self.under_way, self.most = parallel, 0, 0
        self.full, self.go = asyncio.Event(), asyncio.Event()

    async def submit(self, prompt: str | None, **options: Any) -> JobInfo:
        return JobInfo(job_id=options["job_id"], state=JobState.QUEUED)

    async def wait(self, job_id: str) -> JobInfo:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if self.under_way == self.parallel:
            self.full.set()
        await self.go.wait()
        self.under_way -= 1
        return JobInfo(job_id=job_id, state=JobState.SUCCEEDED)


async def test_no_more_is_read_than_is_under_way() -> None:
    """A file of millions of lines takes the memory of a few."""
    source = Counted(b'{"prompt": "x"}\n' * 2000)
    client, written = Slow(16), io.BytesIO()
    results = Stream(written)
    bulk = Bulk(cast("AsyncClient", client), results, defaults={}, parallel=16, patience_s=1.0)
    running = asyncio.create_task(bulk.run(source))
    async with asyncio.timeout(60):
        await client.full.wait()
        assert source.read_lines <= 16 * 2 + 2
        assert bulk.progress.in_flight == 16
        client.go.set()
        await running
    assert client.most == 16
    assert results.counts.succeeded == 2000
    assert bulk.progress.done_bytes == len(b'{"prompt": "x"}\n' * 2000)
    numbers = sorted(json.loads(line)["line"] for line in written.getvalue().splitlines())
    assert numbers == list(range(1, 2001))


def test_a_line_longer_than_memory_is_passed_over() -> None:
    text = b'{"prompt": "a"}\n' + b"x" * 100 + b"\n\n" + b'{"prompt": "b"}'
    found = list(raw_lines(io.BytesIO(text), most_bytes=30))
    assert [(raw.number, raw.text) for raw in found] == [
        (1, b'{"prompt": "a"}'),
        (2, None),
        (4, b'{"prompt": "b"}'),
    ]
    assert sum(raw.nbytes for raw in found) == len(text)
    line = line_of(found[1], "run", {})
    assert line.fault is not None
    assert "longer than" in line.fault.message


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "token_ids": [1]}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "logit_bias": 3}',
        b'{"prompt": "a", "labels": "x"}',
        b'{"prompt": "a", "deadline": "2030-01-01T00:00:00"}',
        b'{"prompt": "a", "job_id": 7}',
        b'{"prompt": {}}',
        b"null",
    ],
)
def test_whatever_stands_in_a_line_is_the_lines_own_fault(text: bytes) -> None:
    (raw,) = raw_lines(io.BytesIO(text))
    assert line_of(raw, "run", {}).fault is not None


def test_ids_follow_from_the_line_alone() -> None:
    def job_id(text: str, run: str = "r", **defaults: Any) -> str:
        (raw,) = raw_lines(io.BytesIO(text.encode()))
        return line_of(raw, run, cast("Any", defaults)).job_id

    first = job_id('{"prompt": "a"}')
    assert first.startswith("bulk-r-1-")
    assert job_id('{"prompt": "a"}  ') == first
    others = {
        job_id('{"prompt": "b"}'),
        job_id('{"prompt": "a"}', run="s"),
        job_id('{"prompt": "a"}', max_tokens=4),
        job_id('\n{"prompt": "a"}'),
    }
    assert len(others | {first}) == 5
    assert job_id('{"prompt": "a", "job_id": "own"}') == "own"


def test_a_number_that_no_line_has_is_not_believed(output: Path) -> None:
    """Else a file of ours that somebody wrote into would take all memory."""
    Path(f"{output}.run").write_text('{"run": "r"}\n')
    record = {"line": 1 << 40, "job_id": "j", "job": None, "error": None}
    output.write_text(json.dumps(record) + "\n")
    with pytest.raises(UnusableOutputError, match="byte 0"):
        Results(output)


def test_a_disk_that_takes_half_a_line_gets_the_other_half(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(output)
    (raw,) = raw_lines(io.BytesIO(b'{"prompt": "a"}'))
    line = line_of(raw, results.run, {})
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    results.write(record_of(line, JobInfo(job_id=line.job_id, state=JobState.SUCCEEDED)))
    results.close()
    assert lines_in(output)[0]["job"]["state"] == "succeeded"
    again = Results(output)
    assert again.has(line)
    again.close()
