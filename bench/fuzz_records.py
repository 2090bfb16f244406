"""Writes rubbish into a queue's Redis, as a hand, another program or a broken disk might.

Every kind of key is hit: other types, bytes that are no text, damaged and absurd values, entries that name
nothing or somebody else's, fields that are gone. Keys of one job are those of a tenant that is given up; what
all share is written to as well. The same number of a seed does the same.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ResponseError

from batond.daemon.queue.keys import DAEMONS_KEY, KINDS, TENANTS_KEY, job_ref

if TYPE_CHECKING:
    from pathlib import Path

    import redis.asyncio

    from batond.daemon.queue.keys import KeyKind, Keys

VICTIM: Final = "red"
JOBS: Final = 200
_CLASSES: Final = ("interactive", "standard", "batch")
_OF_A_JOB: Final = frozenset({"JOB", "SPEC", "OUT", "NEWS"})
_OF_A_CLASS: Final = frozenset({"QUEUE", "TURN", "RESTING", "ACCOUNTS", "FLOOR", "PACE"})
_SCORES: Final = ("0", "-1", "inf", "-inf", "1e308", "9007199254740993", "0.5", "-1e-300")


class Vandal:
    """Spoils the keys of one model's queue.

    Args:
        client: Of the queue's Redis, not decoding.
        keys: The model's.
        marker: A path; it exists afterwards if something was executed.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, marker: Path) -> None:
        self._client: Any = client  # Its types know strings only.
        self._keys = keys
        self._pickle = (
            b"cos\nmkdir\n(V" + str(marker).encode() + b"\ntR."
        )  # Makes a folder when it is loaded.

    async def spoil(self, seed: int, number: int) -> str:
        """Do one thing; returns what, in words."""
        try:
            return await self._spoil(random.Random(f"{seed}/{number}"))  # noqa: S311 - to be repeated
        except ResponseError as error:
            return f"nothing: {error}"  # The key was mended, or became another type, in between.

    async def _spoil(self, rng: random.Random) -> str:
        if rng.random() < 0.05:  # noqa: PLR2004 - tenants and daemons are two keys only
            return await self._spoil_registers(rng)
        kind = rng.choice(KINDS)
        key = f"{self._keys.base}:{kind.suffix}{await self._item(rng, kind)}"
        if kind.redis_type == "channel":
            await self._client.publish(key, self._value(rng))
            return f"published to {key}"
        if rng.random() < 0.25:  # noqa: PLR2004 - a quarter of them
            await self._replace(rng, key)
            return f"replaced {key}"
        found = (await self._client.type(key)).decode()
        await self._write(rng, key, kind.redis_type if found == "none" else found)
        return f"wrote into {key}"

    async def _item(self, rng: random.Random, kind: KeyKind) -> str:
        ref = job_ref(VICTIM, f"v{rng.randrange(JOBS)}")
        if kind.lua in _OF_A_JOB:
            return ref + rng.choice(("", "", "", "#1", "@2")) if kind.lua == "OUT" else ref
        if kind.lua in _OF_A_CLASS:
            return rng.choice(_CLASSES)
        if kind.lua in {"OWNER", "ORDERS"}:
            return await self._owner()
        own = {"LINE": f"{rng.choice(_CLASSES)}/{VICTIM}", "MINUTE": f"{VICTIM}/{rng.randrange(1 << 25)}"}
        return own.get(kind.lua, VICTIM) if kind.suffix.endswith(":") else ""

    async def _owner(self) -> str:
        prefix = f"{self._keys.base}:owner:"
        async for key in self._client.scan_iter(match=prefix.replace("[", "\\[") + "*", count=1000):
            return str(key, "utf-8", "replace").removeprefix(prefix)
        return "nobody"

    async def _replace(self, rng: random.Random, key: str) -> None:
        value = self._value(rng)
        await self._client.delete(key)
        await self._write(rng, key, rng.choice(("string", "list", "set", "zset", "hash", "stream")), value)

    async def _write(self, rng: random.Random, key: str, redis_type: str, value: bytes | None = None) -> None:
        value = self._value(rng) if value is None else value
        match redis_type:
            case "string":
                old = await self._client.get(key) or b""
                await self._client.set(key, rng.choice((value, _damage(rng, old))), keepttl=True)
            case "list":
                await self._client.rpush(key, value)
            case "set":
                await self._client.sadd(key, self._member(rng, value))
            case "zset":
                await self._client.zadd(key, {self._member(rng, value): rng.choice(_SCORES)})
            case "hash":
                await self._write_hash(rng, key, value)
            case _:
                entry = rng.choice(({"c": value}, {"x": value}, {"c": await self._last_chunk(rng, key)}))
                await self._client.xadd(
                    key, entry, id=rng.choice(("*", "0-1", "1-2", "500-3", "18446744073709551615-1"))
                )

    async def _write_hash(self, rng: random.Random, key: str, value: bytes) -> None:
        fields = await self._client.hkeys(key)
        odd = rng.choice((b"state", b"x", b"\xff", b""))
        field = rng.choice(fields) if fields and rng.randrange(7) else odd
        match rng.randrange(4):
            case 0:
                await self._client.hdel(key, field)
            case 1:
                await self._client.hset(key, field, _damage(rng, await self._client.hget(key, field) or b""))
            case _:
                await self._client.hset(key, field, value)

    async def _last_chunk(self, rng: random.Random, key: str) -> bytes:
        entries = await self._client.xrevrange(key, count=1)
        return _damage(rng, entries[0][1].get(b"c", b"") if entries else b"")

    async def _spoil_registers(self, rng: random.Random) -> str:
        """Tenants and daemons, of all models."""
        key = rng.choice((TENANTS_KEY, DAEMONS_KEY))
        name = rng.choice((b"evil", b"", b"\xff\xfe", b"a/b", b"x" * 300, b'{"name":"good"}'))
        await self._client.hset(key, name, self._value(rng))
        return f"wrote {name!r} into {key}"

    def _member(self, rng: random.Random, value: bytes) -> bytes:
        ref = job_ref(VICTIM, f"v{rng.randrange(JOBS)}").encode()
        return rng.choice((value, ref, b"nobody/nothing", b"red/", b"/", b"1234567890123456 " + ref))

    def _value(self, rng: random.Random) -> bytes:
        if rng.random() < 0.01:  # noqa: PLR2004 - one in a hundred is a megabyte
            return b"x" * 1_000_000
        return rng.choice((*_VALUES, self._pickle, rng.randbytes(rng.randrange(1, 40))))


