"""The README's examples run as they stand."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import batond.clients
from batond.bench.local_daemon import LocalDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.clients import Client

LONG_TOKENS = "max_tokens=200"


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    """Starts the real daemon with the demonstration's model and one tenant."""
    with tempfile.TemporaryDirectory(prefix="bd-") as folder:
        one = LocalDaemon(
            Path(folder),
            ["docs"],
            model={"path": "smollm2"},
            engine={"rows": 2, "max_query_tokens": 512, "host_pool_bytes": 1 << 26},
        )
        try:
            one.wait_ready()
            yield one
        finally:
            one.stop()


def test_there_is_one_example_of_each_kind(readme_examples: list[str]) -> None:
    clients, engine = readme_examples
    assert "batond.clients" in clients
    assert "LocalEngine" in engine


def test_the_engine_example_shows_what_its_comment_says(
    readme_examples: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(readme_examples[1], "README.md", "exec"), {})
    tokens, counts = capsys.readouterr().out.splitlines()
    assert tokens.count("[") == 2
    assert f"# {counts}\n" in readme_examples[1]


@pytest.mark.redis
@pytest.mark.slow
def test_the_client_example_runs_against_a_daemon(
    readme_examples: list[str],
    daemon: LocalDaemon,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def connect(target: str) -> Client:
        assert target == batond.clients.DEFAULT_TARGET
        return daemon.client("docs")

    monkeypatch.setattr(batond.clients, "Client", connect)
    assert LONG_TOKENS in readme_examples[0]
    exec(compile(readme_examples[0].replace(LONG_TOKENS, "max_tokens=24"), "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "Paris" in said
    with daemon.client("docs") as client:
        jobs = list(client.list())
        report = next(job for job in jobs if job.effective_sla_class == "batch")
        assert client.get(report.job_id).text in said
    assert {job.effective_sla_class for job in jobs} == {"batch", "interactive"}
    assert all(job.state == "succeeded" for job in jobs)
