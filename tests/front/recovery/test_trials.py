"""Jobs that kill engines, through the dispatcher and a real Redis: convicted alone, with evidence."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.errors import StateError
from batond.daemon.front import suspects
from batond.daemon.front.merge import Merger
from batond.daemon.queue import JobState, open_async
from batond.daemon.wire.messages import HandBack

if TYPE_CHECKING:
    import redis.asyncio

    MakeLab = Any

pytestmark = [pytest.mark.redis]
TIMEOUT_S = 20.0


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits each step by itself: joined, a turn is over before a look at Redis from outside sees it."""
    monkeypatch.setattr(Merger, "add", lambda *_: False)


@pytest.mark.parametrize("strikes", [0, 1, 5, 30])
async def test_a_killer_is_buried_and_its_mates_lose_nothing(
    client: redis.asyncio.Redis, lab: MakeLab, poison: int, strikes: int
) -> None:
    """D8: in its prefill, at its first token, in mid decode, or later than its first proof."""
    async with lab(client) as at:
        for i in range(6):
            # They must outlive its arrival: alone by chance when it strikes first, it would not be charged.
            await at.submit(f"good{i}", max_tokens=300)
        await at.submit("killer", poison, strikes, max_tokens=1000)
        dead = await at.ended("killer")
        assert (dead.state, dead.attempts, dead.error_reason) == (JobState.DEAD, 3, "ATTEMPTS")
        for i in range(6):
            record = await at.ended(f"good{i}")
            assert (record.state, record.attempts, record.lapses) == (JobState.SUCCEEDED, 0, 0)
            assert await at.tokens(f"good{i}") == list(range(300))
        alone = [inside for inside in at.engine.deaths if inside == ["killer"]]
        assert len(alone) == 3, "each attempt was made alone"
        (letter,) = await at.store.dead_letters()
        lines = letter.history.splitlines()
        assert len(lines) == 3
        assert all(
            "owner d1: step 7: AcceleratorError: device-side assert; exit status 3" in line for line in lines
        )
        # What it had put out stays, and nothing of it stands twice.
        assert await at.tokens("killer") == list(range(dead.output_tokens))
        assert at.dispatcher.running_jobs == 0


async def test_nothing_else_is_computed_beside_a_suspect(
    client: redis.asyncio.Redis, lab: MakeLab, poison: int
) -> None:
    """D8: nor is new work, which comes meanwhile and waits for one proof."""
    async with lab(client) as at:
        for i in range(3):
            await at.submit(f"old{i}", max_tokens=4000)
        await at.submit("killer", poison, 3)
        await asyncio.wait_for(at.engine.died.wait(), TIMEOUT_S)
        first = len(at.engine.together)
        await at.submit("urgent", sla_class="interactive", max_tokens=2)
        assert (await at.ended("urgent")).state is JobState.SUCCEEDED
        await at.ended("killer")
        suspects = {"old0", "old1", "old2", "killer"}
        trials = [names for names in at.engine.together[first:] if names & suspects and len(names) == 1]
        mixed = [names for names in at.engine.together[first:] if "killer" in names and len(names) > 1]
        assert trials
        assert mixed == []


