"""An engine process that computes nothing: `python -m batond.bench.fake_engine FD`.

It speaks the engine's side of the wire as the real one does (rows, classes, parks, heartbeats), starts in a
moment and costs next to nothing a step, so that the front and Redis are what is measured, and what faults are
tried on. A query's tokens follow from its prompt and its seed alone: whoever ran it, and however often it was
interrupted, its output must be `fake_tokens`. The time of a step is `BATOND_FAKE_STEP_S` (seconds). With
`BATOND_FAKE_STAMPS` a token's text is the time it left the engine (nanoseconds, monotonic) and a semicolon.

A prompt that begins with a `Fault` ends badly at the output index which its second token names.
"""

from __future__ import annotations

import enum
import hashlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batond.daemon.wire.channel import ChannelClosed, EngineChannel
from batond.daemon.wire.messages import (
    Cancel,
    CommandResult,
    Finished,
    FinishReason,
    HandBack,
    Loading,
    Park,
    ParkCause,
    Preempted,
    QueryFailed,
    QuerySnapshot,
    QueryState,
    Ready,
    Resume,
    Resumed,
    RowSnapshot,
    SetPolicy,
    Snapshot,
    Started,
    StepEvents,
    Stop,
    Submit,
    Tokens,
    Update,
    Usage,
)
from batond.daemon.wire.settings import EngineSettings
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.wire.messages import Command, QueryEvent

VOCAB_SIZE: Final = 1000
MAX_QUERY_TOKENS: Final = 1 << 20
STEP_VARIABLE: Final = "BATOND_FAKE_STEP_S"
STAMPS_VARIABLE: Final = "BATOND_FAKE_STAMPS"
STEP_S: Final = 0.01
HEARTBEAT_S: Final = 0.5
SNAPSHOT_EVERY_S: Final = 0.05
DEATH_STATUS: Final = 70
ROW_STEPS: Final = ("row_steps", "idle_row_steps")


class Fault(enum.IntEnum):
    """First token of a prompt that ends badly."""

    DIE = 901  # The process ends without a word, as after a kill or a device assert.
    FREEZE = 902  # It stops answering, for ever.
    FAIL = 903  # The query fails alone.


def fake_tokens(prompt_token_ids: Sequence[int], seed: int, count: int) -> list[int]:
    """The first `count` output tokens of a query."""
    state = _state(prompt_token_ids, seed)
    return [_token(state, index) for index in range(count)]


def fake_text(token_ids: Sequence[int]) -> str:
    """The text of output tokens, a letter each."""
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def _state(prompt_token_ids: Sequence[int], seed: int) -> hashlib.blake2b:
    return hashlib.blake2b(repr(([int(token) for token in prompt_token_ids], seed)).encode(), digest_size=8)


def _token(state: hashlib.blake2b, index: int) -> int:
    at = state.copy()
    at.update(index.to_bytes(8, "little"))
    return int.from_bytes(at.digest(), "little") % (VOCAB_SIZE - 1) + 1  # 0 ends a sequence.


@dataclass(slots=True)
class _Query:
    submit: Submit
    order: tuple[int, int]  # Order of its class, then arrival: smaller runs first.
    row: int | None = None
    output_tokens: int = 0
    parks: int = 0
    held: bool = False
    started: bool = False
    state: hashlib.blake2b = field(init=False)

    def __post_init__(self) -> None:
        self.output_tokens = len(self.submit.emitted_token_ids)
        self.state = _state(self.submit.prompt_token_ids, self.submit.seed)

    @property
    def fault(self) -> int:
        """The fault that is due now, else 0."""
        kind, at, *_ = [*self.submit.prompt_token_ids, 0, 0]
        return kind if kind >= min(Fault) and at == self.output_tokens else 0

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.submit.prompt_token_ids),
            output_tokens=self.output_tokens,
            parks=self.parks,
            recomputed_tokens=0,
            waited_s=0.0,
            parked_s=0.0,
        )


