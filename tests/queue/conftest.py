"""A real Redis for the queue's tests, started the way a daemon starts its own; emptied before each test."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batond.daemon.queue import (
    Chunk,
    ClaimedJob,
    EmbeddedRedis,
    JobSpec,
    JobStore,
    NewsFeed,
    StepCommit,
    open_async,
)
from batond.daemon.queue.keys import Keys
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    import redis.asyncio

    from batond.daemon.queue.target import RedisTarget

CLASSES = ("interactive", "standard", "batch")
LEASE_MS = 60_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder that takes the server."""
    for item in items:
        if item.path.parent == Path(__file__).parent and {"server", "client", "queue"} & set(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker(pytest.mark.redis)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """Gives a running server with an append-only file and a private socket."""
    embedded = EmbeddedRedis(tmp_path_factory.mktemp("state"))
    embedded.start()
    yield embedded
    embedded.stop()


@pytest.fixture
async def client(server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    """Gives a client of the emptied server."""
    connection = open_async(server.url)
    await connection.config_set("maxmemory-policy", "noeviction")
    await connection.flushall()
    await connection.script_flush()
    yield connection
    await connection.aclose()


@dataclass
class Queue:
    """A store with short words for what tests do all the time."""

    store: JobStore
    client: redis.asyncio.Redis
    url: RedisTarget | str
    owner: str = "d1"
    extra: list[redis.asyncio.Redis] = field(default_factory=list)

    @staticmethod
    def spec(prompt: tuple[int, ...] = (1, 2, 3), **kwargs: Any) -> JobSpec:
        """Gives a small spec."""
        return JobSpec(prompt_token_ids=list(prompt), sampling=SamplingParams(max_tokens=8), seed=7, **kwargs)

    async def submit(self, job_id: str, *, tenant: str = "t", sla_class: str = "standard", **kw: Any) -> bool:
        """Submits; gives whether it was created."""
        given = {"spec_json": msgspec.json.encode(self.spec()), "body_hash": "h"} | kw
        return (await self.store.submit(tenant, job_id, sla_class=sla_class, **given))[1]

    async def claim(
        self, n: int = 10, *, owner: str = "d1", lease_ms: int = LEASE_MS, store: JobStore | None = None
    ) -> list[ClaimedJob]:
        """Claims up to n jobs of each class."""
        return await (store or self.store).claim(owner, dict.fromkeys(CLASSES, n), lease_ms=lease_ms)

    async def claim_one(self, **kw: Any) -> ClaimedJob:
        """Claims exactly one."""
        (job,) = await self.claim(1, **kw)
        return job

    @staticmethod
    def step(job: ClaimedJob, first: int, *tokens: int, text: str = "", **kw: Any) -> StepCommit:
        """Makes a commit of tokens at an index under this claim."""
        chunks = (Chunk(first_index=first, token_ids=list(tokens), text=text),) if tokens or text else ()
        fields = {"epoch": job.record.epoch} | kw
        return StepCommit(tenant=job.record.tenant, job_id=job.record.job_id, **{"chunks": chunks} | fields)

    async def commit(self, *steps: StepCommit, owner: str = "d1") -> list[str]:
        """Commits; gives the reasons of refusals."""
        return [refusal.why.value for refusal in (await self.store.commit_step(owner, steps)).refused]

    async def tokens(self, job_id: str, *, tenant: str = "t", start: int = 0) -> list[int]:
        """Reads committed tokens."""
        chunks = await self.store.read_chunks(tenant, job_id, start)
        return [token for chunk in chunks for token in chunk.token_ids]

    def another(self, **kw: Any) -> JobStore:
        """Gives a store with a connection of its own, as another daemon has."""
        connection = open_async(self.url, key=self.store.keys.base)
        self.extra.append(connection)
        return JobStore(connection, self.store.keys.model, CLASSES, **kw)

    @contextlib.asynccontextmanager
    async def news(self, job_id: str, *, tenant: str = "t") -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Listens to a job as another daemon does; gives what returns when there is news."""
        heard = asyncio.Event()
        store = self.another()
        feed = NewsFeed(store._client.pubsub, store.keys, lambda *_: heard.set())
        feed.listen(tenant, job_id)

        async def wait() -> None:
            async with asyncio.timeout(10):
                await heard.wait()
            heard.clear()

        task = asyncio.create_task(feed.run())
        await wait()  # For the word that it listens.
        yield wait
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def lapse(self, tenant: str, job_id: str, *, alone: bool = False) -> None:
        """Lets the lease of a job be over, without waiting for it; `alone` in its engine, if so."""
        keys = self.store.keys
        if alone:
            record = await self.store.get(tenant, job_id)
            assert await self.store.mark_alone(record.owner, tenant, job_id, record.epoch, alone=True)
        await self.client.zadd(keys.leases, {f"{tenant}/{job_id}": 1}, xx=True)


@pytest.fixture
async def queue(server: EmbeddedRedis, client: redis.asyncio.Redis) -> AsyncIterator[Queue]:
    """Gives an empty queue of model `m`."""
    made = Queue(JobStore(client, "m", CLASSES), client, server.url)
    yield made
    for connection in made.extra:
        await connection.aclose()


@pytest.fixture
async def open_queue() -> AsyncIterator[Callable[..., Queue]]:
    """Opens queues at other servers than this folder's own; each of a model of its own, unless named."""
    opened: list[Queue] = []

    def open_at(target: RedisTarget | str, *, model: str = "", **kw: Any) -> Queue:
        model = model or f"m{uuid.uuid4().hex[:8]}"
        client = open_async(target, key=Keys(model).base)
        opened.append(Queue(JobStore(client, model, CLASSES, **kw), client, target))
        return opened[-1]

    yield open_at
    for one in opened:
        for connection in (one.client, *one.extra):
            await connection.aclose()
