"""A dispatcher on a real Redis, with an engine that computes nothing and dies on cue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pytest

from batond.bench.fake_engine import fake_ready
from batond.daemon.errors import UnavailableError
from batond.daemon.front import suspects
from batond.daemon.front.dispatcher import Dispatcher
from batond.daemon.front.hub import Hub
from batond.daemon.queue import EmbeddedRedis, JobSpec, JobStore, open_async
from batond.daemon.requests.params import SamplingParams
from batond.daemon.telemetry.metrics import Metrics
from batond.daemon.wire.messages import (
    Cancel,
    Finished,
    FinishReason,
    HandBack,
    Ready,
    Started,
    StepEvents,
    Submit,
    Tokens,
    Usage,
)
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import redis.asyncio

    from batond.daemon.front.held import HeldJob
    from batond.daemon.queue import JobRecord

TIMEOUT_S = 20.0
CLASSES = SlaClasses()
#: The first token of a prompt that kills the engine; the second says at which token of a run.
POISON = 666
WHY = "step 7: AcceleratorError: device-side assert; exit status 3"
READY = fake_ready(rows=16, max_query_tokens=4096, vocab_size=1000)


@dataclass
class Run:
    """A query in the toy engine."""

    submit: Submit
    tokens: int
    here: int = 0


class ToyEngine:
    """Token i of every query is i, one a step. A link, as the dispatcher sees it."""

    def __init__(self) -> None:
        self.ready: Ready | None = READY
        self.runs: dict[str, Run] = {}
        self.deaths: list[list[str]] = []  # Who was inside, each time.
        self.died = asyncio.Event()
        self.together: list[frozenset[str]] = []  # Who was computed in each step.
        self.steps = 0
        self.most_ahead = 4.0  # Steps beyond what is committed; a real engine is no faster than that.
        self._news = asyncio.Event()

    def send(self, command: Any) -> None:
        if self.ready is None:
            raise UnavailableError("it is dead", reason="ENGINE_DOWN")
        match command:
            case Submit():
                assert command.query_id not in self.runs
                self.runs[command.query_id] = Run(command, len(command.emitted_token_ids))
            case Cancel() | HandBack():
                self.runs.pop(command.query_id, None)
        self._news.set()

    async def run(self, dispatcher: Dispatcher) -> None:
        while True:
            while not self.runs:
                self._news.clear()
                await self._news.wait()
            await self.step(dispatcher)
            await asyncio.sleep(0)
            while dispatcher._committer.unsaved > self.most_ahead:  # noqa: ASYNC110 - a toy; no event says it
                await asyncio.sleep(0)

    async def step(self, dispatcher: Dispatcher) -> None:
        self.steps += 1
        self.together.append(frozenset(_job(query_id) for query_id in self.runs))
        new = [query_id for query_id, run in self.runs.items() if run.here == 0]
        if new:
            dispatcher.engine_begins(new)
        if any(_strikes(run) for run in self.runs.values()):
            self.die(dispatcher)
            return
        events: list[Any] = []
        for query_id, run in list(self.runs.items()):
            if run.here == 0:
                events.append(Started(query_id=query_id, row=0))
            token = Tokens(query_id=query_id, first_index=run.tokens, token_ids=[run.tokens], text="x")
            events.append(token)
            run.tokens, run.here = run.tokens + 1, run.here + 1
            if run.tokens >= run.submit.sampling.max_tokens:
                usage = Usage(
                    prompt_tokens=2,
                    output_tokens=run.tokens,
                    parks=0,
                    recomputed_tokens=0,
                    waited_s=0.0,
                    parked_s=0.0,
                )
                events.append(Finished(query_id=query_id, finish_reason=FinishReason.LENGTH, usage=usage))
                del self.runs[query_id]
        await dispatcher.engine_step(StepEvents(step=self.steps, events=events))

    def die(self, dispatcher: Dispatcher, *, for_good: bool = False) -> None:
        self.deaths.append(sorted(_job(query_id) for query_id in self.runs))
        self.ready, self.runs = None, {}
        dispatcher.engine_down(WHY)
        self.died.set()
        if for_good:
            return
        self.ready = READY
        dispatcher.engine_up(READY)


def _job(query_id: str) -> str:
    return query_id.rpartition("@")[0].rpartition("/")[2]


def _strikes(run: Run) -> bool:
    prompt = run.submit.prompt_token_ids
    return prompt[0] == POISON and run.here >= prompt[1]


class Keeper:
    """Leases are long enough."""

    def hold(self, *_: Any) -> None: ...

    def drop(self, *_: Any) -> None: ...


@dataclass
class Lab:
    """A dispatcher at work; `async with`."""

    client: redis.asyncio.Redis
    owner: str = "d1"
    lease_s: float = 60.0
    engine: ToyEngine = field(default_factory=ToyEngine)
    hub: Hub = field(default_factory=Hub)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.store = JobStore(self.client, "m", CLASSES.names)
        parts: dict[str, Any] = {"keeper": Keeper(), "link": self.engine}
        self.dispatcher = Dispatcher(
            **parts,
            store=self.store,
            hub=self.hub,
            classes=CLASSES,
            metrics=self.metrics,
            owner=self.owner,
            lease_s=self.lease_s,
            claim_ahead=4,
        )

    async def __aenter__(self) -> Self:
        self.tasks = [
            asyncio.create_task(self.dispatcher.run()),
            asyncio.create_task(self.engine.run(self.dispatcher)),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result

    async def submit(
        self, job_id: str, *prompt: int, max_tokens: int = 40, sla_class: str = "standard"
    ) -> None:
        spec = JobSpec(
            prompt_token_ids=list(prompt or (1, 2)), sampling=SamplingParams(max_tokens=max_tokens), seed=7
        )
        await self.store.submit(
            "t", job_id, spec_json=msgspec.json.encode(spec), body_hash="h", sla_class=sla_class
        )
        self.dispatcher.wake()

    async def ended(self, job_id: str) -> JobRecord:
        """Asks as a client would, until the job has ended."""
        return await self.until(job_id, lambda record: record.state.final)

    async def until(self, job_id: str, true: Callable[[JobRecord], bool]) -> JobRecord:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                record = await self.store.get("t", job_id)
                if true(record):
                    return record
                await asyncio.sleep(0.005)

    async def held(self, job_id: str) -> HeldJob:
        """The job, once it is held here: a claim is in Redis before its answer is here."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                held = self.dispatcher._jobs.get("t", job_id)
                if held is not None:
                    return held
                await asyncio.sleep(0.005)

    async def tokens(self, job_id: str) -> list[int]:
        chunks = await self.store.read_chunks("t", job_id, 0)
        return [token for chunk in chunks for token in chunk.token_ids]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A Redis of these tests' own."""
    embedded = EmbeddedRedis(tmp_path_factory.mktemp("state"))
    embedded.start()
    yield embedded
    embedded.stop()


@pytest.fixture
async def client(server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of it, emptied."""
    connection = open_async(server.url, timeout_s=1.0)
    await connection.flushall()
    yield connection
    await connection.aclose()


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of those who are not suspected are short here."""
    monkeypatch.setattr(suspects, "OPEN_TURN_S", 0.05)


@pytest.fixture
def lab() -> type[Lab]:
    """A dispatcher with a real queue, to be entered."""
    return Lab


@pytest.fixture
def poison() -> int:
    """The first token of a prompt that kills its engine."""
    return POISON
