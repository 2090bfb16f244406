"""The queue's model against the real scripts on a real Redis: the same calls, the same claims."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ExhaustedError
from batond.daemon.queue import Chunk, EmbeddedRedis, JobState, JobStore, StepCommit, open_async
from batond.daemon.queue import calls as queue_calls
from batond.daemon.queue.limits import NO_LIMITS, TenantLimits
from batond.daemon.simulator.fair_queue import NEVER_MS, FairQueue, Spent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import redis.asyncio

    from batond.daemon.queue import ClaimedJob

pytestmark = pytest.mark.redis

CLASSES = ("interactive", "standard", "batch")
#: In Redis they stand in the order of their quoted names, which is not that of the names.
TENANTS = ("a", "b", "Zoë", "~x", "/y", "m n")
DAEMONS = ("d1", "d2", "d3")
NEVER_LEASE_MS = 10**12
BEGIN_MS = 1_700_000_000_000 // 60_000 * 60_000
TIME = "server.call('TIME')"
CLOCK = "redis.call('HMGET', 'test:time', 's', 'us')"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """Gives a running server."""
    embedded = EmbeddedRedis(tmp_path_factory.mktemp("state"))
    embedded.start()
    yield embedded
    embedded.stop()


@pytest.fixture
async def client(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[redis.asyncio.Redis]:
    """Gives a client of the emptied server, whose scripts read the time from a key."""
    load = queue_calls.load_script

    def clocked(name: str) -> queue_calls.Script:
        source = load(name).source
        assert source.count(TIME) == 1
        source = source.replace(TIME, CLOCK)
        return queue_calls.Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())

    monkeypatch.setattr(queue_calls, "load_script", clocked)
    connection = open_async(server.url)
    await connection.flushall()
    yield connection
    await connection.aclose()


@dataclass
class Both:
    """Gives every call to the scripts and to the model, and compares."""

    client: redis.asyncio.Redis
    limits: dict[str, TenantLimits]
    max_queued: int
    now_ms: int = BEGIN_MS
    made: int = 0
    running: dict[str, list[ClaimedJob]] = field(default_factory=lambda: {name: [] for name in DAEMONS})
    emitted: dict[str, int] = field(default_factory=dict)
    done: int = 0

    def __post_init__(self) -> None:
        self.store = JobStore(self.client, "m", CLASSES, max_queued=self.max_queued)
        self.model: FairQueue[str] = FairQueue(self.limits, self.max_queued)

    async def wait(self, ms: int) -> None:
        self.now_ms += ms
        seconds, rest_ms = divmod(self.now_ms, 1000)
        await self.client.hset("test:time", mapping={"s": seconds, "us": rest_ms * 1000})

    async def submit(self, tenant: str, sla_class: str, prompt_tokens: int, dues: tuple[int, int]) -> None:
        """Submit; `dues` are time limit and longest queue time in ms, 0 is none."""
        job_id, self.made = f"{self.made:06}", self.made + 1
        limit_ms, longest_ms = dues
        try:
            await self.store.submit(
                tenant,
                job_id,
                spec_json=b'{"prompt_token_ids":[1],"sampling":{},"seed":1}',
                body_hash="h",
                sla_class=sla_class,
                prompt_tokens=prompt_tokens,
                deadline_in_ms=limit_ms or None,
                longest_queue_ms=longest_ms,
                limits=self.limits.get(tenant, NO_LIMITS),
            )
            real = True
        except ExhaustedError:
            real = False
        due_ms = min([NEVER_MS, *(self.now_ms + ms for ms in dues if ms)])
        assert self.model.add(sla_class, tenant, prompt_tokens, job_id, due_ms) is real

    async def claim(self, owner: str, rooms: dict[str, int]) -> None:
        jobs = await self.store.claim(owner, rooms, lease_ms=NEVER_LEASE_MS, tenants=self.limits)
        expected = []
        for name in CLASSES:
            expected += self.model.claim(name, rooms.get(name, 0), self.now_ms) if rooms.get(name) else []
        assert [job.record.job_id for job in jobs] == expected
        self.running[owner] += jobs
        self.done += len(jobs)

    async def step(self, owner: str, dice: random.Random) -> None:
        """Some of a daemon's jobs emit tokens, some end; one commit, as the dispatcher does."""
        commits, spent, ended = [], [], []
        for job in list(self.running[owner]):
            record = job.record
            tokens = dice.choice((0, 1, 1, 7))
            ends = dice.random() < 0.4
            at = self.emitted.get(record.job_id, 0)
            if not (tokens or ends):
                continue
            chunks = (Chunk(first_index=at, token_ids=[1] * tokens, text="x"),) if tokens else ()
            state = JobState.SUCCEEDED if ends else None
            commits.append(
                StepCommit(
                    tenant=record.tenant,
                    job_id=record.job_id,
                    epoch=record.epoch,
                    chunks=chunks,
                    state=state,
                )
            )
            self.emitted[record.job_id] = at + tokens
            if tokens:
                spent.append(Spent(record.sla_class, record.tenant, tokens))
            if ends:
                ended.append(record.tenant)
                self.running[owner].remove(job)
        assert not (await self.store.commit_step(owner, commits)).refused
        self.model.commit(spent, ended, self.now_ms)

    async def reap(self) -> None:
        reaped = await self.store.reap()
        late = {job_id for _, job_id in reaped.late}
        self.model.reap(self.now_ms)
        # Those that a claim met were failed by it, in both.
        assert late <= set(self.model.late)

    async def check_late(self) -> None:
        """All that failed, and nothing else."""
        failed = set()
        for tenant in TENANTS:
            page = await self.store.list_jobs(tenant, state=JobState.FAILED, limit=1000)
            failed |= {record.job_id for record in page.jobs}
        assert failed == set(self.model.late)


