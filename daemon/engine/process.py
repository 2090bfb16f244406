"""The engine process: the same `LocalEngine`, driven by commands from the front.

Started by the front as `python -m batond.daemon.engine.process FD`, with the settings as JSON on standard
input. Nothing here waits for Redis or a client: the only other end is the socket to the front.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from batond.daemon.devices import chosen_device
from batond.daemon.engine.governing import make_governing
from batond.daemon.engine.local import LocalEngine
from batond.daemon.engine.model.causal import load_model
from batond.daemon.errors import BatondError, NotFoundError
from batond.daemon.memory.host import auto_host_pool_bytes, check_host_pool
from batond.daemon.requests.params import SamplingParams
from batond.daemon.scheduler.planner import PlannerLimits
from batond.daemon.wire.channel import ChannelClosed, EngineChannel
from batond.daemon.wire.messages import (
    Begins,
    Cancel,
    CommandResult,
    EngineFailed,
    HandBack,
    LoadFailed,
    Loading,
    Park,
    QueryFailed,
    Ready,
    Resume,
    SetPolicy,
    StepEvents,
    Stop,
    Submit,
    Update,
    Usage,
)
from batond.daemon.wire.settings import EngineSettings
from batond.offload.folder import check_spill_folder
from batond.policies.classes import SlaClasses
from batond.policies.registry import check_configured, load_configured

if TYPE_CHECKING:
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.scheduler.plan import Plan
    from batond.daemon.wire.messages import Command, QueryEvent, Snapshot
    from batond.policies.registry import PolicyOptions

HEARTBEAT_S = 0.5  # The front's watchdog wants to hear from the engine at least once a second.
SNAPSHOT_EVERY_S = 0.05
LOADING_NOTE_EVERY_S = 2.0
FAILED_STATUS = 3  # Exit status after a step that failed as a whole.
MOST_LAST_WORDS = 2000  # Of an exception's text; CUDA's advice is long.

_log = logging.getLogger(__name__)


class EngineProcess:
    """Translates commands into calls, and steps into frames of events.

    Args:
        engine: The engine.
        channel: The socket to the front.
        policy_options: What policies get when `SetPolicy` names them.
    """

    def __init__(
        self, engine: LocalEngine, channel: EngineChannel, policy_options: PolicyOptions | None = None
    ) -> None:
        self._engine = engine
        self._policy_options = policy_options or {}
        self._channel = channel
        self._events: list[QueryEvent] = []
        self._stopping = False
        self._sent_s = 0.0
        self._snapshot_s = 0.0
        self._begun: set[str] = set()
        self._idle_wait_s = min(HEARTBEAT_S, engine.tend_every_s)
        engine.on_event = self._events.append
        engine.on_plan = self._begin
        engine.arrivals = self._command_waits

    def run(self) -> None:
        """Step until the front says stop or is gone."""
        while not self._stopping:
            for command in self._channel.poll(0.0 if self._engine.busy else self._idle_wait_s):
                self._apply(command)
            if self._engine.busy:
                self._engine.step()
            else:
                self._engine.tend()
            self._report()

    def _begin(self, plan: Plan) -> None:
        """Name the queries that the step computes for the first time: it may be the last."""
        planned = {chunk.query_id for chunk in plan.chunks}.union(plan.resume, plan.admit)
        if new := planned - self._begun:
            self._begun = {query_id for query_id in self._begun if query_id in self._engine.queries} | new
            self._channel.send(Begins(query_ids=sorted(new)))

    def _command_waits(self) -> bool:
        """Whether the front has said something; a step begun before it is heard would make it wait."""
        return self._channel.waiting()

    def _apply(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Park() | Resume() | SetPolicy():
                self._answer(command)
            case Cancel():
                query = self._engine.queries.get(command.query_id)
                if query is None:
                    self._engine.counters["unknown_query_ids"] += 1
                else:
                    self._engine.cancel(query)
            case Update():
                query = self._engine.queries.get(command.query_id)
                if query is not None:
                    self._engine.update(query, sla_class=command.sla_class, deadline_s=command.deadline_s)
            case HandBack():
                query = self._engine.queries.get(command.query_id)
                if query is not None:
                    self._engine.forget(query)
            case Stop():
                self._stopping = True

    def _submit(self, command: Submit) -> None:
        try:
            self._engine.submit(
                command.prompt_token_ids,
                command.sampling,
                sla_class=command.sla_class,
                tenant=command.tenant,
                seed=command.seed,
                query_id=command.query_id,
                waited_s=command.waited_s,
                emitted_token_ids=command.emitted_token_ids,
                session_id=command.session_id or None,
                deadline_s=command.deadline_s,
                tenant_weight=command.tenant_weight,
            )
        except BatondError as error:
            usage = Usage(
                prompt_tokens=len(command.prompt_token_ids),
                output_tokens=len(command.emitted_token_ids),
                parks=0,
                recomputed_tokens=0,
                waited_s=0.0,
                parked_s=0.0,
            )
            failed = QueryFailed(
                query_id=command.query_id, reason=error.reason, message=error.message, usage=usage
            )
            self._events.append(failed)

    def _answer(self, command: Park | Resume | SetPolicy) -> None:
        result = CommandResult(request_id=command.request_id)
        try:
            match command:
                case SetPolicy():
                    self._engine.set_policy(load_configured(command.name, self._policy_options))
                    self._snapshot_s = 0.0  # The next frame shows it.
                case Park():
                    self._engine.park(self._known(command.query_id))
                case Resume():
                    self._engine.resume(self._known(command.query_id))
        except BatondError as error:
            result = CommandResult(request_id=command.request_id, reason=error.reason, message=error.message)
        self._events.append(result)

    def _known(self, query_id: str) -> Query:
        query = self._engine.queries.get(query_id)
        if query is None:
            raise NotFoundError(f"query {query_id} is not in the engine", query_id=query_id)
        return query

    def _report(self) -> None:
        """Send what happened; without news, a heartbeat."""
        now_s = time.monotonic()
        if not self._events and now_s - self._sent_s < HEARTBEAT_S:
            return
        frame = StepEvents(
            step=self._engine.counters["steps"],
            events=self._events.copy(),
            snapshot=self._due_snapshot(now_s),
            busy=bool(self._engine.queries),
        )
        self._channel.send(frame)
        self._events.clear()
        self._sent_s = now_s

    def _due_snapshot(self, now_s: float) -> Snapshot | None:
        if now_s - self._snapshot_s < SNAPSHOT_EVERY_S:
            return None
        self._snapshot_s = now_s
        return self._engine.snapshot()


def build_engine(settings: EngineSettings) -> LocalEngine:
    """Load the model and make the engine the settings describe.

    Raises:
        BatondError: It can't be served; the message says what to mend.
    """
    check_configured(settings.policy_options)  # Loading a model takes longer.
    policy = load_configured(settings.policy, settings.policy_options)
    device = chosen_device(settings.device)
    pin = device.startswith("cuda")
    pool_bytes = settings.host_pool_bytes
    if pool_bytes < 0:
        pool_bytes = auto_host_pool_bytes(pin=pin)
    else:
        check_host_pool(pool_bytes, pin=pin)
    governor = make_governing(settings.memory, device, arena=settings.arena)
    spill_bytes = None if settings.spill_bytes < 0 else settings.spill_bytes
    if settings.spill_dir:
        check_spill_folder(Path(settings.spill_dir), spill_bytes)
    model, tokenizer = load_model(
        settings.model_path, dtype=settings.dtype, device=device, threads=settings.threads or None
    )
    return LocalEngine(
        model,
        tokenizer,
        rows=settings.rows,
        batch=settings.batch,
        policy=policy,
        host_pool_bytes=pool_bytes,
        prefill=settings.prefill,
        chunk_tokens=settings.chunk_tokens or None,
        ready_limit=settings.ready_limit,
        overcommit=settings.overcommit,
        max_query_tokens=settings.max_query_tokens or None,
        classes=SlaClasses(settings.classes),
        one_at_a_time=settings.one_at_a_time,
        deterministic=settings.deterministic,
        kernels=settings.kernels,
        graphs=settings.graphs,
        compiled=settings.compiled,
        overlap=settings.overlap,
        arena=settings.arena,
        limits=PlannerLimits(quantum_tokens=settings.quantum_tokens, max_parks=settings.max_parks),
        session_bytes=None if settings.session_bytes < 0 else settings.session_bytes,
        session_ttl_s=settings.session_ttl_s,
        spill_dir=settings.spill_dir or None,
        spill_bytes=spill_bytes,
        governor=governor,
    )


def self_test(engine: LocalEngine) -> None:
    """Produce one token through the whole step, so that Ready is a proven word.

    Raises:
        RuntimeError: No token came.
    """
    probe = engine.submit(
        [0], SamplingParams(max_tokens=1, ignore_eos=True), sla_class=engine.classes.names[0]
    )
    engine.run_until_idle()
    if len(probe.output_token_ids) != 1:
        raise RuntimeError(f"the self-test query ended as {probe.state} without a token: {probe.error}")
    engine.counters.clear()


def engine_main(fd: int, config_json: bytes) -> int:
    """Run the engine process; returns its exit status.

    Args:
        fd: The engine's end of the socket pair.
        config_json: `EngineSettings` as JSON.
    """
    channel = EngineChannel(fd)
    settings = msgspec.json.decode(config_json, type=EngineSettings)
    started_s = time.monotonic()
    try:
        with _LoadingNotes(channel, settings.model_name):
            engine = build_engine(settings)
            self_test(engine)
    except BatondError as error:
        channel.send(LoadFailed(reason=error.reason, message=error.message))
        return 2
    except Exception as error:  # noqa: BLE001 - whatever a model does at load, the front must hear of it
        _log.exception("the engine could not start")
        channel.send(LoadFailed(reason="INTERNAL", message=f"{type(error).__name__}: {error}"))
        return 1
    channel.send(_ready(engine, settings, load_s=time.monotonic() - started_s))
    try:
        EngineProcess(engine, channel, settings.policy_options).run()
    except ChannelClosed:
        pass  # The front is gone: nobody wants tokens from us any more.
    except Exception as error:  # noqa: BLE001 - whatever broke the step, this process can't be trusted any more
        _die(engine, channel, error)
    engine.on_event = None
    engine.close()
    return 0


def _die(engine: LocalEngine, channel: EngineChannel, error: Exception) -> NoReturn:
    """Say what happened, and leave: the front starts a new engine and goes on from the committed tokens.

    Nothing is given back: after a device assert each further call of the driver fails, or hangs.
    """
    _log.error("the engine failed in step %d", engine.counters["steps"], exc_info=error)
    words = f"{error}".strip()[:MOST_LAST_WORDS]
    with contextlib.suppress(ChannelClosed):
        channel.send(EngineFailed(reason=type(error).__name__, message=words, step=engine.counters["steps"]))
    logging.shutdown()
    sys.stderr.flush()
    os._exit(FAILED_STATUS)


def _ready(engine: LocalEngine, settings: EngineSettings, *, load_s: float) -> Ready:
    return Ready(
        model=settings.model_name,
        device=str(engine.model.device),
        rows=engine.rows,
        max_query_tokens=engine.max_query_tokens,
        vocab_size=engine.model.vocab_size,
        eos_token_ids=sorted(engine.model.eos_token_ids),
        batch_kind=engine.batch_kind,
        batch_reason=engine.batch_reason,
        preemption_mode=engine.preemption_mode,
        kv_bytes_per_token=engine.residency.batch.layout.record_bytes,
        host_pool_bytes=engine.residency.store.pool.capacity_bytes,
        policy=engine.planner.policy.name,
        load_s=load_s,
    )


class _LoadingNotes:
    """Tells the front every two seconds that loading goes on, from a thread of its own."""

    def __init__(self, channel: EngineChannel, model: str) -> None:
        self._channel = channel
        self._model = model
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading-notes", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        started_s = time.monotonic()
        while not self._done.wait(LOADING_NOTE_EVERY_S):
            try:
                self._channel.send(
                    Loading(note=f"loading {self._model}, {time.monotonic() - started_s:.0f} s")
                )
            except ChannelClosed:
                os._exit(0)  # The front is gone while a native call loads weights: nothing can be unwound.


def main() -> int:
    """Entry point of `python -m batond.daemon.engine.process FD`."""
    faulthandler.enable()  # Stacks of all threads in the log, also where the front ends a frozen engine.
    # A terminal's Ctrl-C and its end reach the whole process group; the front decides when the engine stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return engine_main(int(sys.argv[1]), sys.stdin.buffer.read())


if __name__ == "__main__":
    sys.exit(main())
