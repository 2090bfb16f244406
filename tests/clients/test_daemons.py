"""The list of daemons, in both clients and in batonctl."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from typer.testing import CliRunner

from batond.clients import DaemonInfo
from batond.clients.cli import app
from batond.clients.model import ServerState


def test_daemons_of_all_models_are_listed(client: Any) -> None:
    first, second = client.daemons()
    assert first == DaemonInfo(
        daemon_id="gpu0:7:abc",
        model="tiny",
        address="gpu0:7431",
        state=ServerState.DRAINING,
        rows=4,
        running_jobs=3,
        version="0.1.0",
        start_time=datetime.fromtimestamp(1_700_000_000, UTC),
    )
    assert (second.address, second.state) == ("", ServerState.UNKNOWN)
    assert client.server_info().daemon_id == first.daemon_id


def test_batonctl_shows_them(daemon: Any) -> None:
    shown = CliRunner().invoke(
        app, ["--server", f" {daemon.target},{daemon.target}", "daemons"], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == 0, shown.output
    header, first, second = shown.output.splitlines()
    assert header.split() == ["model", "address", "state", "rows", "jobs", "version", "since", "daemon"]
    assert first.split()[:6] == ["tiny", "gpu0:7431", "draining", "4", "3", "0.1.0"]
    assert second.split()[:3] == ["small", "-", "unknown"]
    raw = CliRunner().invoke(app, ["--server", daemon.target, "daemons", "--json"])
    assert [json.loads(line)["daemon_id"] for line in raw.output.splitlines()] == ["gpu0:7:abc", "gpu1:8:def"]
