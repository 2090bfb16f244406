"""The demonstration: an urgent job gets in although every row is taken, and nobody loses a token.

Starts the real daemon (embedded Redis, two rows, SmolLM2-135M-Instruct on the CPU) and talks to it over gRPC
as two tenants and an operator. What it checks, it checks on the answers the tenants got.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from batond.bench.local_daemon import LocalDaemon
from batond.clients import Chunk
from batond.clients.batch_view import render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.clients import BatchSnapshot, Client, JobInfo

ROWS = 2
LONG_TOKENS = 96
TOKENS_TIMEOUT_S = 170.0
RUNNING_TOKENS = 24  # Decoded by both long jobs before the urgent one arrives: past the quantum.
LONG_PROMPTS = {
    "lab": "Write a long story about a lighthouse keeper and a storm.",
    "archive": "Explain in detail, step by step, how bread is made.",
}
URGENT_PROMPT = "What is the capital of France? Answer in one sentence."


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demonstration measured.

    Attributes:
        urgent: The urgent job, finished.
        ttft_s: From its submission to its first token, as the client saw it.
        undisturbed: Each tenant's long job, run alone.
        disturbed: The same jobs beside each other and the urgent one.
        parks: Parks of the long jobs.
        parked_bytes: Bytes copied to host RAM for them.
    """

    urgent: JobInfo
    ttft_s: float
    undisturbed: dict[str, JobInfo]
    disturbed: dict[str, JobInfo]
    parks: int
    parked_bytes: int

    @property
    def equal(self) -> bool:
        """Whether every long job gave the tokens of its undisturbed run."""
        return all(
            self.disturbed[tenant].output_token_ids == alone.output_token_ids
            for tenant, alone in self.undisturbed.items()
        )

    @property
    def parked(self) -> list[str]:
        """Tenants whose job was parked."""
        return [tenant for tenant, job in self.disturbed.items() if job.preemptions]


class LiveView:
    """Shows the batch while it runs: redrawn on a terminal, printed at every change of owners elsewhere.

    Args:
        console: Where to draw.
        client: An operator's client.
    """

    def __init__(self, console: Console, client: Client) -> None:
        self._console = console
        self._client = client
        self.latest: BatchSnapshot | None = None
        self.note = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="live-view", daemon=True)

    @contextmanager
    def showing(self) -> Iterator[LiveView]:
        """Draw until the block ends."""
        live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live = live if self._console.is_terminal else None
        if self._live is not None:
            self._live.start()
        self._thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            self._thread.join(timeout=5)
            if self._live is not None:
                self._live.stop()

    def say(self, note: str) -> None:
        """Change the line under the table."""
        self.note = note
        if self._live is None:
            self._console.print(f"> {note}")

    def _watch(self) -> None:
        owners: object = None
        for snapshot in self._client.watch_batch(min_interval_s=0.1):
            self.latest = snapshot
            if self._stopped.is_set():
                return
            if self._live is not None:
                self._live.update(Group(render(snapshot), Text(f"> {self.note}")), refresh=True)
                continue
            now = ([row.job_id for row in snapshot.rows], [(q.job_id, q.state) for q in snapshot.queries])
            if now != owners:
                owners = now
                self._console.print(render(snapshot))


def run(console: Console) -> Outcome:
    """Run the whole story; see the module's docstring."""
    signal.signal(signal.SIGTERM, _leave)  # Else the daemon would outlive us.
    engine = {"rows": ROWS, "max_query_tokens": 1024, "host_pool_bytes": 1 << 28}
    with tempfile.TemporaryDirectory(prefix="batond-demo-") as name:
        daemon = LocalDaemon(Path(name), list(LONG_PROMPTS), model={"path": "smollm2"}, engine=engine)
        try:
            if not console.is_terminal:  # There a status line says nothing.
                console.print("starting Redis, loading the model ...")
            with console.status("starting Redis, loading the model"):
                info = daemon.wait_ready(console.print)
            console.print(
                f"daemon ready: {info.model} on {info.device}, {info.rows} rows, batch {info.batch_kind}"
            )
            return _story(console, daemon)
        finally:
            daemon.stop()


