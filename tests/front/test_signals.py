"""SIGHUP means a reload, unless it means that the terminal is gone; what stops the daemon is told."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys

import pytest
import structlog

from batond.daemon.front.signals import Stop, tell_stop

PROGRAM = """
import asyncio, os, sys
if sys.argv[1]:
    os.open(sys.argv[1], os.O_RDWR)  # The first terminal that a session's leader opens becomes its own.
from batond.daemon.front.signals import on_signals

async def main():
    stop, reload = on_signals()
    print("listening", file=sys.stderr, flush=True)
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, reload)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    print(f"stop: {stop.why}" if stop.is_set() else "reload", file=sys.stderr, flush=True)

asyncio.run(main())
"""


def start(terminal: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, terminal],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "listening\n"
    return process


def test_without_a_terminal_it_means_a_reload() -> None:
    process = start()
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=30)[1] == "reload\n"


def test_with_a_terminal_that_is_there_too() -> None:
    master, slave = pty.openpty()
    process = start(os.ttyname(slave))
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=30)[1] == "reload\n"
    os.close(slave)
    os.close(master)


def test_from_a_closed_terminal_it_means_a_drain() -> None:
    master, slave = pty.openpty()
    process = start(os.ttyname(slave))
    os.close(slave)
    os.close(master)  # The kernel sends SIGHUP to the session's leader.
    assert process.communicate(timeout=30)[1] == "stop: the terminal was closed\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_stops_the_daemon_is_kept_for_the_log(number: signal.Signals) -> None:
    process = start()
    process.send_signal(number)
    assert process.communicate(timeout=30)[1] == f"stop: {number.name}\n"


async def test_a_stop_is_told_at_once_even_while_the_model_is_loaded() -> None:
    """Nothing else shows that the signal was heard: loading may go on for minutes."""
    stop = Stop()
    with structlog.testing.capture_logs() as lines:
        telling = asyncio.create_task(tell_stop(stop))
        await asyncio.sleep(0)
        assert lines == []
        stop.ask("SIGTERM")
        await telling
    assert lines == [
        {"event": "stopping", "why": "SIGTERM", "during": "load", "log_level": "info"},
    ]


def test_before_anybody_listens_it_is_kept() -> None:
    """V2: in the first second of a start it must not end the process; the reload is done afterwards."""
    first = (
        "import os, signal\n"
        "from batond.daemon.early import early\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # Under nohup it is ignored, and stays so.
        "early.listen()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", first + PROGRAM, ""],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        start_new_session=True,
        check=True,
    )
    assert done.stderr == "listening\nreload\n"


def test_the_command_listens_first() -> None:
    """V2: nothing heavy is imported before SIGHUP is heard."""
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import batond.daemon.main\n"
        "assert not {'torch', 'typer', 'grpc', 'pydantic'} & (set(sys.modules) - before)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
