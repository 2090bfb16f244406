"""Log lines, metrics and systemd's notify protocol."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import urllib.request
from typing import TYPE_CHECKING, Literal

import pytest
import structlog

from batond.daemon.telemetry.logging import bind_ids, configure_logging, get_logger
from batond.daemon.telemetry.metrics import OTHER_TENANT, Metrics
from batond.daemon.telemetry.systemd import Notifier
from batond.daemon.wire.messages import (
    GovernorState,
    MemorySnapshot,
    QuerySnapshot,
    QueryState,
    RowSnapshot,
    Snapshot,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_lines_are_json_with_bound_ids_and_tracebacks_of_any_library() -> None:
    stream = io.StringIO()
    configure_logging("info", "auto", stream)
    bind_ids(job_id="j1", tenant="t")
    get_logger("batond.front").info("job_accepted", prompt_tokens=3)
    get_logger("batond.front").debug("unseen")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        logging.getLogger("grpc").exception("call failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["job_id"], first["tenant"], first["prompt_tokens"]) == (
        "job_accepted",
        "j1",
        "t",
        3,
    )
    assert (first["level"], first["logger"]) == ("info", "batond.front")
    assert second["job_id"] == "j1"
    assert second["exception"][0]["exc_type"] == "ZeroDivisionError"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_variables(log_format: Literal["json", "console"]) -> None:
    """They hold prompts, outputs and tokens, which are never logged."""
    stream = io.StringIO()
    configure_logging("info", log_format, stream)

    def answer(prompt: str) -> None:
        raise ZeroDivisionError(str(len(prompt)))

    try:
        answer("terces ym"[::-1])  # A traceback quotes this line.
    except ZeroDivisionError as error:
        get_logger("batond.front").error("call_failed", exc_info=error)
        logging.getLogger("batond.engine").exception("query failed")
    assert stream.getvalue().count("ZeroDivisionError") >= 2
    assert "in answer" in stream.getvalue() or '"name": "answer"' in stream.getvalue()
    assert "my secret" not in stream.getvalue()


def test_a_terminal_gets_text() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    configure_logging("debug", "auto", stream)
    get_logger("x").debug("hello", n=1)
    assert "hello" in stream.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(stream.getvalue())


def _snapshot() -> Snapshot:
    parked = QuerySnapshot(
        query_id="q2",
        tenant="t",
        sla_class="batch",
        state=QueryState.PARKED,
        prompt_tokens=3,
        prefilled_tokens=3,
        output_tokens=1,
        max_tokens=5,
        parks=1,
        parked_bytes=10,
        held=False,
    )
    return Snapshot(
        step=4,
        rows=[RowSnapshot(row=0, query_id="q1"), RowSnapshot(row=1)],
        queries=[parked],
        columns=7,
        host_pool_used_bytes=10,
        host_pool_bytes=100,
        sessions=3,
        session_bytes=7,
        counters={"parks": 1.0, "parks_for_row": 1.0, "decode_steps": 4.0, "of_tomorrow": 2.0},
        memory=MemorySnapshot(
            committed_bytes=11,
            pooled_bytes=12,
            reserved_bytes=13,
            parked_bytes=14,
            spilled_bytes=15,
            kv_budget_bytes=16,
            row_limit=1,
            governor=GovernorState.SHRINKING,
            total_bytes=17,
            free_bytes=18,
            own_bytes=19,
        ),
    )


def test_metrics_are_scraped_over_http() -> None:
    metrics = Metrics(["a"])
    metrics.engine.snapshot = _snapshot()
    metrics.jobs_submitted.labels(metrics.tenant("a"), "batch").inc()
    metrics.jobs_submitted.labels(metrics.tenant("stranger"), "batch").inc()
    port = metrics.serve("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    for line in (
        'batond_jobs_submitted_total{sla_class="batch",tenant="a"} 1.0',
        f'batond_jobs_submitted_total{{sla_class="batch",tenant="{OTHER_TENANT}"}} 1.0',
        "batond_rows 2.0",
        "batond_rows_busy 1.0",
        'batond_queries{state="parked"} 1.0',
        'batond_queries{state="ready"} 0.0',
        "batond_host_pool_used_bytes 10.0",
        "batond_sessions 3.0",
        "batond_session_bytes 7.0",
        'batond_engine_parks_total{cause="row"} 1.0',
        'batond_engine_parks_total{cause="manual"} 0.0',
        "batond_engine_resumes_total 0.0",
        "batond_engine_of_tomorrow_total 2.0",
        "batond_engine_decode_steps_total 4.0",
        "batond_kv_committed_bytes 11.0",
        "batond_kv_pooled_bytes 12.0",
        "batond_kv_reserved_bytes 13.0",
        "batond_kv_parked_bytes 14.0",
        "batond_kv_spilled_bytes 15.0",
        "batond_kv_budget_bytes 16.0",
        "batond_row_limit 1.0",
        'batond_governor_state{state="shrinking"} 1.0',
        'batond_governor_state{state="off"} 0.0',
        "batond_memory_size_bytes 17.0",
        "batond_memory_free_bytes 18.0",
        "batond_memory_own_bytes 19.0",
    ):
        assert line in text.splitlines()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_the_first_tenants_have_labels_of_their_own_and_keep_them() -> None:
    """However many come and go, no counter falls: nobody's label is given away."""
    metrics = Metrics(["z", "a"], most_tenants=3)
    metrics.know_tenants(["z", "a", "m", "late"])
    metrics.know_tenants(["late", "later"])
    named = [metrics.tenant(name) for name in ("z", "a", "m", "late", "later", "stranger")]
    assert named == ["z", "a", "m", *[OTHER_TENANT] * 3]
    assert Metrics(["a"], most_tenants=0).tenant("a") == OTHER_TENANT


def test_names_keep_the_conventions_of_prometheus() -> None:
    for family in Metrics().registry.collect():
        assert family.name.startswith("batond_")
        assert not family.name.endswith(("_total", "_ms", "_count"))
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


def test_two_daemons_in_one_process_do_not_share_metrics() -> None:
    assert Metrics().registry is not Metrics().registry


@pytest.mark.parametrize("abstract", [pytest.param(True, id="abstract"), pytest.param(False, id="file")])
def test_the_notify_protocol(tmp_path: Path, abstract: object) -> None:
    """V1."""
    name = f"@batond-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(5)
        now_s = [100.0]
        environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "6000000", "WATCHDOG_PID": str(os.getpid())}
        notifier = Notifier(environment, clock=lambda: now_s[0])
        assert notifier.watchdog_s == 6.0
        notifier.loading("loading the model", 30)
        notifier.ready("serving")
        for moment_s in (100.0, 101.0, 101.9, 102.0, 103.0):
            now_s[0] = moment_s
            notifier.alive()
        notifier.reloading("reading")
        notifier.stopping("draining")
        got = [manager.recv(4096).decode() for _ in range(6)]
    assert got == [
        "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=loading the model",
        "READY=1\nSTATUS=serving",
        "WATCHDOG=1",
        "WATCHDOG=1",
        "RELOADING=1\nMONOTONIC_USEC=103000000\nSTATUS=reading",
        "STOPPING=1\nSTATUS=draining",
    ]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"},
    ],
)
def test_without_a_listening_manager_nothing_happens(environment: dict[str, str]) -> None:
    notifier = Notifier(environment)
    assert notifier.watchdog_s is None
    notifier.ready("serving")
    notifier.alive()
