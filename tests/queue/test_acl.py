"""The documented ACL user: it can do all that batond does, and nothing else."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError

from batond.daemon.config_tenants import TenantRights
from batond.daemon.errors import ConfigError
from batond.daemon.front.identity import Identities
from batond.daemon.front.tenant_book import TenantBook
from batond.daemon.queue import JobState, NoticeKind, check_target, open_async
from batond.daemon.queue.keys import TENANTS_CHANNEL, TENANTS_KEY
from batond.daemon.queue.limits import TenantLimits
from batond.daemon.queue.registry import DaemonRecord, Registry
from batond.daemon.queue.rights import IN_SCRIPTS, SENT, WITHOUT_KEY
from batond.daemon.queue.target import RedisTarget
from batond.policies.classes import DEFAULT_CLASSES, SlaClasses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from conftest import Queue

    from batond.daemon.queue import EmbeddedRedis

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct-horse"


def documented() -> list[str]:
    """The words of the line in docs/operations.md, with a password."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ACL SETUSER (batond .*\+hset.*)$", text, flags=re.MULTILINE)
    return str(line).replace("PASSWORD", PASSWORD).split()


def commands() -> list[str]:
    """The commands that it allows."""
    return [word[1:] for word in documented() if word.startswith("+")]


@pytest.fixture
async def set_user(client: redis.asyncio.Redis) -> AsyncIterator[Callable[..., Any]]:
    """Makes the documented user, with changes to the line after it."""

    async def make(*changes: str) -> None:
        await cast("Any", client).execute_command("ACL", "SETUSER", *documented(), *changes)

    yield make
    await client.acl_deluser("batond")


@pytest.fixture
def target(server: EmbeddedRedis) -> RedisTarget:
    """The server, as this user."""
    return RedisTarget(url=server.url, username="batond", password=PASSWORD)


async def live(queue: Queue, target: RedisTarget) -> None:
    """All that daemons, clients and operators do."""
    store = queue.store
    limits = {"t": TenantLimits(weight=2.0, running=5, tokens_per_minute=10_000)}
    notices = store.notices("d1")
    assert (await anext(notices)).kind is NoticeKind.SYNC
    await queue.submit("a", limits=TenantLimits(queued=3))
    await queue.submit("b", deadline_in_ms=60_000)
    await queue.submit("c", longest_queue_ms=60_000)
    assert await store.place("t", "b") is not None
    await store.update("t", "b", present_class="standard", sla_class="batch")
    jobs = await store.claim("d1", {"standard": 1, "batch": 1}, lease_ms=60_000, tenants=limits)
    first, second = jobs
    assert await queue.commit(queue.step(first, 0, 1), queue.step(second, 0, 5)) == []
    await store.renew("d1", [("t", "a", 1)], lease_ms=1000)
    await store.cancel("t", "b")
    await store.hand_back("d1", "t", first.record.job_id, 1, charge=True, why="a test")
    await store.claim("d1", {"standard": 5}, lease_ms=60_000, tenants=limits)
    await store.reap()
    await queue.commit(queue.step(second, 1, 6, state=JobState.SUCCEEDED))
    assert await queue.tokens(second.record.job_id) == [5, 6]
    await store.get_spec("t", "a")
    await store.list_jobs("t")
    await store.counts()
    await store.dead_page()
    await store.release_owner("d1")
    await store.ping()
    await notices.aclose()  # type: ignore[attr-defined] # a generator, said to be an iterator
    client = open_async(target)
    try:
        registry = Registry(client)
        await registry.tell(DaemonRecord(id="d1", model="m"))
        assert [one.id for one in await registry.daemons()] == ["d1"]
        await registry.leave("d1")
        classes = SlaClasses(DEFAULT_CLASSES)
        book = TenantBook(client, Identities([], classes, required=True), classes)
        await book.create("red", TenantRights())
        async with client.pubsub() as pubsub:
            await pubsub.subscribe(TENANTS_CHANNEL)
            await book.rotate("red")
            async with asyncio.timeout(30):
                while (await pubsub.get_message(timeout=5) or {}).get("type") != "message":
                    pass
    finally:
        await client.aclose()


