"""The queue against a plain Python model of it: random orders of all that can be done to jobs.

More than 400 lines, since the model is one: its parts can't be read apart.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from batond.bench.faults.counts import full_or
from batond.daemon.queue import (
    Chunk,
    ClaimedJob,
    JobSpec,
    JobState,
    JobStore,
    StepCommit,
    TenantLimits,
    open_async,
    open_sync,
)
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from batond.daemon.queue import EmbeddedRedis

CLASSES = ("interactive", "batch")
OWNERS = ("d1", "d2")
MAX_ATTEMPTS = 2
SPEC = msgspec.json.encode(JobSpec(prompt_token_ids=[1], sampling=SamplingParams(), seed=1))

TENANT_OF = {"a": "t", "b": "t", "c": "t", "d": "u", "e": "u", "f": "v"}
#: The daemons don't agree about weights.
WEIGHTS = {"d1": {"t": 1.0, "u": 2.0, "v": 0.5}, "d2": {"t": 1.0, "u": 1.0, "v": 1.0}}
STEP = 2.0**-9  # QUEUE_STEP of line.lua

job_ids = st.sampled_from(list(TENANT_OF))
owners = st.sampled_from(OWNERS)


@dataclass
class Job:
    """What the model knows of a job."""

    job_id: str
    sla_class: str
    arrival: int
    due: float = math.inf  # Only the order of due times matters.
    prompt_tokens: int = 1
    weight: float = 1.0
    late: bool = False
    state: str = "queued"
    owner: str = ""
    epoch: int = 0
    attempts: int = 0
    handed_back: int = 0
    lapses: int = 0
    cancel: bool = False
    tokens: list[int] = field(default_factory=list)

    @property
    def tenant(self) -> str:
        """Whose."""
        return TENANT_OF[self.job_id]

    def give_up(self, *, charge: bool) -> None:
        """Ends the claim."""
        self.attempts += charge
        self.owner = ""
        if self.cancel:
            self.state = "cancelled"
        elif charge and self.attempts >= MAX_ATTEMPTS:
            self.state = "dead"
        else:
            self.state = "queued"

    def end(self, state: str) -> None:
        """Ends the job."""
        self.state, self.owner = state, ""


@dataclass
class Shares:
    """The counters of one class, in plain Python; see line.lua."""

    floor: float | None = None
    accounts: dict[str, float] = field(default_factory=dict)
    turns: dict[str, float] = field(default_factory=dict)
    waiting: list[Job] = field(default_factory=list)

    def from_floor(self) -> float:
        """Where a new tenant begins."""
        return self.floor if self.floor is not None else min(self.turns.values(), default=0.0)

    def counter(self, tenant: str) -> float:
        """Where a tenant without a turn goes on."""
        return max(self.from_floor(), self.accounts.get(tenant, 0.0))

    def enter(self, job: Job) -> None:
        """A job begins to wait."""
        self.waiting.append(job)
        if job.tenant not in self.turns:
            counter, floor = self.counter(job.tenant), self.from_floor()
            self.turns[job.tenant] = counter
            if counter <= floor:
                self.floor = floor + STEP

    def leave(self, job: Job) -> None:
        """A job waits no more."""
        self.waiting.remove(job)
        if all(other.tenant != job.tenant for other in self.waiting):
            del self.turns[job.tenant]

    def charge(self, tenant: str, cost: float) -> None:
        """Output was committed."""
        self.accounts[tenant] = self.turns.get(tenant, self.counter(tenant)) + cost
        if tenant in self.turns:
            self.turns[tenant] = self.accounts[tenant]

    def claim(self, room: int, weights: dict[str, float]) -> list[Job]:
        """Takes jobs; fails the late ones it meets."""
        taken: list[Job] = []
        highest = 0.0
        while len(taken) < room and self.turns:
            counter, tenant = min((counter, tenant) for tenant, counter in self.turns.items())
            line = [job for job in self.waiting if job.tenant == tenant]
            job = min(line, key=lambda one: (one.due, one.arrival))
            self.leave(job)
            if job.late:
                job.end("failed")
                continue
            cost = job.prompt_tokens / weights[tenant] if job.epoch == 0 else 0.0
            if job.epoch == 0 or tenant not in self.turns:
                self.accounts[tenant] = counter + cost
            if tenant in self.turns:
                self.turns[tenant] = counter + cost
            job.weight = weights[tenant]
            taken.append(job)
            highest = max(highest, counter)
        if taken:
            self.floor = max(self.from_floor(), highest)
            self.accounts = {name: at for name, at in self.accounts.items() if at > self.floor}
        return taken

    def reap(self, *, idle: bool) -> list[Job]:
        """Fails what is late; forgets the counters if nothing runs or waits."""
        late = [job for job in self.waiting if job.late]
        for job in late:
            self.leave(job)
            job.end("failed")
        if idle and not self.waiting:
            self.floor, self.accounts = None, {}
        return late


class QueueMachine(RuleBasedStateMachine):
    """Each rule does one thing to the queue and to the model, and compares the answers."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        with open_sync(self.url) as plain:
            plain.flushall()
        self.loop = asyncio.new_event_loop()
        self.clients = {owner: open_async(self.url) for owner in OWNERS}
        self.stores = {
            owner: JobStore(client, "m", CLASSES, max_attempts=MAX_ATTEMPTS)
            for owner, client in self.clients.items()
        }
        self.jobs: dict[str, Job] = {}
        self.shares = {sla_class: Shares() for sla_class in CLASSES}
        self.arrivals = 0
        self.claims: list[tuple[str, ClaimedJob]] = []  # Every claim ever made: also the late ones may write.

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Runs one call to its end."""
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        """Closes the connections."""
        for client in self.clients.values():
            self.run(client.aclose())
        self.loop.close()

    @rule(
        job_id=job_ids,
        sla_class=st.sampled_from(CLASSES),
        owner=owners,
        prompt_tokens=st.integers(1, 40),
        minutes=st.sampled_from([None, None, 20, 40]),
    )
    def submit(
        self, job_id: str, sla_class: str, owner: str, prompt_tokens: int, minutes: int | None
    ) -> None:
        """Creates or attaches."""
        _, created = self.run(
            self.stores[owner].submit(
                TENANT_OF[job_id],
                job_id,
                spec_json=SPEC,
                body_hash="h",
                sla_class=sla_class,
                prompt_tokens=prompt_tokens,
                deadline_in_ms=None if minutes is None else minutes * 60_000,
            )
        )
        assert created == (job_id not in self.jobs)
        if created:
            self.arrivals += 1
            due = math.inf if minutes is None else minutes
            job = Job(job_id, sla_class, self.arrivals, due, prompt_tokens)
            self.jobs[job_id] = job
            self.shares[sla_class].enter(job)

    @rule(job_id=job_ids)
    def expire(self, job_id: str) -> None:
        """The deadline of a waiting job passes."""
        job = self.jobs.get(job_id)
        if job is not None and job.state == "queued":
            job.late = True
            keys, ref = self.stores["d1"].keys, f"{job.tenant}/{job_id}"
            self.run(self.clients["d1"].hset(keys.job(ref), "deadline_ms", 1))
            self.run(self.clients["d1"].zadd(keys.due, {ref: 1}))

    @rule(owner=owners, interactive=st.integers(0, 2), batch=st.integers(0, 2))
    def claim(self, owner: str, interactive: int, batch: int) -> None:
        """Takes by class, share, due time and arrival; gives the tokens there are."""
        limits = {"interactive": interactive, "batch": batch}
        expected = []
        for sla_class in CLASSES:
            expected += self.shares[sla_class].claim(limits[sla_class], WEIGHTS[owner])
        tenants = {tenant: TenantLimits(weight=weight) for tenant, weight in WEIGHTS[owner].items()}
        claimed = self.run(self.stores[owner].claim(owner, limits, lease_ms=600_000, tenants=tenants))
        assert [job.record.job_id for job in claimed] == [job.job_id for job in expected]
        for got in claimed:
            job = self.jobs[got.record.job_id]
            job.state, job.owner, job.epoch = "claimed", owner, job.epoch + 1
            assert (got.record.epoch, got.token_ids, got.record.attempts) == (
                job.epoch,
                job.tokens,
                job.attempts,
            )
            self.claims.append((owner, got))

    @rule(
        pick=st.integers(0, 99),
        offset=st.integers(-3, 1),
        count=st.integers(0, 3),
        state=st.sampled_from([None, "running", "parked", "succeeded", "failed", "cancelled"]),
    )
    def commit(self, pick: int, offset: int, count: int, state: str | None) -> None:
        """Writes under any claim ever made, at any index near the end."""
        if not self.claims:
            return
        owner, claim = self.claims[pick % len(self.claims)]
        job_id = claim.record.job_id
        job = self.jobs[job_id]
        first = max(0, len(job.tokens) + offset)
        tokens = list(range(first, first + count))
        commit = StepCommit(
            tenant=job.tenant,
            job_id=job_id,
            epoch=claim.record.epoch,
            chunks=(Chunk(first_index=first, token_ids=tokens),) if tokens else (),
            state=JobState(state) if state else None,
        )
        result = self.run(self.stores[owner].commit_step(owner, [commit]))
        before = len(job.tokens)
        assert [r.why.value for r in result.refused] == self.expect(
            job, (owner, claim.record.epoch), first, tokens, state
        )
        if len(job.tokens) > before:
            self.shares[job.sla_class].charge(job.tenant, (len(job.tokens) - before) / job.weight)
        told = job.cancel and job.owner and not result.refused
        assert result.cancel == ([(job.tenant, job_id)] if told else [])

    @staticmethod
    def expect(
        job: Job, claim: tuple[str, int], first: int, tokens: list[int], state: str | None
    ) -> list[str]:
        """What the model says to a commit; changes the model if it is accepted."""
        final = job.state in {"succeeded", "failed", "cancelled", "dead"}
        if final:
            return [] if (state, claim[1]) == (job.state, job.epoch) else ["final"]
        if (job.owner, job.epoch) != claim:
            return ["fenced"]
        end = first + len(tokens)
        if tokens and first > len(job.tokens):
            return ["gap"]
        if tokens and first < len(job.tokens) < end:
            return ["overlap"]
        if tokens and end > len(job.tokens):
            job.tokens += tokens
        if state in {"succeeded", "failed", "cancelled"}:
            job.end(state)
        elif state:
            job.state = state
        elif tokens and job.state == "claimed":
            job.state = "running"
        return []

    @rule(job_id=job_ids, owner=owners)
    def cancel(self, job_id: str, owner: str) -> None:
        """Ends a waiting job, flags a running one."""
        if job_id not in self.jobs:
            return
        job = self.jobs[job_id]
        record = self.run(self.stores[owner].cancel(job.tenant, job_id))
        if job.state == "queued":
            self.shares[job.sla_class].leave(job)
            job.end("cancelled")
        elif job.owner:
            job.cancel = True
        assert record.state == job.state

    @rule(pick=st.integers(0, 99), charge=st.booleans())
    def hand_back(self, pick: int, charge: bool) -> None:  # noqa: FBT001 - drawn by hypothesis
        """Gives up under any claim ever made."""
        if not self.claims:
            return
        owner, claim = self.claims[pick % len(self.claims)]
        job = self.jobs[claim.record.job_id]
        outcome = self.run(
            self.stores[owner].hand_back(owner, job.tenant, job.job_id, claim.record.epoch, charge=charge)
        )
        if (job.owner, job.epoch) != (owner, claim.record.epoch):
            assert outcome == "refused"
        else:
            job.handed_back += not charge
            self.give_up(job, charge=charge)
            assert outcome == job.state

    def give_up(self, job: Job, *, charge: bool) -> None:
        """Ends a claim; the job waits again, or has ended."""
        job.give_up(charge=charge)
        if job.state == "queued":
            self.shares[job.sla_class].enter(job)

    @rule(job_id=job_ids, owner=owners, alone=st.booleans())
    def lapse(self, job_id: str, owner: str, alone: bool) -> None:  # noqa: FBT001 - hypothesis fills it
        """A lease runs out; somebody reaps; its holder learns of it by a renewal."""
        store = self.stores[owner]
        holder = self.jobs.get(job_id)
        if alone and holder is not None and holder.owner:
            claim = (holder.owner, holder.tenant, job_id, holder.epoch)
            assert self.run(store.mark_alone(*claim, alone=True))
        ref = f"{TENANT_OF[job_id]}/{job_id}"
        self.run(self.clients[owner].zadd(store.keys.leases, {ref: 1}, xx=True))
        reaped = self.run(store.reap())
        expected = []
        job = self.jobs.get(job_id)
        if job is not None and job.owner:
            self.stores[job.owner].forget(job.owner, job.tenant, job_id, epoch=job.epoch)
            job.lapses += not alone
            self.give_up(job, charge=alone)
            expected = [(job.tenant, job_id, job.state)]
        came_to = {"queued": reaped.requeued, "cancelled": reaped.cancelled, "dead": reaped.dead}
        assert [(*ref, state) for state, refs in came_to.items() for ref in refs] == expected
        idle = not any(job.owner for job in self.jobs.values())
        late = [job for shares in self.shares.values() for job in shares.reap(idle=idle)]
        assert sorted(reaped.late) == sorted((job.tenant, job.job_id) for job in late)

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        """A daemon drains."""
        released = self.run(self.stores[owner].release_owner(owner))
        held = [job for job in self.jobs.values() if job.owner == owner]
        assert sorted(released) == sorted((job.tenant, job.job_id) for job in held)
        for _, job_id in released:  # The order in which they come back.
            self.jobs[job_id].handed_back += 1
            self.give_up(self.jobs[job_id], charge=False)

    @rule(job_id=job_ids)
    def retry(self, job_id: str) -> None:
        """An operator revives a dead job."""
        job = self.jobs.get(job_id)
        if job is not None and job.state == "dead":
            self.run(self.stores["d1"].dead_retry(f"{job.tenant}/{job_id}"))
            job.state, job.attempts, job.lapses = "queued", 0, 0
            self.shares[job.sla_class].enter(job)

    @invariant()
    def agrees(self) -> None:
        """Queue and model say the same of every job, and the shared sets hold just the right jobs."""
        store = self.stores["d1"]
        for job_id, job in self.jobs.items():
            record = self.run(store.get(job.tenant, job_id))
            seen = (record.state, record.owner, record.epoch, record.attempts, record.lapses)
            assert seen == (job.state, job.owner, job.epoch, job.attempts, job.lapses)
            assert record.handed_back == job.handed_back
            assert record.output_tokens == len(job.tokens)
            chunks = self.run(store.read_chunks(job.tenant, job_id))
            assert [token for chunk in chunks for token in chunk.token_ids] == job.tokens
        counts = self.run(store.counts())
        states = [job.state for job in self.jobs.values()]
        assert counts.held == sum(bool(job.owner) for job in self.jobs.values())
        assert sum(counts.queued.values()) == states.count("queued")
        assert counts.dead == states.count("dead")
        late = [job for job in self.jobs.values() if job.late and job.state == "failed"]
        assert counts.totals.get("late", 0) == len(late)

    @invariant()
    def shares_agree(self) -> None:
        """The counters of the tenants are those of the model, to the last digit."""
        keys, client = self.stores["d1"].keys, self.clients["d1"]
        for sla_class, shares in self.shares.items():
            turns, accounts = (
                {name.decode(): score for name, score in self.run(client.zrange(key, 0, -1, withscores=True))}
                for key in (keys.turn(sla_class), keys.accounts(sla_class))
            )
            assert (turns, accounts) == (shares.turns, shares.accounts)
            floor = self.run(client.get(keys.floor(sla_class)))
            assert (None if floor is None else float(floor)) == shares.floor


@pytest.mark.parametrize("examples", [full_or(50, 600)])
def test_the_queue_behaves_like_its_model(server: EmbeddedRedis, examples: int) -> None:
    """D6, D7, Q2, S10: no order of calls loses a job, runs it twice, changes an end, or miscounts a share."""
    QueueMachine.url = server.url
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        QueueMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
