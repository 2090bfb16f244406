"""Tenants added at run time, in a real Redis: two daemons' books of the same tenants."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batond.daemon.config_tenants import TenantConfig, TenantRights
from batond.daemon.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    StateError,
    UnauthenticatedError,
)
from batond.daemon.front.identity import Identities
from batond.daemon.front.tenant_book import TenantBook
from batond.daemon.queue import EmbeddedRedis, open_async
from batond.daemon.queue.keys import TENANTS_KEY
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import redis.asyncio

pytestmark = [pytest.mark.redis]
CLASSES = SlaClasses()
FILE = [TenantConfig(name="file", token_sha256=hashlib.sha256(b"f1le").hexdigest(), admin=True)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of its own."""
    folder = Path(tempfile.mkdtemp(prefix="bd-"))
    server = EmbeddedRedis(folder)
    server.start()
    yield server.url
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
async def client(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """An empty server."""
    one = open_async(url)
    await one.flushall()
    yield one
    await one.aclose()


@pytest.fixture
def book(client: redis.asyncio.Redis) -> TenantBook:
    """The book of one daemon."""
    return another(client)


def another(client: redis.asyncio.Redis) -> TenantBook:
    return TenantBook(client, Identities(FILE, CLASSES), CLASSES)


def who(book: TenantBook, token: str) -> str:
    return book._identities.identify([("authorization", f"Bearer {token}")]).name


async def test_a_new_tenant_is_known_by_its_token_alone(
    book: TenantBook, client: redis.asyncio.Redis
) -> None:
    rights = TenantRights(highest_class="standard", max_queued=3, weight=2.0)
    added, token = await book.create("red", rights)
    assert (added.name, added.highest_class, added.max_queued, added.weight) == ("red", "standard", 3, 2.0)
    assert who(book, token) == "red"
    limits = book._identities.limits["red"]
    assert (limits.queued, limits.weight) == (3, 2.0)
    stored = await client.hgetall(TENANTS_KEY)
    assert token.encode() not in stored[b"red"]
    assert added.token_sha256.encode() in stored[b"red"]
    assert len(token) >= 43  # 256 bits.


async def test_names_are_taken_once(book: TenantBook) -> None:
    await book.create("red", TenantRights())
    for name in ("red", "file"):
        with pytest.raises(ConflictError):
            await book.create(name, TenantRights())


async def test_two_daemons_create_one_tenant(book: TenantBook, client: redis.asyncio.Redis) -> None:
    ends = await asyncio.gather(
        *(one.create("red", TenantRights()) for one in (book, another(client), another(client))),
        return_exceptions=True,
    )
    tokens = [end[1] for end in ends if not isinstance(end, BaseException)]
    assert len(tokens) == 1
    assert sum(isinstance(end, ConflictError) for end in ends) == 2
    await book.load()
    assert who(book, tokens[0]) == "red"


@pytest.mark.parametrize("name", ["", "Red", "-red", "r" * 64, "a/b", "local:0", "a b"])
async def test_names_that_cant_be(book: TenantBook, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await book.create(name, TenantRights())
    assert caught.value.details["field"] == "name"


async def test_rotation_ends_the_old_token(book: TenantBook) -> None:
    _, old = await book.create("red", TenantRights())
    changed, new = await book.rotate("red")
    assert changed.token_sha256 == hashlib.sha256(new.encode()).hexdigest()
    assert who(book, new) == "red"
    with pytest.raises(UnauthenticatedError):
        who(book, old)


async def test_disabled_and_enabled(book: TenantBook) -> None:
    _, token = await book.create("red", TenantRights())
    await book.set_disabled("red", disabled=True)
    with pytest.raises(PermissionDeniedError):
        who(book, token)
    _, newer = await book.rotate("red")  # A new token is no way in.
    with pytest.raises(PermissionDeniedError):
        who(book, newer)
    await book.set_disabled("red", disabled=False)
    assert who(book, newer) == "red"


async def test_rights_are_replaced_as_a_whole(book: TenantBook) -> None:
    _, token = await book.create("red", TenantRights(max_queued=3, admin=True))
    await book.update("red", TenantRights(classes=["batch"]))
    tenant = book._identities.identify([("authorization", f"Bearer {token}")])
    assert (tenant.max_queued, tenant.admin, tenant.classes) == (0, False, {"batch"})
    with pytest.raises(InvalidRequestError, match="unknown class"):
        await book.update("red", TenantRights(classes=["gold"]))


async def test_what_cant_be_changed_says_why(book: TenantBook) -> None:
    with pytest.raises(StateError) as caught:
        await book.rotate("file")
    assert caught.value.reason == "TENANT_CONFIGURED"
    with pytest.raises(NotFoundError):
        await book.set_disabled("nobody", disabled=True)


async def test_a_certificate_is_one_tenants(book: TenantBook) -> None:
    await book.create("red", TenantRights(), "red.example")
    with pytest.raises(ConflictError):
        await book.create("blue", TenantRights(), "red.example")


async def test_another_daemon_hears_of_changes(book: TenantBook, client: redis.asyncio.Redis) -> None:
    other = another(client)
    following = asyncio.create_task(other.run())
    try:
        _, token = await book.create("red", TenantRights())
        await until(lambda: "red" in other.added)
        assert who(other, token) == "red"
        await book.set_disabled("red", disabled=True)
        await until(lambda: other.added["red"].disabled)
        with pytest.raises(PermissionDeniedError):
            who(other, token)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_two_changes_at_once_both_hold(book: TenantBook, client: redis.asyncio.Redis) -> None:
    await book.create("red", TenantRights())
    other = another(client)
    (_, token), _ = await asyncio.gather(book.rotate("red"), other.set_disabled("red", disabled=True))
    await book.load()
    assert book.added["red"].disabled
    assert book.added["red"].token_sha256 == hashlib.sha256(token.encode()).hexdigest()


async def test_tenants_survive_their_daemon(book: TenantBook, client: redis.asyncio.Redis) -> None:
    _, token = await book.create("red", TenantRights())
    fresh = another(client)
    await fresh.load()
    assert who(fresh, token) == "red"


@pytest.mark.parametrize(
    "value", [b"no json", b"{}", b'{"name": "blue", "token_sha256": "%s"}' % (b"a" * 64)]
)
async def test_garbage_lets_nobody_in(client: redis.asyncio.Redis, value: bytes) -> None:
    await client.hset(TENANTS_KEY, "red", value)  # type: ignore[misc]  # the stubs know one return type for both clients
    alone = Identities([], CLASSES)
    book = TenantBook(client, alone, CLASSES)
    await book.load()
    with pytest.raises(UnauthenticatedError):  # Not the default tenant of a daemon that has none.
        alone.identify([])
    with pytest.raises(ConflictError):
        await book.create("red", TenantRights())


async def until(true: object) -> None:
    """Waits for another task of this loop."""
    assert callable(true)
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - the book has no event that its users need
            await asyncio.sleep(0.01)