async def test_the_documented_user_can_do_everything(
    set_user: Callable[..., Any], target: RedisTarget, open_queue: Callable[..., Queue]
) -> None:
    await set_user()
    assert await check_target(target)
    await live(open_queue(target), target)


def test_the_line_allows_what_the_scripts_use_and_no_more() -> None:
    """Read from the scripts' text, so that a new command in one of them can't be forgotten."""
    sources = [
        *(ROOT / "daemon" / "queue" / "scripts").glob("*.lua"),
        ROOT / "daemon" / "queue" / "registry.py",
        ROOT / "daemon" / "front" / "tenant_book.py",
    ]
    used: set[str] = set()
    for source in sources:
        text = source.read_text(encoding="utf-8")
        used |= set(re.findall(r"(?:redis\.p?call|\bask|\bput)\('([A-Z]+)'", text))
    assert used == {*IN_SCRIPTS, *WITHOUT_KEY}
    allowed = {name.upper() for name in commands()}
    assert allowed == {*IN_SCRIPTS, *WITHOUT_KEY, *SENT, "CLUSTER|SLOTS"}
    assert not [word for word in documented() if word.startswith("+@")]


@pytest.mark.parametrize("command", [name for name in commands() if name not in {"wait", "cluster|slots"}])
async def test_each_command_is_needed(
    set_user: Callable[..., Any], target: RedisTarget, command: str
) -> None:
    """Without it the start is refused, and the message names it: inside a script it would go unnoticed."""
    await set_user(f"-{command}")
    with pytest.raises(ConfigError, match=f"(?i){command}"):
        await check_target(target)


@pytest.mark.parametrize("change", ["resetkeys", "resetchannels"])
async def test_keys_and_channels_are_needed(
    set_user: Callable[..., Any], target: RedisTarget, change: str
) -> None:
    await set_user(change)
    with pytest.raises(ConfigError):
        await check_target(target)


async def test_waiting_for_replicas_needs_its_right(
    set_user: Callable[..., Any], target: RedisTarget, open_queue: Callable[..., Queue]
) -> None:
    await set_user("-wait")
    with pytest.raises(ConfigError, match=r"(?i)wait"):
        await open_queue(target, replicas=1).submit("a")


async def test_a_start_that_waits_for_replicas_asks_for_its_right(
    set_user: Callable[..., Any], target: RedisTarget
) -> None:
    """Before any job comes, and with the line that gives it; who waits for none needs none."""
    await set_user("-wait")
    assert await check_target(target)
    with pytest.raises(ConfigError, match=r"ACL SETUSER batond \+wait") as caught:
        await check_target(target, replicas=1)
    assert caught.value.details["setting"] == "queue.wait_replicas"
    await set_user()
    assert await check_target(target, replicas=1)


async def test_the_keys_and_channels_of_others_are_refused(
    set_user: Callable[..., Any], target: RedisTarget, client: redis.asyncio.Redis
) -> None:
    await set_user()
    await client.set("others", "1")
    user: Any = open_async(target)
    refused = [
        ("GET", "others"),
        ("SET", "others", "2"),
        ("DEL", "batond:x", "others"),
        ("EVAL", "return redis.call('GET', KEYS[1])", "1", "others"),
        ("PUBLISH", "others", "x"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
    ]
    try:
        for words in refused:
            with pytest.raises(NoPermissionError):
                await user.execute_command(*words)
        # A script that names none of its keys is asked for each of them all the same.
        with pytest.raises(redis.ResponseError, match=r"(?i)can't access|no permissions to access|NOPERM"):
            await user.execute_command("EVAL", "return redis.call('GET', 'others')", "0")
        async with user.pubsub() as pubsub:
            await pubsub.subscribe("others")
            with pytest.raises(NoPermissionError):
                await pubsub.get_message(timeout=5)
    finally:
        await user.aclose()
    assert await client.get("others") == b"1"
    assert not await client.exists(TENANTS_KEY)


async def test_a_wrong_password_is_the_operators_to_mend(
    set_user: Callable[..., Any], server: EmbeddedRedis
) -> None:
    await set_user()
    with pytest.raises(ConfigError, match="refuses this user"):
        await check_target(RedisTarget(url=server.url, username="batond", password="wrong"))