def _leave(number: int, _frame: object) -> NoReturn:
    """End as the signal asks, by way of every `finally`."""
    sys.exit(128 + number)


def _story(console: Console, daemon: LocalDaemon) -> Outcome:
    with daemon.operator() as operator, LiveView(console, operator).showing() as view:
        clients = {tenant: daemon.client(tenant) for tenant in LONG_PROMPTS}
        view.say("each long job runs alone first: the reference")
        undisturbed = {tenant: _long_job(clients[tenant], tenant, wait=True) for tenant in clients}
        parked_before = _counter(view, "parked_bytes")
        view.say("both tenants fill the rows with long batch jobs")
        jobs = {tenant: _long_job(clients[tenant], tenant, wait=False) for tenant in clients}
        _wait_for_tokens(view, set(LONG_PROMPTS))
        view.say("an interactive job arrives; every row is taken")
        urgent, ttft_s = _urgent_job(clients["lab"])
        view.say(f"answered after {ttft_s:.2f} s; the parked job goes on")
        disturbed = {tenant: clients[tenant].wait(job.job_id) for tenant, job in jobs.items()}
        view.say("all done")
        parked_bytes = _counter(view, "parked_bytes") - parked_before
    parks = sum(job.preemptions for job in disturbed.values())
    return Outcome(urgent, ttft_s, undisturbed, disturbed, parks, parked_bytes)


def _long_job(client: Client, tenant: str, *, wait: bool) -> JobInfo:
    job = client.submit(
        messages=[{"role": "user", "content": LONG_PROMPTS[tenant]}],
        sla_class="batch",
        max_tokens=LONG_TOKENS,
        ignore_eos=True,
    )
    return client.wait(job.job_id) if wait else job


def _urgent_job(client: Client) -> tuple[JobInfo, float]:
    started_s = time.perf_counter()
    ttft_s = None
    stream = client.generate(
        messages=[{"role": "user", "content": URGENT_PROMPT}], sla_class="interactive", max_tokens=32
    )
    for event in stream:
        if ttft_s is None and isinstance(event, Chunk):
            ttft_s = time.perf_counter() - started_s
    if ttft_s is None:
        raise SystemExit("the urgent job ended without a token")
    return client.get(stream.job_id), ttft_s


def _wait_for_tokens(view: LiveView, tenants: set[str]) -> None:
    """Wait until each tenant's job has a row and has decoded a while."""
    deadline_s = time.monotonic() + TOKENS_TIMEOUT_S
    while time.monotonic() < deadline_s:
        rows = view.latest.rows if view.latest is not None else ()
        if {row.tenant for row in rows if row.output_tokens >= RUNNING_TOKENS} == tenants:
            return
        time.sleep(0.02)
    raise SystemExit("the long jobs did not get both rows in time")


def _counter(view: LiveView, name: str) -> int:
    """The counter's value in a snapshot drawn after this call began."""
    seen = view.latest
    deadline_s = time.monotonic() + 5
    while view.latest is seen and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return int(view.latest.counters.get(name, 0)) if view.latest is not None else 0


def report(console: Console, outcome: Outcome) -> bool:
    """Print the texts and the summary line; returns whether the promise held."""
    console.print(Panel(Text(outcome.urgent.text), title="interactive: lab", title_align="left"))
    for tenant, job in outcome.disturbed.items():
        parked = f", parked {job.preemptions}x" if job.preemptions else ""
        console.print(Panel(Text(job.text), title=f"batch: {tenant}{parked}", title_align="left"))
    held = outcome.equal and outcome.parks == 1
    console.print(
        f"{'OK' if held else 'FAILED'}: urgent first token after {outcome.ttft_s * 1000:.0f} ms,"
        f" {outcome.parks} park(s) ({', '.join(outcome.parked) or 'nobody'}),"
        f" {outcome.parked_bytes} bytes parked in host RAM,"
        f" tokens {'equal' if outcome.equal else 'DIFFER FROM'} the undisturbed solo run"
    )
    return held
