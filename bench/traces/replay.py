"""Replays requests on a running daemon over gRPC, open loop; gives what came of it as a simulation does."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from batond.bench.traces.workload import prompts
from batond.clients import Chunk, Finished, JobState, Preempted, Resumed, Started
from batond.clients.errors import BatondClientError
from batond.daemon.errors import DeadlineError
from batond.daemon.simulator.engine import Query, Usage
from batond.daemon.simulator.world import WINDOW_S, Outcome, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from batond.clients import AsyncClient, Event, JobInfo
    from batond.clients.build import JobOptions
    from batond.daemon.simulator.setup import Setup
    from batond.daemon.simulator.trace import Request


@dataclass(slots=True)
class Replayed:
    """One request as its client saw it; times in seconds from the start of the replay.

    Attributes:
        query: Filled in as the simulator does.
        sent_s: When it was submitted; later than its arrival if the clients' machine was too busy; not a
            number if it never was.
        came_s: When tokens came, and how many.
        had_row_s: Spans in which it had a row; an open one ends with infinity.
        recomputes: Parks that kept no KV.
        recomputed_tokens: Computed again after them.
        failure: Why it got no, or not all, tokens, though it was in time; empty if it did.
        lesser_class: The less urgent class it was served as, if its tenant may not have its own.
    """

    query: Query
    sent_s: float = math.nan
    came_s: list[tuple[float, int]] = field(default_factory=list)
    had_row_s: list[tuple[float, float]] = field(default_factory=list)
    recomputes: int = 0
    recomputed_tokens: int = 0
    failure: str = ""
    lesser_class: str = ""

    @property
    def ended(self) -> bool:
        """Whether anything came of it."""
        return not math.isnan(self.query.end_s)

    def saw(self, event: Event, now_s: float) -> None:
        """Take an event in."""
        query = self.query
        match event:
            case Started() | Resumed():
                self.had_row_s.append((now_s, math.inf))
            case Preempted():
                self._row_ended(now_s)
                self.recomputes += not event.kept
            case Chunk() if event.token_ids:
                if not self.came_s:
                    query.first_token_s = now_s
                self.came_s.append((now_s, len(event.token_ids)))
                query.output_tokens += len(event.token_ids)
                query.progressed(now_s, now_s)
            case Finished():
                self._row_ended(now_s)
                self._ended(event.job, now_s)
            case _:
                pass

    def _row_ended(self, now_s: float) -> None:
        if self.had_row_s and math.isinf(self.had_row_s[-1][1]):
            self.had_row_s[-1] = (self.had_row_s[-1][0], now_s)

    def failed(self, reason: str, now_s: float) -> None:
        """It ends without what it asked for."""
        self._row_ended(now_s)
        self.failure, self.query.refused, self.query.end_s = reason, True, now_s

    def _ended(self, job: JobInfo, now_s: float) -> None:
        query = self.query
        query.end_s, query.parks = now_s, job.preemptions
        self.recomputed_tokens = job.recomputed_tokens
        if job.effective_sla_class not in {"", query.request.sla_class}:
            self.lesser_class = job.effective_sla_class
        if job.error_reason == DeadlineError.reason:
            query.fail_late(now_s)
        elif job.state is not JobState.SUCCEEDED:
            self.failed(job.error_reason or job.state.name, now_s)
        elif query.left_tokens:
            self.failed(f"ended {query.left_tokens} tokens early", now_s)


@contextlib.contextmanager
def interruptible() -> Iterator[asyncio.Event]:
    """While it lasts, the first Ctrl-C sets the event; a second one ends the program as ever."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def heard() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, heard)
    except (NotImplementedError, RuntimeError, ValueError):  # No such thing here, or not the main thread.
        yield stop
        return
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Replay:
    """What the requests of one replay share."""

    def __init__(
        self,
        clients: Mapping[str, AsyncClient],
        setup: Setup,
        requests: Sequence[Request],
        vocab_size: int,
        on_done: Callable[[], None],
    ) -> None:
        self._clients, self._on_done = clients, on_done
        self._prompts = prompts(requests, vocab_size, setup.seed)
        self.replayed = [
            Replayed(
                Query(
                    request,
                    setup.classes.get(request.sla_class),
                    seq,
                    setup.weight(request.tenant),
                    request.output_tokens,
                    progress_s=request.arrival_s,
                )
            )
            for seq, request in enumerate(requests)
        ]
        self._began_s = time.perf_counter()

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def run(self, one: Replayed) -> None:
        """Submit a request at its arrival and follow it to its end."""
        request = one.query.request
        options: JobOptions = {
            "token_ids": self._prompts[one.query.seq],
            "sla_class": request.sla_class,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
        }
        if not math.isinf(request.time_limit_s):
            options["time_limit_s"] = request.time_limit_s
        await asyncio.sleep(request.arrival_s - self._now_s())
        one.sent_s = self._now_s()
        try:
            async with self._clients[request.tenant].generate(**options) as stream:
                async for event in stream:
                    one.saw(event, self._now_s())
        except BatondClientError as error:
            one.failed(error.reason or type(error).__name__, self._now_s())
        self._on_done()