class FakeEngine:
    """Rows, a line, and a token a step for each row.

    Args:
        channel: The socket to the front.
        settings: Rows, classes and names are used.
        step_s: Time of a step.
        stamps: Whether tokens tell when they left, in place of their text.
    """

    def __init__(
        self, channel: EngineChannel, settings: EngineSettings, step_s: float, *, stamps: bool = False
    ) -> None:
        self._channel, self._step_s, self._stamps = channel, step_s, stamps
        self._classes = SlaClasses(settings.classes)
        self._policy = settings.policy
        self._rows: list[_Query | None] = [None] * settings.rows
        self._queries: dict[str, _Query] = {}
        self._events: list[QueryEvent] = []
        self._steps, self._row_steps = 0, [0.0, 0.0]
        self._arrivals = 0
        self._stopping = False
        self._sent_s = self._snapshot_s = 0.0

    def run(self) -> None:
        """Step until the front says stop or is gone."""
        due_s = time.monotonic()
        while not self._stopping:
            # A step takes its time, whatever comes meanwhile; a late one is not caught up with.
            due_s = max(due_s, time.monotonic() - self._step_s) + self._step_s
            while not self._stopping:
                wait_s = due_s - time.monotonic() if self._queries else HEARTBEAT_S
                commands = self._channel.poll(max(0.0, wait_s))
                for command in commands:
                    self._obey(command)
                # Without queries nothing is due: what a command did, such as an end, is told at once.
                if not commands or not self._queries or time.monotonic() >= due_s:
                    break
            self._step()
            self._report()

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._arrivals += 1
                order = (self._classes.get(command.sla_class).order, self._arrivals)
                self._queries[command.query_id] = _Query(command, order)
            case Park() | Resume():
                self._hold(command)
            case SetPolicy():
                self._policy = command.name
                self._events.append(CommandResult(request_id=command.request_id))
            case Stop():
                self._stopping = True
            case _:
                self._obey_if_known(command)

    def _obey_if_known(self, command: Cancel | HandBack | Update) -> None:
        query = self._queries.get(command.query_id)
        if query is None:
            return
        match command:
            case Cancel():
                self._end(query, FinishReason.CANCELLED)
            case HandBack():
                self._forget(query)
            case Update():
                query.order = (self._classes.get(command.sla_class).order, query.order[1])

    def _hold(self, command: Park | Resume) -> None:
        query = self._queries.get(command.query_id)
        if query is None:
            refusal = CommandResult(
                request_id=command.request_id, reason="NOT_FOUND", message="there is no such query"
            )
            self._events.append(refusal)
            return
        query.held = isinstance(command, Park)
        if query.held and query.row is not None:
            self._park(query, ParkCause.MANUAL, "")
        self._events.append(CommandResult(request_id=command.request_id))

    def _step(self) -> None:
        self._give_rows()
        if (idle := self._rows.count(None)) < len(self._rows):
            self._row_steps[0] += len(self._rows)
            self._row_steps[1] += idle
        for query in [one for one in self._rows if one is not None]:
            match query.fault:
                case Fault.DIE:
                    self._report()
                    os._exit(DEATH_STATUS)
                case Fault.FREEZE:
                    self._report()
                    time.sleep(1e6)
                case Fault.FAIL:
                    self._end(query, None)
                case _:
                    self._advance(query)
        self._steps += bool(self._queries)

    def _give_rows(self) -> None:
        able = sorted((one for one in self._queries.values() if not one.held), key=lambda one: one.order)
        chosen = able[: len(self._rows)]
        for query in able[len(self._rows) :]:
            if query.row is not None:
                self._park(query, ParkCause.ROW, chosen[-1].submit.query_id)
        for query in chosen:
            if query.row is None:
                query.row = self._rows.index(None)
                self._rows[query.row] = query
                kind = Resumed if query.parks and query.started else Started
                query.started = True
                self._events.append(kind(query_id=query.submit.query_id, row=query.row))

    def _park(self, query: _Query, cause: ParkCause, for_query_id: str) -> None:
        self._leave_row(query)
        query.parks += 1
        self._events.append(
            Preempted(
                query_id=query.submit.query_id,
                cause=cause,
                kept=True,
                parked_bytes=1,
                for_query_id=for_query_id,
            )
        )

    def _advance(self, query: _Query) -> None:
        token = _token(query.state, query.output_tokens)
        self._events.append(
            Tokens(
                query_id=query.submit.query_id,
                first_index=query.output_tokens,
                token_ids=[token],
                text=fake_text([token]),
            )
        )
        query.output_tokens += 1
        if query.output_tokens >= query.submit.sampling.max_tokens:
            self._end(query, FinishReason.LENGTH)

    def _end(self, query: _Query, reason: FinishReason | None) -> None:
        self._forget(query)
        name, usage = query.submit.query_id, query.usage()
        if reason is None:
            self._events.append(
                QueryFailed(query_id=name, reason="INTERNAL", message="it was asked to", usage=usage)
            )
        else:
            self._events.append(Finished(query_id=name, finish_reason=reason, usage=usage))

    def _forget(self, query: _Query) -> None:
        self._leave_row(query)
        del self._queries[query.submit.query_id]

    def _leave_row(self, query: _Query) -> None:
        if query.row is not None:
            self._rows[query.row] = None
            query.row = None

    def _report(self) -> None:
        now_s = time.monotonic()
        if not self._events and now_s - self._sent_s < HEARTBEAT_S:
            return
        snapshot = None
        if now_s - self._snapshot_s >= SNAPSHOT_EVERY_S:
            snapshot, self._snapshot_s = self._snapshot(), now_s
        events, self._events = self._events, []
        self._sent_s = now_s
        if self._stamps:
            text = f"{time.monotonic_ns()};"
            events = [
                msgspec.structs.replace(one, text=text) if isinstance(one, Tokens) else one for one in events
            ]
        self._channel.send(
            StepEvents(step=self._steps, events=events, snapshot=snapshot, busy=bool(self._queries))
        )

    def _snapshot(self) -> Snapshot:
        rows = [
            RowSnapshot(row=row)
            if query is None
            else RowSnapshot(
                row=row,
                query_id=query.submit.query_id,
                tenant=query.submit.tenant,
                sla_class=query.submit.sla_class,
                tokens=len(query.submit.prompt_token_ids) + query.output_tokens,
                output_tokens=query.output_tokens,
                max_tokens=query.submit.sampling.max_tokens,
            )
            for row, query in enumerate(self._rows)
        ]
        waiting = [self._waiting(query) for query in self._queries.values() if query.row is None]
        return Snapshot(
            step=self._steps,
            rows=rows,
            queries=waiting,
            columns=0,
            host_pool_used_bytes=0,
            host_pool_bytes=1,
            counters={"decode_steps": self._steps} | dict(zip(ROW_STEPS, self._row_steps, strict=True)),
            policy=self._policy,
        )

    @staticmethod
    def _waiting(query: _Query) -> QuerySnapshot:
        return QuerySnapshot(
            query_id=query.submit.query_id,
            tenant=query.submit.tenant,
            sla_class=query.submit.sla_class,
            state=QueryState.PARKED if query.parks else QueryState.WAITING,
            prompt_tokens=len(query.submit.prompt_token_ids),
            prefilled_tokens=0,
            output_tokens=query.output_tokens,
            max_tokens=query.submit.sampling.max_tokens,
            parks=query.parks,
            # A byte a token, as it says of itself.
            parked_bytes=query.output_tokens + len(query.submit.prompt_token_ids) if query.parks else 0,
            held=query.held,
        )


