"""Who is served next: class, tenant by tokens and weight, deadline and arrival. Through the real scripts."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pytest

from batond.daemon.queue import JobState, JobStore, TenantLimits
from batond.daemon.queue.limits import MAX_WEIGHT, MIN_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conftest import Queue

    from batond.daemon.queue import ClaimedJob


@dataclass
class Load:
    """A saturated queue: each tenant has jobs of one kind waiting all the time; rows serve what is claimed.

    Attributes:
        queue: The queue.
        kinds: Tenant -> tokens of a prompt, tokens of its output.
        weights: Where not 1.
        stores: Daemons; each serves `rows` jobs at a time.
        rows: See `stores`.
        backlog: Waiting jobs of each tenant.
        idle: Tenants that send nothing now.
        served: Tokens each tenant got.
    """

    queue: Queue
    kinds: dict[str, tuple[int, int]]
    stores: list[JobStore]
    weights: Mapping[str, float] = field(default_factory=dict)
    rows: int = 4
    backlog: int = 8
    served: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    idle: set[str] = field(default_factory=set)
    made: int = 0
    order: list[str] = field(default_factory=list)
    held: list[list[ClaimedJob]] = field(default_factory=list)

    async def refill(self) -> None:
        """Lets every tenant have its backlog."""
        for tenant, (prompt_tokens, _) in self.kinds.items():
            while tenant not in self.idle and self.waiting[tenant] < self.backlog:
                self.made += 1
                await self.queue.submit(f"j{self.made}", tenant=tenant, prompt_tokens=prompt_tokens)
                self.waiting[tenant] += 1

    async def serve(self, tokens: int) -> None:
        """Runs until so many tokens more are served, all tenants together."""
        limits = {tenant: TenantLimits(weight=weight) for tenant, weight in self.weights.items()}
        self.held = self.held or [[] for _ in self.stores]
        target = self.served.total() + tokens
        while self.served.total() < target:
            await self.refill()
            await asyncio.gather(*(self._turn(i, limits) for i in range(len(self.stores))))

    async def _turn(self, i: int, limits: Mapping[str, TenantLimits]) -> None:
        store, owner, held = self.stores[i], f"d{i}", self.held[i]
        room = {"standard": self.rows - len(held)}
        for job in await store.claim(owner, room, lease_ms=60_000, tenants=limits):
            tenant = job.record.tenant
            self.order.append(tenant)
            self.waiting[tenant] -= 1
            self.served[tenant] += self.kinds[tenant][0]
            held.append(job)
        # Half of the output, then the rest with the end: charges come while others are claimed.
        steps, going = [], []
        for job in held:
            half = self.kinds[job.record.tenant][1] // 2
            started = job.record.state is JobState.RUNNING
            state = JobState.SUCCEEDED if started else JobState.RUNNING
            self.served[job.record.tenant] += half
            steps.append(self.queue.step(job, half * started, *range(half), state=state))
            if not started:
                going.append(
                    msgspec.structs.replace(
                        job, record=msgspec.structs.replace(job.record, state=JobState.RUNNING)
                    )
                )
        self.held[i] = going
        assert (await store.commit_step(owner, steps)).refused == []


async def test_tenants_with_long_and_short_prompts_share_tokens(queue: Queue) -> None:
    """S10: 8k-token prompts against 100-token prompts, equal weights, saturated: shares within 10 %."""
    load = Load(queue, {"a": (8000, 200), "b": (100, 200)}, [queue.store])
    await load.serve(300_000)
    assert 0.9 < load.served["a"] / load.served["b"] < 1.1
    assert load.order.count("b") > 10 * load.order.count("a")


async def test_two_daemons_share_one_account(queue: Queue) -> None:
    """S10: the same with two daemons that claim at once."""
    load = Load(queue, {"a": (2000, 100), "b": (100, 100)}, [queue.another(), queue.another()])
    await load.serve(100_000)
    assert 0.9 < load.served["a"] / load.served["b"] < 1.1


async def test_weights_divide_tokens(queue: Queue) -> None:
    load = Load(queue, {"a": (500, 100), "b": (100, 100)}, [queue.store], weights={"a": 3.0})
    await load.serve(80_000)
    assert 2.6 < load.served["a"] / load.served["b"] < 3.4


@pytest.mark.parametrize("known", [True, False], ids=["seen before", "new"])
async def test_a_tenant_that_was_idle_gets_no_burst(queue: Queue, known: bool) -> None:  # noqa: FBT001 - drawn
    """S10: back after an hour, it gets its share from now on, and nothing for the time it was away."""
    load = Load(queue, {"a": (1000, 100), "b": (1000, 100)}, [queue.store])
    if known:
        load.kinds["c"] = (1000, 100)
        await load.serve(10_000)
        load.idle.add("c")
    await load.serve(60_000)
    load.kinds["c"] = (1000, 100)
    load.idle.clear()
    load.served.clear()
    load.order.clear()
    await load.serve(60_000)
    assert 0.9 < load.served["c"] / (60_000 / 3) < 1.15
    # It may be served as often as any other, from the first job on.
    assert load.order[:12].count("c") <= 6


async def test_a_tenant_in_debt_is_level_again_when_the_queue_was_empty(queue: Queue) -> None:
    load = Load(queue, {"a": (1000, 100)}, [queue.store])
    await load.serve(20_000)
    while load.waiting["a"] or any(load.held):
        await load._turn(0, {})
    await queue.store.reap()
    keys = queue.store.keys
    for key in (keys.turn("standard"), keys.accounts("standard"), keys.floor("standard")):
        assert not await queue.client.exists(key)


async def test_newcomers_are_served_in_the_order_they_came(queue: Queue) -> None:
    """Equal counters: no name goes before another, also against a stream of others."""
    names = ["z", "m", "a", "k", "b"]
    for name in names:
        await queue.submit(name, tenant=name)
    assert [job.record.job_id for job in await queue.claim(3)] == names[:3]
    await queue.submit("0", tenant="0")
    assert [job.record.job_id for job in await queue.claim()] == ["k", "b", "0"]


async def test_the_class_goes_before_the_share(queue: Queue) -> None:
    await queue.submit("a1", tenant="a", sla_class="interactive", prompt_tokens=9000)
    await queue.claim()
    await queue.submit("b1", tenant="b", sla_class="batch")
    await queue.submit("a2", tenant="a", sla_class="interactive")
    await queue.submit("b2", tenant="b", sla_class="interactive")
    assert [job.record.job_id for job in await queue.claim()] == ["b2", "a2", "b1"]


async def test_in_a_tenant_the_earliest_deadline_goes_first(queue: Queue) -> None:
    for job_id, given in {
        "none": {},
        "late": {"deadline_in_ms": 900_000},
        "soon": {"deadline_in_ms": 600_000},
        "class": {"longest_queue_ms": 700_000},
        "none2": {},
    }.items():
        await queue.submit(job_id, **given)
    positions = [(await queue.store.place("t", name)).ahead for name in ("none2", "late", "soon")]
    assert positions == [4, 2, 0]
    order = [job.record.job_id for job in await queue.claim()]
    assert order == ["soon", "class", "late", "none", "none2"]


async def test_a_handed_back_job_keeps_its_place_and_pays_its_prompt_once(queue: Queue) -> None:
    await queue.submit("a", longest_queue_ms=600_000, prompt_tokens=1000)
    await queue.submit("b", longest_queue_ms=600_000, prompt_tokens=1000)
    first = await queue.claim_one()
    await queue.commit(queue.step(first, 0, 1, state=JobState.RUNNING))
    accounts = queue.store.keys.accounts("standard")
    before = await queue.client.zscore(accounts, "t")
    await queue.store.hand_back("d1", "t", "a", 1)
    assert (await queue.claim_one()).record.job_id == "a"
    turn = await queue.client.zscore(queue.store.keys.turn("standard"), "t")
    assert before == turn == 1001


async def test_the_position_counts_the_turns_of_others(queue: Queue) -> None:
    for i in range(5):
        await queue.submit(f"a{i}", tenant="a")
    await queue.submit("b0", tenant="b")
    await queue.submit("b1", tenant="b")

    async def position(tenant: str, job_id: str) -> int:
        return (await queue.store.place(tenant, job_id)).ahead

    assert [await position("a", f"a{i}") for i in range(5)] == [0, 2, 4, 5, 6]
    assert [await position("b", f"b{i}") for i in range(2)] == [1, 3]


async def test_nothing_is_kept_of_tenants_that_are_gone(queue: Queue) -> None:
    """D10: many tenants with one job each leave no key and no entry."""
    await queue.submit("stay", tenant="stay", prompt_tokens=50)
    for i in range(200):
        await queue.submit(f"j{i}", tenant=f"t{i}", ttl_ms=1, deadline_in_ms=900_000)
        for job in await queue.claim(1):
            await queue.commit(queue.step(job, 0, 1, state=JobState.SUCCEEDED))
    for job in await queue.claim():
        await queue.commit(queue.step(job, 0, 1, state=JobState.SUCCEEDED))
    left = await queue.client.keys("*")
    assert not [key for key in left if b"holds" in key or b"line" in key or b"minute" in key]
    await queue.store.reap()
    assert not await queue.client.exists(queue.store.keys.accounts("standard"))


async def test_debts_are_dropped_once_the_floor_has_passed_them(queue: Queue) -> None:
    for i in range(20):
        await queue.submit(f"a{i}", tenant="a", prompt_tokens=100)
    await queue.submit("b", tenant="b", prompt_tokens=150)
    await queue.claim(21)
    accounts = await queue.client.zrange(queue.store.keys.accounts("standard"), 0, -1)
    assert accounts == [b"a"]


async def test_counters_do_not_grow_for_ever(queue: Queue) -> None:
    """Above 2^43 all counters of the class are lowered; the order stays."""
    keys = queue.store.keys
    high = 2.0**43
    await queue.client.set(keys.floor("standard"), high)
    for tenant, more in (("a", 300), ("b", 100), ("c", 200)):
        await queue.client.zadd(keys.accounts("standard"), {tenant: high + more})
        for i in range(2):
            await queue.submit(f"{tenant}{i}", tenant=tenant, prompt_tokens=1000)
    assert [job.record.tenant for job in await queue.claim(3)] == ["b", "c", "a"]
    scores = await queue.client.zrange(keys.turn("standard"), 0, -1, withscores=True)
    assert [(name, int(score)) for name, score in scores] == [(b"b", 800), (b"c", 900), (b"a", 1000)]


async def test_daemons_that_disagree_charge_their_own_claims(queue: Queue) -> None:
    store = queue.store
    for i in range(2):
        await queue.submit(f"a{i}", tenant="a", prompt_tokens=100)
    for owner, weight in (("d1", 1.0), ("d2", 4.0)):
        (job,) = await store.claim(
            owner, {"standard": 1}, lease_ms=60_000, tenants={"a": TenantLimits(weight=weight)}
        )
        await store.commit_step(owner, [queue.step(job, 0, *range(40))])
    assert await queue.client.zscore(store.keys.accounts("standard"), "a") == 100 + 40 + 25 + 10


async def test_jobs_of_an_older_version_are_claimed(queue: Queue) -> None:
    """A queue written before there were lines: only the class's set names its jobs."""
    for i in range(3):
        await queue.submit(f"j{i}")
    keys = queue.store.keys
    await queue.client.delete(keys.line("standard", "t"), keys.turn("standard"), keys.floor("standard"))
    assert [job.record.job_id for job in await queue.claim()] == ["j0", "j1", "j2"]
    assert await queue.store.dead_letters() == []


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), MIN_WEIGHT / 2, MAX_WEIGHT * 2])
def test_weights_out_of_range_are_refused(weight: float) -> None:
    with pytest.raises(Exception, match="weight"):
        TenantLimits(weight=weight)