def limits_of(dice: random.Random, *, quotas: bool) -> dict[str, TenantLimits]:
    """Weights, and quotas of some tenants."""
    given = {}
    for tenant in TENANTS:
        if dice.random() < 0.7:
            given[tenant] = TenantLimits(
                weight=dice.choice((0.1, 0.5, 1.0, 2.0, 3.0, 7.5)),
                queued=dice.choice((0, 0, 5)) if quotas else 0,
                running=dice.choice((0, 1, 3)) if quotas else 0,
                tokens_per_minute=dice.choice((0, 40, 300)) if quotas else 0,
            )
    return given


async def play(both: Both, dice: random.Random, *, dues: bool, calls: int) -> None:
    """Random calls, with idle times long enough for counters to be forgotten and minutes to pass."""
    times = (0, 0, 1, 2500, 30_000) if dues else (0,)
    for _ in range(calls):
        await both.wait(dice.choice((0, 0, 0, 1, 40, 900, 7000)))
        match dice.choice("ssssscccttr"):
            case "s":
                tenant, sla_class = dice.choice(TENANTS), dice.choice(CLASSES)
                for _ in range(dice.choice((1, 1, 4))):
                    wanted = (dice.choice(times), dice.choice(times))
                    await both.submit(tenant, sla_class, dice.choice((0, 3, 3, 100, 1000)), wanted)
            case "c":
                rooms = {name: dice.choice((0, 1, 2, 5)) for name in CLASSES}
                await both.claim(dice.choice(DAEMONS), rooms)
            case "t":
                await both.step(dice.choice(DAEMONS), dice)
            case _:
                await both.reap()
    while both.model.has_waiting or any(both.running.values()):  # What was kept back comes out in its order.
        await both.wait(5000)
        for owner in DAEMONS:
            await both.claim(owner, dict.fromkeys(CLASSES, 3))
            await both.step(owner, dice)
        await both.reap()
    await both.reap()  # Nothing waits or runs: counters are forgotten.


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["shares", "quotas", "late", "all"])
async def test_the_model_claims_what_the_scripts_claim(
    client: redis.asyncio.Redis, kind: str, seed: int
) -> None:
    """S10: classes, weights, debts, floors, ties, quotas and late jobs over three daemons on one queue."""
    dice = random.Random(f"{kind} {seed}")
    both = Both(client, limits_of(dice, quotas=kind in {"quotas", "all"}), max_queued=30)
    await both.wait(0)
    for _ in range(3):
        await play(both, dice, dues=kind in {"late", "all"}, calls=40)
    await both.check_late()
    assert both.done > 20
