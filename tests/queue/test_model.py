"""The queue against a plain Python model of it: random orders of all that can be done to jobs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from batond.daemon.engine.params import SamplingParams
from batond.daemon.queue import (
    Chunk,
    ClaimedJob,
    JobSpec,
    JobState,
    JobStore,
    StepCommit,
    open_async,
    open_sync,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from batond.daemon.queue import EmbeddedRedis

CLASSES = ("interactive", "batch")
OWNERS = ("d1", "d2")
MAX_ATTEMPTS = 2
SPEC = msgspec.json.encode(JobSpec(prompt_token_ids=[1], sampling=SamplingParams(), seed=1))

job_ids = st.sampled_from(["a", "b", "c", "d"])
owners = st.sampled_from(OWNERS)


@dataclass
class Job:
    """What the model knows of a job."""

    sla_class: str
    arrival: int
    state: str = "queued"
    owner: str = ""
    epoch: int = 0
    attempts: int = 0
    cancel: bool = False
    tokens: list[int] = field(default_factory=list)

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

    @rule(job_id=job_ids, sla_class=st.sampled_from(CLASSES), owner=owners)
    def submit(self, job_id: str, sla_class: str, owner: str) -> None:
        """Creates or attaches."""
        _, created = self.run(
            self.stores[owner].submit("t", job_id, spec_json=SPEC, body_hash="h", sla_class=sla_class)
        )
        assert created == (job_id not in self.jobs)
        if created:
            self.arrivals += 1
            self.jobs[job_id] = Job(sla_class, self.arrivals)

    @rule(owner=owners, interactive=st.integers(0, 2), batch=st.integers(0, 2))
    def claim(self, owner: str, interactive: int, batch: int) -> None:
        """Takes the oldest of each class, with their tokens."""
        limits = {"interactive": interactive, "batch": batch}
        expected = []
        for sla_class in CLASSES:
            waiting = [
                j for j in self.jobs if (self.jobs[j].state, self.jobs[j].sla_class) == ("queued", sla_class)
            ]
            expected += sorted(waiting, key=lambda j: self.jobs[j].arrival)[: limits[sla_class]]
        claimed = self.run(self.stores[owner].claim(owner, limits, lease_ms=600_000))
        assert [job.record.job_id for job in claimed] == expected
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
            tenant="t",
            job_id=job_id,
            epoch=claim.record.epoch,
            chunks=(Chunk(first_index=first, token_ids=tokens),) if tokens else (),
            state=JobState(state) if state else None,
        )
        result = self.run(self.stores[owner].commit_step(owner, [commit]))
        assert [r.why.value for r in result.refused] == self.expect(
            job, (owner, claim.record.epoch), first, tokens, state
        )
        assert result.cancel == ([("t", job_id)] if job.cancel and job.owner and not result.refused else [])

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
        record = self.run(self.stores[owner].cancel("t", job_id))
        if job.state == "queued":
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
            self.stores[owner].hand_back(owner, "t", claim.record.job_id, claim.record.epoch, charge=charge)
        )
        if (job.owner, job.epoch) != (owner, claim.record.epoch):
            assert outcome == "refused"
        else:
            job.give_up(charge=charge)
            assert outcome == job.state

    @rule(job_id=job_ids, owner=owners)
    def lapse(self, job_id: str, owner: str) -> None:
        """A lease runs out; somebody reaps; its holder learns of it by a renewal."""
        store = self.stores[owner]
        self.run(self.clients[owner].zadd(store.keys.leases, {f"t/{job_id}": 1}, xx=True))
        reaped = self.run(store.reap())
        expected = []
        job = self.jobs.get(job_id)
        if job is not None and job.owner:
            self.stores[job.owner].forget(job.owner, "t", job_id, epoch=job.epoch)
            job.give_up(charge=True)
            expected = [("t", job_id, job.state)]
        came_to = {"queued": reaped.requeued, "cancelled": reaped.cancelled, "dead": reaped.dead}
        assert [(*ref, state) for state, refs in came_to.items() for ref in refs] == expected

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        """A daemon drains."""
        released = self.run(self.stores[owner].release_owner(owner))
        held = [job_id for job_id, job in self.jobs.items() if job.owner == owner]
        assert sorted(released) == sorted(("t", job_id) for job_id in held)
        for job_id in held:
            self.jobs[job_id].give_up(charge=False)

    @rule(job_id=job_ids)
    def retry(self, job_id: str) -> None:
        """An operator revives a dead job."""
        job = self.jobs.get(job_id)
        if job is not None and job.state == "dead":
            self.run(self.stores["d1"].dead_retry("t", job_id))
            job.state, job.attempts = "queued", 0

    @invariant()
    def agrees(self) -> None:
        """Queue and model say the same of every job, and the shared sets hold just the right jobs."""
        store = self.stores["d1"]
        for job_id, job in self.jobs.items():
            record = self.run(store.get("t", job_id))
            seen = (record.state, record.owner, record.epoch, record.attempts, record.output_tokens)
            assert seen == (job.state, job.owner, job.epoch, job.attempts, len(job.tokens))
            chunks = self.run(store.read_chunks("t", job_id))
            assert [token for chunk in chunks for token in chunk.token_ids] == job.tokens
        counts = self.run(store.counts())
        states = [job.state for job in self.jobs.values()]
        assert counts.held == sum(bool(job.owner) for job in self.jobs.values())
        assert sum(counts.queued.values()) == states.count("queued")
        assert counts.dead == states.count("dead")


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_the_queue_behaves_like_its_model(server: EmbeddedRedis, examples: int) -> None:
    """D6, D7, Q2: no order of calls loses a job, runs it twice, or changes an end."""
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