async def replay(
    clients: Mapping[str, AsyncClient],
    setup: Setup,
    requests: Sequence[Request],
    vocab_size: int,
    *,
    on_done: Callable[[], None] = lambda: None,
    stop: asyncio.Event | None = None,
) -> list[Replayed]:
    """Submit each request at its arrival, whatever has become of the others, and wait for all.

    Args:
        clients: By tenant.
        setup: Gives classes and weights.
        requests: By arrival; they emit exactly their output tokens.
        vocab_size: Prompts are random ids below it, the same in every replay.
        on_done: Told at each end.
        stop: Once it is set, nothing more is sent, and what runs is cancelled; those have no end.
    """
    shared = _Replay(clients, setup, requests, vocab_size, on_done)
    tasks = [asyncio.create_task(shared.run(one)) for one in shared.replayed]
    stopped = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await _first_of(asyncio.gather(*tasks), stopped)
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)
    return shared.replayed


async def _first_of(everything: asyncio.Future[list[None]], stopped: asyncio.Task[Literal[True]]) -> None:
    """Wait until all requests have ended, or none is wanted any more; raises what a request raised."""
    futures: set[asyncio.Future[Any]] = {everything, stopped}
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    if everything.done():
        everything.result()
    else:
        everything.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await everything


def outcome(name: str, setup: Setup, replayed: Sequence[Replayed]) -> Outcome:
    """As a simulation gives it. How busy engine and rows were is not known to clients: not a number.

    Args:
        name: Shown as the policy's.
        setup: Of the simulation beside it.
        replayed: By arrival, all with an end.
    """
    queries = [one.query for one in replayed]
    end_s = max(query.end_s for query in queries)
    windows = [Window() for _ in range(int(end_s // WINDOW_S) + 1)]
    for one in replayed:
        query = one.query
        line = (query.sla.name, query.request.tenant)
        for number, (now_s, tokens) in enumerate(one.came_s):
            window = windows[int(now_s // WINDOW_S)]
            window.output[line] += tokens
            window.served[line] += tokens + (0 if number else query.request.prompt_tokens)
    for number, window in enumerate(windows):
        at_s = (number + 1) * WINDOW_S
        window.waiting = frozenset(
            (one.query.sla.name, one.query.request.tenant) for one in replayed if _waits(one, at_s)
        )
    usage = Usage(
        busy_s=math.nan,
        row_s=math.nan,
        parks=sum(query.parks for query in queries),
        recomputes=sum(one.recomputes for one in replayed),
        computed_tokens=sum(
            query.request.prompt_tokens + query.output_tokens for query in queries if query.output_tokens
        )
        + sum(one.recomputed_tokens for one in replayed),
    )
    return Outcome(name, setup, queries, windows, [usage], end_s)


def lateness_s(replayed: Sequence[Replayed]) -> float:
    """How late the clients sent at worst: an open loop needs clients that keep up."""
    sent = [one for one in replayed if not math.isnan(one.sent_s)]
    return max((one.sent_s - one.query.request.arrival_s for one in sent), default=0.0)


def failures(replayed: Sequence[Replayed]) -> dict[str, int]:
    """How many requests failed, or were not accepted, by the reason that was given."""
    return dict(Counter(one.failure for one in replayed if one.failure))


@dataclass(frozen=True, slots=True)
class Throughput:
    """How much was done a second.

    Attributes:
        requests: That got all their tokens.
        seconds: From the first submission to the last end.
        prompt_tokens: Of these requests.
        output_tokens: Of these requests.
        busy_s: Until the last request got its row: so long somebody waited, or was yet to come.
        busy_output_tokens: Put out until then, by all.
    """

    requests: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    busy_s: float
    busy_output_tokens: int

    @property
    def per_s(self) -> tuple[float, float, float]:
        """Requests, output tokens, and prompt and output tokens, a second."""
        tokens = self.prompt_tokens + self.output_tokens
        return self.requests / self.seconds, self.output_tokens / self.seconds, tokens / self.seconds


def throughput(replayed: Sequence[Replayed]) -> Throughput:
    """Sum up a replay; of one that was stopped, what had ended.

    Args:
        replayed: At least one that ended.
    """
    done = [one.query for one in replayed if one.ended and one.query.served]
    began_s = min(one.sent_s for one in replayed if not math.isnan(one.sent_s))
    ended_s = max(one.query.end_s for one in replayed if one.ended)
    last_row_s = max((one.had_row_s[0][0] for one in replayed if one.had_row_s), default=ended_s)
    return Throughput(
        requests=len(done),
        seconds=max(ended_s - began_s, math.ulp(1.0)),
        prompt_tokens=sum(query.request.prompt_tokens for query in done),
        output_tokens=sum(query.request.output_tokens for query in done),
        busy_s=max(last_row_s - began_s, math.ulp(1.0)),
        busy_output_tokens=sum(
            tokens for one in replayed for now_s, tokens in one.came_s if now_s <= last_row_s
        ),
    )


def _waits(one: Replayed, at_s: float) -> bool:
    """Whether a request has arrived and has no row at a time."""
    if not one.query.request.arrival_s <= at_s < one.query.end_s:
        return False
    return not any(start_s <= at_s < end_s for start_s, end_s in one.had_row_s)
