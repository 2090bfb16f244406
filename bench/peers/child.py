"""`python -m batond.bench.peers.child TASK ANSWERS`: one peer's process.

Reads the task, writes an answer a line as it has it. What goes wrong is an answer too, so that those before
it count. Leaves without tearing anything down: some engines take long for that, or hang.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec

from batond.bench.peers.drive import measure_urgent, saturate
from batond.bench.peers.task import Answer, Failed, Missing, PeerMissingError, Ready, Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.bench.peers.session import Adapter, Peer
    from batond.bench.peers.task import Urgency

#: Module of each peer's adapter. The names are those of the command line.
ADAPTERS: Final = {
    "batond": "batond_engine",
    "generate": "transformers_generate",
    "transformers": "transformers_batching",
    "transformers-graphs": "transformers_batching",
    "transformers-offload": "transformers_batching",
    "vllm": "vllm_engine",
    "vllm-priority": "vllm_engine",
}


def run(task: Task, say: Callable[[Answer], None], *, began_s: float) -> None:
    """Do all of a task.

    Args:
        task: What to do.
        say: Takes the answers.
        began_s: When the process began, by `time.perf_counter`.
    """
    try:
        module = importlib.import_module(f"batond.bench.peers.{ADAPTERS[task.peer]}")
        peer = cast("Adapter", module.make)(task)
    except PeerMissingError as error:
        say(Missing(str(error)))
        return
    except ImportError as error:
        say(Missing(f"{error}"))
        return
    except Exception as error:  # noqa: BLE001 - a peer's own, of whatever kind; it is an answer
        say(Failed("start", _words(error)))
        return
    say(Ready(about=peer.about, seconds=time.perf_counter() - began_s))
    measurements: list[tuple[str, Callable[[], None]]] = []
    if task.work:
        measurements += [(f"{rows} rows", partial(_saturate, peer, task, rows, say)) for rows in task.rows]
    if task.urgency is not None:
        measurements.append(("urgent", partial(_urgent, peer, task, task.urgency, say)))
    for what, measure in measurements:
        try:
            measure()
        except Exception as error:  # noqa: BLE001 - likewise; the next measurement may do
            say(Failed(what, _words(error)))
    say(Ready(about=peer.about, seconds=time.perf_counter() - began_s))


def _saturate(peer: Peer, task: Task, rows: int, say: Callable[[Answer], None]) -> None:
    session = peer.open(rows, streamed=False)
    try:
        for one in saturate(session, task, rows):
            say(one)
    finally:
        session.close()


def _urgent(peer: Peer, task: Task, urgency: Urgency, say: Callable[[Answer], None]) -> None:
    session = peer.open(urgency.rows, streamed=True)
    try:
        say(measure_urgent(session, task, urgency))
    finally:
        session.close()


def _words(error: Exception) -> str:
    traceback.print_exception(error)  # The parent keeps what stands on standard error.
    return f"{type(error).__name__}: {error}"[:400]


def main() -> None:
    """Entry point."""
    began_s = time.perf_counter()
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    encoder = msgspec.json.Encoder()
    with Path(sys.argv[2]).open("ab", buffering=0) as file:

        def say(answer: Answer) -> None:
            file.write(encoder.encode(answer) + b"\n")

        run(task, say, began_s=began_s)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