def _damage(rng: random.Random, old: bytes) -> bytes:
    """The same bytes, cut, flipped or longer."""
    data = bytearray(old)
    at = rng.randrange(len(data) + 1)
    match rng.randrange(3):
        case 0:
            del data[at:]
        case 1 if data:
            data[at - 1] ^= 1 << rng.randrange(8)
        case _:
            data[at:at] = rng.randbytes(4)
    return bytes(data)


_VALUES: Final = (
    b"",
    b"0",
    b"-1",
    b"1",
    b"nan",
    b"inf",
    b"1e309",
    b"9007199254740992",
    b"9007199254740991",
    b"9007199254740993",
    b"4294967296",
    b"9" * 40,
    b"queued",
    b"running",
    b"succeeded",
    b"dead",
    b"flying",
    b"\xff\xfe\x00",
    b"\x00",
    b"{}",
    b"[]",
    b"null",
    b'"\\ud800"',
    b"[" * 100_000,
    b'{"a":' * 1000,
    b'{"prompt_token_ids":[1],"sampling":{},"seed":1}',
    b'{"prompt_token_ids":[1],"sampling":{"max_tokens":3,"n":128},"seed":1}',
    b'{"prompt_token_ids":[-1],"sampling":{"max_tokens":1e400},"seed":1}',
    b'{"prompt_token_ids":[99999999999],"sampling":{"max_tokens":3},"seed":18446744073709551616}',
    b'{"reason":"X","message":"\\u001b[2J","died_ms":1e300,"history":"a"}',
    b"red/v1",
    b"good/x",
    b"update red/v1",
    b"update ",
    b" ",
    b"%",
    "\u00e9\U0001f469".encode(),
)