def fake_ready(**said: Any) -> Ready:
    """What an engine that computes nothing says of itself; `said` takes the place of some of it."""
    plain = Ready(
        model="m",
        device="none",
        rows=4,
        max_query_tokens=64,
        vocab_size=100,
        eos_token_ids=[0],
        batch_kind="fake",
        batch_reason="computes nothing",
        preemption_mode="offload",
        kv_bytes_per_token=1,
        host_pool_bytes=1,
        policy="priority",
        load_s=0.0,
    )
    return msgspec.structs.replace(plain, **said)


def main(descriptor: int) -> int:
    """Serve the front at the other end; returns the exit status."""
    for ignored in (signal.SIGINT, signal.SIGHUP):  # They are for the front, which says when to stop.
        signal.signal(ignored, signal.SIG_IGN)
    channel = EngineChannel(descriptor)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineSettings)
    channel.send(Loading(note="nothing to load"))
    ready = fake_ready(
        model=settings.model_name,
        rows=settings.rows,
        max_query_tokens=settings.max_query_tokens or MAX_QUERY_TOKENS,
        vocab_size=VOCAB_SIZE,
        policy=settings.policy,
    )
    channel.send(ready)
    try:
        step_s, stamps = float(os.environ.get(STEP_VARIABLE, STEP_S)), STAMPS_VARIABLE in os.environ
        FakeEngine(channel, settings, step_s, stamps=stamps).run()
    except ChannelClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
