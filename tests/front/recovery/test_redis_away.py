"""Redis dies, stalls, can't write, or is full, in mid run: generation goes on, nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.front import claims, committer, reaper, redis_health
from batond.daemon.queue import EmbeddedRedis, JobState, open_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import redis.asyncio

    MakeLab = Any

pytestmark = [pytest.mark.redis]
TIMEOUT_S = 30.0
TOKENS = 1500


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    """A server to be maltreated."""
    server = EmbeddedRedis(tmp_path, fsync="always")
    await asyncio.to_thread(server.start)
    yield server
    await asyncio.to_thread(server.stop)


@pytest.fixture
async def theirs(own: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    """The daemon's connection to it."""
    client = open_async(own.url, timeout_s=0.2)
    yield client
    await client.aclose()


async def true(condition: Any) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - conditions of many kinds, none with an event
            await asyncio.sleep(0.005)


async def begin(at: Any) -> None:
    """Two jobs in mid decode; from here on the engine does not wait for commits."""
    for name in ("a", "b"):
        await at.submit(name, max_tokens=TOKENS)
    await at.until("b", lambda record: record.output_tokens > 3)


async def finish(at: Any) -> None:
    for name in ("a", "b"):
        record = await at.ended(name)
        assert (record.state, record.epoch, record.attempts) == (JobState.SUCCEEDED, 1, 0)
        assert await at.tokens(name) == list(range(TOKENS)), "each token once, in order"
    assert at.dispatcher.running_jobs == 0


async def go_on(at: Any) -> None:
    """Waits until the engine has gone on without Redis, and the daemon says so."""
    await true(lambda: not at.dispatcher.redis_up)
    at.engine.most_ahead = float("inf")
    steps = at.engine.steps
    await true(lambda: at.engine.steps > steps + 20)
    assert at.dispatcher._committer.unsaved > 10


async def test_redis_is_killed_and_comes_back(
    own: EmbeddedRedis, theirs: redis.asyncio.Redis, lab: MakeLab
) -> None:
    """D4: kill -9 in mid run; what the daemon had not saved is flushed in order when it is back."""
    async with lab(theirs) as at:
        await begin(at)
        assert own.pid is not None
        os.kill(own.pid, signal.SIGKILL)
        await go_on(at)
        await asyncio.to_thread(own._restart)
        await finish(at)
        await true(lambda: at.dispatcher.redis_up)


async def test_redis_stands_still(
    own: EmbeddedRedis, theirs: redis.asyncio.Redis, lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: SIGSTOP: connections stand, calls time out, and some arrive twice after it."""
    monkeypatch.setattr(redis_health, "SLOW_S", 0.1)
    async with lab(theirs) as at:
        await begin(at)
        assert own.pid is not None
        os.kill(own.pid, signal.SIGSTOP)
        try:
            await go_on(at)
        finally:
            os.kill(own.pid, signal.SIGCONT)
        await finish(at)


async def fill_memory(admin: redis.asyncio.Redis, folder: Path, *, ill: bool) -> None:
    await admin.config_set("maxmemory", int(ill))


async def fail_to_save(admin: redis.asyncio.Redis, folder: Path, *, ill: bool) -> None:
    """MISCONF, as a full disk gives: a snapshot can't be put where a folder lies."""
    if not ill:
        await admin.config_set("stop-writes-on-bgsave-error", "no")
        await admin.config_set("save", "")  # It would not end without a snapshot.
        return
    (folder / "taken" / "by").mkdir(parents=True)
    await admin.config_set("save", "3600 1")
    await admin.config_set("dbfilename", "taken")
    await admin.bgsave()
    async with asyncio.timeout(TIMEOUT_S):
        while (await admin.info("persistence"))["rdb_last_bgsave_status"] == "ok":  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("turn", [fill_memory, fail_to_save])
async def test_redis_can_not_write(
    own: EmbeddedRedis, theirs: redis.asyncio.Redis, lab: MakeLab, turn: Any
) -> None:
    """D4: out of memory, or of disk: it answers, but each write is refused for a while."""
    async with lab(theirs) as at:
        await begin(at)
        admin = open_async(own.url)
        await turn(admin, own.folder, ill=True)
        await go_on(at)
        await turn(admin, own.folder, ill=False)
        await admin.aclose()
        await finish(at)


async def test_a_server_that_can_not_write_is_noticed_while_nothing_runs(
    own: EmbeddedRedis, theirs: redis.asyncio.Redis, lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: and the word stays, although claims of nothing are answered."""
    monkeypatch.setattr(reaper, "REAP_EVERY_S", 0.01)
    monkeypatch.setattr(claims, "IDLE_CLAIM_S", 0.01)
    async with lab(theirs) as at:
        admin = open_async(own.url)
        await fill_memory(admin, own.folder, ill=True)
        await true(lambda: not at.dispatcher.redis_up)
        for _ in range(50):
            assert not at.dispatcher.redis_up
            await at.store.counts()
        await fill_memory(admin, own.folder, ill=False)
        await admin.aclose()
        await true(lambda: at.dispatcher.redis_up)


async def test_an_engine_waits_when_the_buffer_is_full(
    own: EmbeddedRedis, theirs: redis.asyncio.Redis, lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: bounded by bytes; the engine is not read, and goes on when Redis is back."""
    monkeypatch.setattr(committer, "MOST_UNSAVED_BYTES", 100_000)
    async with lab(theirs) as at:
        await begin(at)
        assert own.pid is not None
        at.engine.most_ahead = float("inf")
        os.kill(own.pid, signal.SIGKILL)
        await true(lambda: at.dispatcher.waits_for_redis)
        steps = at.engine.steps
        for _ in range(200):
            await asyncio.sleep(0)
        assert at.engine.steps <= steps + 1
        assert at.metrics.unsaved_bytes._value.get() < 110_000
        await asyncio.to_thread(own._restart)
        await finish(at)
        assert at.metrics.unsaved_bytes._value.get() == 0


async def test_a_daemon_that_was_away_for_too_long_delivers_nothing(
    client: redis.asyncio.Redis, lab: MakeLab, server: EmbeddedRedis
) -> None:
    """D2: paused past its leases, woken with tokens in hand: others have the job, nobody sees them."""
    connection = open_async(server.url)
    async with lab(client) as first:
        await first.submit("a", max_tokens=TOKENS)
        await first.until("a", lambda record: record.output_tokens > 3)
        live = first.hub.get("t", "a")
        assert live is not None
        first.dispatcher.draining = True  # It is paused: it claims nothing more.
        keys = first.store.keys
        await client.zadd(keys.leases, {"t/a": 1}, xx=True)
        async with lab(connection, owner="d2") as second:
            await second.until("a", lambda record: record.owner == "d2")
            committed = len((await second.held("a")).claimed.choices[0].token_ids)
            await asyncio.wait_for(first.dispatcher._jobs.empty.wait(), TIMEOUT_S)
            shown = sum(len(event.token_ids) for event in live.events if hasattr(event, "token_ids"))
            record = await second.ended("a")
            assert (record.state, record.epoch, record.attempts, record.lapses) == (
                JobState.SUCCEEDED,
                2,
                0,
                1,
            )
            assert await second.tokens("a") == list(range(TOKENS))
            assert shown == committed, "what was shown is what was committed"
            assert live.closed
            assert first.metrics.commits_refused._value.get() >= 1
    await connection.aclose()
