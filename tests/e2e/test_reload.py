"""SIGHUP to the real daemon: jobs go on, the log and systemd hear of it, a broken file changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batond.clients import Client, JobState
from batond.clients.errors import UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import JobStream

pytestmark = [pytest.mark.redis]


class Systemd:
    """Listens as the service manager does."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(120)

    def wait_for(self, word: str) -> list[str]:
        """Everything that is said until the word is, and with it."""
        said: list[str] = []
        while word not in said:
            said += self._socket.recv(4096).decode().split("\n")
        return said

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd() -> Iterator[Systemd]:
    """A service manager."""
    with tempfile.TemporaryDirectory(prefix="bd-") as name:
        manager = Systemd(Path(name))
        yield manager
        manager.close()


def logged(daemon: LocalDaemon, event: str) -> list[dict[str, Any]]:
    """Lines of the log with this event."""
    lines = (json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{"))
    return [line for line in lines if line["event"] == event]


def test_a_reload_loses_no_token(
    start_daemon: Callable[..., LocalDaemon],
    systemd: Systemd,
    solo: Callable[[list[int], int], list[int]],
    after_tokens: Callable[[JobStream, int], None],
) -> None:
    """V2: the drain too takes what was reloaded; with the time of the start the last job would end first."""
    daemon = start_daemon(
        environment={"NOTIFY_SOCKET": systemd.path}, sections={"service": {"drain_timeout_s": 100.0}}
    )
    systemd.wait_for("READY=1")
    config = daemon.folder / "batond.toml"
    first = config.read_text()

    def reload(text: str) -> list[str]:
        config.write_text(text)
        os.kill(daemon.process.pid, signal.SIGHUP)
        before = systemd.wait_for("RELOADING=1")
        return before + systemd.wait_for("READY=1")

    added = f"[[tenants]]\nname = 'new'\ntoken_sha256 = '{hashlib.sha256(b'n3w').hexdigest()}'\n"
    with daemon.client("red") as red, Client(f"unix:{daemon.socket}", token="n3w", timeout_s=120.0) as new:
        with pytest.raises(UnauthenticatedError):
            new.server_info()
        job = red.submit(token_ids=[4, 5, 6], max_tokens=300, ignore_eos=True)
        with red.watch(job.job_id) as stream:
            after_tokens(stream, 10)
            more = first.replace("rows = 2", "rows = 3") + added + "[log]\nlevel = 'debug'\n"
            said = reload(more.replace("drain_timeout_s = 100.0", "drain_timeout_s = 0"))
            assert any(word.startswith("MONOTONIC_USEC=") for word in said)
            assert new.server_info().model == "tiny"
            reload("[engine\n")
            assert new.server_info().model == "tiny"
            done = stream.last_job()
        assert done.state is JobState.SUCCEEDED
        assert (list(done.output_token_ids), done.attempts) == (solo([4, 5, 6], 300), 1)
        long = red.submit(token_ids=[4, 5, 6], max_tokens=4000, ignore_eos=True)
        after_tokens(red.watch(long.job_id), 10)
    assert daemon.stop() == 0
    (told,) = logged(daemon, "draining")
    assert (told["why"], told["jobs"], told["timeout_s"]) == ("SIGTERM", 1, 0.0)
    assert logged(daemon, "drain_timeout")[0]["handed_back"] == 1
    (taken,) = logged(daemon, "reloaded")
    assert taken["changed"] == ["log.level", "service.drain_timeout_s", "tenants"]
    assert taken["tenants_added"] == ["new"]
    assert logged(daemon, "reload_needs_restart")[0]["keys"] == ["engine.rows"]
    assert "not valid TOML" in logged(daemon, "reload_refused")[0]["error"]
