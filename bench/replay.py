"""Replays requests on a running daemon over gRPC, open loop; gives what came of it as a simulation does."""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batond.clients import Chunk, Finished, JobState, Preempted, Resumed, Started
from batond.daemon.errors import DeadlineError, StateError
from batond.daemon.simulator.engine import Query, Usage
from batond.daemon.simulator.world import WINDOW_S, Outcome, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batond.clients import AsyncClient, Event, JobInfo
    from batond.clients.build import JobOptions
    from batond.daemon.simulator.setup import Setup
    from batond.daemon.simulator.trace import Request


@dataclass(slots=True)
class Replayed:
    """One request as its client saw it; times in seconds from the start of the replay.

    Attributes:
        query: Filled in as the simulator does.
        sent_s: When it was submitted; later than its arrival if the clients' machine was too busy.
        came_s: When tokens came, and how many.
        had_row_s: Spans in which it had a row; an open one ends with infinity.
        recomputes: Parks that kept no KV.
        recomputed_tokens: Computed again after them.
    """

    query: Query
    sent_s: float = math.nan
    came_s: list[tuple[float, int]] = field(default_factory=list)
    had_row_s: list[tuple[float, float]] = field(default_factory=list)
    recomputes: int = 0
    recomputed_tokens: int = 0

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

    def _ended(self, job: JobInfo, now_s: float) -> None:
        query = self.query
        query.end_s, query.parks = now_s, job.preemptions
        self.recomputed_tokens = job.recomputed_tokens
        if job.error_reason == DeadlineError.reason:
            query.fail_late(now_s)
        elif job.state is not JobState.SUCCEEDED or query.left_tokens:
            raise StateError(
                f"job {job.job_id} ended {job.state.name} with {query.output_tokens} of"
                f" {query.request.output_tokens} tokens: {job.error_message}"
            )


async def replay(
    clients: Mapping[str, AsyncClient],
    setup: Setup,
    requests: Sequence[Request],
    vocab_size: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Replayed]:
    """Submit each request at its arrival, whatever has become of the others, and wait for all.

    Args:
        clients: By tenant.
        setup: Gives classes and weights.
        requests: By arrival; they emit exactly their output tokens.
        vocab_size: Prompts are random ids below it, the same in every replay.
        on_done: Told at each end.

    Raises:
        StateError: A job ended otherwise than with all its tokens, or late.
    """
    dice = random.Random(setup.seed)  # noqa: S311 - prompts, no secret
    prompts = [[dice.randrange(vocab_size) for _ in range(one.prompt_tokens)] for one in requests]
    began_s = time.perf_counter()

    async def run(seq: int, request: Request) -> Replayed:
        sla, weight = setup.classes.get(request.sla_class), setup.weight(request.tenant)
        most = request.output_tokens
        one = Replayed(Query(request, sla, seq, weight, most, progress_s=request.arrival_s))
        await asyncio.sleep(request.arrival_s - (time.perf_counter() - began_s))
        one.sent_s = time.perf_counter() - began_s
        options: JobOptions = {
            "token_ids": prompts[seq],
            "sla_class": request.sla_class,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
        }
        if not math.isinf(request.time_limit_s):
            options["time_limit_s"] = request.time_limit_s
        stream = clients[request.tenant].generate(**options)
        async with stream:
            async for event in stream:
                one.saw(event, time.perf_counter() - began_s)
        on_done()
        return one

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run(seq, request)) for seq, request in enumerate(requests)]
    return [task.result() for task in running]


def outcome(name: str, setup: Setup, replayed: Sequence[Replayed]) -> Outcome:
    """As a simulation gives it. How busy engine and rows were is not known to clients: not a number.

    Args:
        name: Shown as the policy's.
        setup: Of the simulation beside it.
        replayed: By arrival.
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
    return max(one.sent_s - one.query.request.arrival_s for one in replayed)


def _waits(one: Replayed, at_s: float) -> bool:
    """Whether a request has arrived and has no row at a time."""
    if not one.query.request.arrival_s <= at_s < one.query.end_s:
        return False
    return not any(start_s <= at_s < end_s for start_s, end_s in one.had_row_s)
