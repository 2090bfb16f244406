"""Starting, stopping and dying: READY, drain, kill -9."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from batond.clients import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import JobStream

    Solo = Callable[[list[int], int], list[int]]
    AfterTokens = Callable[[JobStream, int], None]

pytestmark = [pytest.mark.redis]


def test_ready_is_said_after_the_self_test(start_daemon: Callable[..., LocalDaemon]) -> None:
    """V1: more time is asked for while loading; READY=1 only when jobs are taken; STOPPING=1 at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="bd-") as name,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
    ):
        path = str(Path(name) / "notify")
        notify.bind(path)
        notify.settimeout(120)
        daemon = start_daemon(environment={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "3000000"})
        said: list[str] = []
        while "READY=1" not in said:
            said += notify.recv(4096).decode().split("\n")
        with daemon.client("red") as red:
            assert red.result(red.submit("text", max_tokens=1).job_id).prompt_tokens == len("text")
        mapped = Path(f"/proc/{daemon.process.pid}/maps").read_text()
        assert "tokenizers" in mapped
        assert "libtorch" not in mapped, (
            "seconds of the start, and more memory than all the rest of the front"
        )
        while "WATCHDOG=1" not in said:
            said += notify.recv(4096).decode().split("\n")
        os.kill(daemon.process.pid, signal.SIGTERM)
        while "STOPPING=1" not in said:
            said += notify.recv(4096).decode().split("\n")
        assert daemon.process.wait(timeout=30) == 0
    assert any(word.startswith("EXTEND_TIMEOUT_USEC=") for word in said[: said.index("READY=1")])


def test_a_stop_during_the_load_is_told(start_daemon: Callable[..., LocalDaemon]) -> None:
    """V2: the log says at once that SIGTERM was heard, not only when all has ended."""
    with (
        tempfile.TemporaryDirectory(prefix="bd-") as name,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
    ):
        path = str(Path(name) / "notify")
        notify.bind(path)
        notify.settimeout(120)
        daemon = start_daemon(environment={"NOTIFY_SOCKET": path})
        while "EXTEND_TIMEOUT_USEC=" not in notify.recv(4096).decode():
            pass
        os.kill(daemon.process.pid, signal.SIGTERM)
        assert daemon.process.wait(timeout=60) == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
    (told,) = [line for line in lines if line["event"] == "stopping"]
    assert (told["why"], told["during"]) == ("SIGTERM", "load")
    assert lines.index(told) < len(lines) - 1
    assert lines[-1]["event"] == "stopped"


def test_drain_hands_long_jobs_back_with_their_tokens(
    start_daemon: Callable[..., LocalDaemon], solo: Solo, after_tokens: AfterTokens
) -> None:
    """V2: the short job finishes, the long one goes on after the restart, attempts are not charged."""
    daemon = start_daemon(sections={"service": {"drain_timeout_s": 0.2}})
    daemon.wait_ready()
    with daemon.client("red") as red:
        long = red.submit(token_ids=[4, 5, 6], max_tokens=800, ignore_eos=True)
        after_tokens(red.watch(long.job_id), 10)
        short = red.submit(token_ids=[7], max_tokens=20, ignore_eos=True)
        after_tokens(red.watch(short.job_id), 1)
    assert daemon.stop() == 0
    daemon.restart()
    with daemon.client("red") as red:
        assert red.result(short.job_id).output_tokens == 20
        done = red.result(long.job_id)
    assert list(done.output_token_ids) == solo([4, 5, 6], 800)
    assert done.attempts == 1  # Two daemons ran it; a hand-back is no attempt that failed.


def test_killed_daemon_loses_nothing(
    start_daemon: Callable[..., LocalDaemon], solo: Solo, after_tokens: AfterTokens
) -> None:
    """D3: kill -9 of the whole daemon in mid decode: accepted jobs finish with the same tokens."""
    daemon = start_daemon(sections={"queue": {"lease_s": 2.0}})
    daemon.wait_ready()
    with daemon.client("red") as red:
        jobs = [red.submit(token_ids=[3, n], max_tokens=250, ignore_eos=True) for n in range(4)]
        after_tokens(red.watch(jobs[0].job_id), 50)
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    daemon.process.kill()
    daemon.process.wait()
    psutil.wait_procs(children, timeout=20)
    daemon.restart()
    with daemon.client("red") as red:
        for n, job in enumerate(jobs):
            done = red.result(job.job_id)
            assert done.state is JobState.SUCCEEDED
            assert list(done.output_token_ids) == solo([3, n], 250)


def test_killed_engine_keeps_the_streams_open(
    daemon: LocalDaemon, solo: Solo, after_tokens: AfterTokens
) -> None:
    """D3: kill -9 of the engine process: it is started again, each token index is delivered once."""
    with daemon.client("red") as red:
        job = red.submit(token_ids=[8, 9], max_tokens=300, ignore_eos=True)
        with red.watch(job.job_id) as stream:
            after_tokens(stream, 30)
            engine = next(
                child
                for child in psutil.Process(daemon.process.pid).children(recursive=True)
                if "batond.daemon.engine.process" in " ".join(child.cmdline())
            )
            engine.kill()
            done = stream.last_job()
    assert done.state is JobState.SUCCEEDED
    assert list(done.output_token_ids) == solo([8, 9], 300)