async def test_a_step_that_dies_before_the_engine_heard_of_a_turn_convicts_nobody(
    client: redis.asyncio.Redis, lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D8: whoever was taken out of it just now may have done it, not only who shall be alone in it."""
    async with lab(client) as at:
        sending, stepping, moved = at.engine.send, at.engine.step, asyncio.Event()

        def send(command: Any) -> None:
            sending(command)
            if isinstance(command, HandBack) and len(at.engine.deaths) == 1:
                moved.set()

        async def step(dispatcher: Any) -> None:
            if moved.is_set() and at.engine.runs and len(at.engine.deaths) == 1:
                at.engine.die(dispatcher)
            else:
                await stepping(dispatcher)

        monkeypatch.setattr(at.engine, "send", send)
        monkeypatch.setattr(at.engine, "step", step)
        for i in range(2):
            await at.submit(f"j{i}", max_tokens=400)
        await at.until("j1", lambda record: record.output_tokens > 3)
        at.engine.die(at.dispatcher)
        for i in range(2):
            assert (await at.ended(f"j{i}")).attempts == 0
        assert at.engine.deaths == [["j0", "j1"], ["j1"]]


async def test_a_killer_in_its_last_step_before_anothers_turn_is_charged(
    client: redis.asyncio.Redis, lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D8: it has proven itself, was taken out, and the engine dies in the step it was in: alone."""
    async with lab(client) as at:
        marking = at.store.mark_alone

        async def mark_alone(*args: Any, alone: bool) -> bool:
            if not alone and len(at.engine.deaths) == 1:
                at.engine.die(at.dispatcher)
            return bool(await marking(*args, alone=alone))

        monkeypatch.setattr(at.store, "mark_alone", mark_alone)
        for i in range(2):
            await at.submit(f"j{i}", max_tokens=400)
        await at.until("j1", lambda record: record.output_tokens > 3)
        at.engine.die(at.dispatcher)
        ends = [await at.ended(f"j{i}") for i in range(2)]
        assert [(end.state, end.attempts) for end in ends] == [
            (JobState.SUCCEEDED, 1),
            (JobState.SUCCEEDED, 0),
        ]
        assert at.engine.deaths == [["j0", "j1"], []]


async def test_a_job_with_attempts_is_a_suspect_wherever_it_is_claimed(
    client: redis.asyncio.Redis, lab: MakeLab, poison: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D8: what one daemon found out holds for the next: it never runs the job among others."""
    async with lab(client) as first:
        handing_back = first.store.hand_back

        async def hand_back(*args: Any, **kw: Any) -> Any:
            first.dispatcher.draining = True  # It does not take it again.
            return await handing_back(*args, **kw)

        monkeypatch.setattr(first.store, "hand_back", hand_back)
        await first.submit("killer", poison, 2)
        record = await first.until("killer", lambda record: record.attempts > 0)
        assert (record.attempts, record.state) == (1, JobState.QUEUED)
    async with lab(client, owner="d2") as second:
        for i in range(3):
            await second.submit(f"good{i}", max_tokens=200)
        await second.ended("killer")
        for i in range(3):
            assert (await second.ended(f"good{i}")).attempts == 0
            assert await second.tokens(f"good{i}") == list(range(200))
        assert all(inside == ["killer"] for inside in second.engine.deaths)
        assert all("killer" not in names or len(names) == 1 for names in second.engine.together)


async def test_a_suspect_that_proves_itself_runs_among_others_again(
    client: redis.asyncio.Redis, lab: MakeLab
) -> None:
    """D3: an engine that died for a reason of its own costs nobody an attempt or a token."""
    async with lab(client) as at:
        for i in range(4):
            await at.submit(f"j{i}", max_tokens=300)
        await at.until("j3", lambda record: record.output_tokens > 3)
        at.engine.die(at.dispatcher)
        for i in range(4):
            record = await at.ended(f"j{i}")
            assert (record.state, record.attempts) == (JobState.SUCCEEDED, 0)
            assert await at.tokens(f"j{i}") == list(range(300))
        assert any(len(names) == 4 for names in at.engine.together[-250:])


@pytest.mark.usefixtures("step_by_step")
async def test_a_daemon_that_dies_while_it_tries_a_job_alone_is_evidence(
    client: redis.asyncio.Redis, lab: MakeLab, poison: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D8: a job that takes the whole daemon along; Redis knows that it was alone in its engine."""
    for name in ("PROOF_TOKENS", "MOST_PROOF_TOKENS"):  # The turn lasts until the daemon is gone.
        monkeypatch.setattr(suspects, name, 90_000)
    at = lab(client)
    async with at:
        await at.submit("good", max_tokens=100_000)
        await at.submit("killer", poison, 50_000, max_tokens=100_000)
        await at.until("good", lambda record: record.output_tokens > 3)
        at.engine.die(at.dispatcher)
        async with asyncio.timeout(TIMEOUT_S):
            while not await client.hget(at.store.keys.job("t/good"), "alone"):  # noqa: ASYNC110 - Redis says it
                await asyncio.sleep(0.005)
    # The daemon is gone in the middle of that turn.
    for job_id in ("good", "killer"):
        await client.zadd(at.store.keys.leases, {f"t/{job_id}": 1}, xx=True)
    await at.store.reap()
    good, killer = await at.store.get("t", "good"), await at.store.get("t", "killer")
    assert (good.attempts, good.lapses) == (1, 0)
    assert (killer.attempts, killer.lapses) == (0, 1)


async def test_a_waiting_suspect_can_be_cancelled_and_not_parked(
    client: redis.asyncio.Redis, lab: MakeLab
) -> None:
    """C1: a job that is in no engine ends at once; one that is tried must prove itself, not be parked."""
    async with lab(client) as at:
        for i in range(3):
            await at.submit(f"j{i}", max_tokens=100_000)
        await at.until("j2", lambda record: record.output_tokens > 3)
        at.engine.die(at.dispatcher, for_good=True)
        with pytest.raises(StateError) as caught:
            await at.dispatcher.park("t", "j0")
        assert caught.value.reason == "SUSPECT"
        for i in range(3):
            await at.store.cancel("t", f"j{i}")
            at.dispatcher.cancel("t", f"j{i}")
        async with asyncio.timeout(TIMEOUT_S):
            await at.dispatcher._jobs.empty.wait()
        for i in range(3):
            assert (await at.ended(f"j{i}")).state is JobState.CANCELLED


async def test_a_killer_is_charged_although_redis_was_away(
    client: redis.asyncio.Redis, lab: MakeLab, poison: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4 with D8: evidence is not lost; nobody is tried while it can't be noted."""
    from batond.daemon.errors import UnavailableError  # noqa: PLC0415 - beside its use

    away = asyncio.Event()
    async with lab(client) as at:
        handing_back, asked = at.store.hand_back, asyncio.Event()

        async def hand_back(*args: Any, **kw: Any) -> Any:
            if not away.is_set():
                asked.set()
                raise UnavailableError("away", reason="QUEUE_AWAY")
            return await handing_back(*args, **kw)

        monkeypatch.setattr(at.store, "hand_back", hand_back)
        await at.submit("killer", poison, 1)
        await asyncio.wait_for(asked.wait(), TIMEOUT_S)
        away.set()
        assert (await at.ended("killer")).attempts == 3


async def test_another_daemon_reads_the_evidence(
    client: redis.asyncio.Redis, lab: MakeLab, poison: int, server: Any
) -> None:
    """D8: the letter is in Redis, with the job's whole history."""
    async with lab(client) as at:
        await at.submit("killer", poison, 0)
        await at.ended("killer")
    connection = open_async(server.url)
    other = lab(connection, owner="d2")
    (letter,) = await other.store.dead_letters()
    await connection.aclose()
    assert (letter.job_id, letter.attempts, letter.obstacle) == ("killer", 3, "")
