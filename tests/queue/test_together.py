"""Calls that go together: each gets its own answer, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from batond.daemon.queue.together import MOST_TOGETHER, Together

if TYPE_CHECKING:
    import redis.asyncio
    from conftest import Queue


async def commands(client: redis.asyncio.Redis, name: str) -> int:
    return int((await client.info("commandstats")).get(f"cmdstat_{name}", {}).get("calls", 0))


async def test_each_gets_its_own_answer(client: redis.asyncio.Redis) -> None:
    together = Together(client)
    count = 3 * MOST_TOGETHER + 7
    answers = await asyncio.gather(*(together.execute_command("ECHO", str(n)) for n in range(count)))
    assert answers == [str(n).encode() for n in range(count)]


async def test_a_refusal_is_its_callers_alone(client: redis.asyncio.Redis) -> None:
    together = Together(client)
    await client.set("text", "x")
    answers = await asyncio.gather(
        together.execute_command("GET", "text"),
        together.execute_command("INCR", "text"),
        together.execute_command("GET", "text"),
        return_exceptions=True,
    )
    assert (answers[0], answers[2]) == (b"x", b"x")
    assert isinstance(answers[1], ResponseError)


async def test_who_leaves_takes_nothing_from_the_others(client: redis.asyncio.Redis) -> None:
    together = Together(client)
    leaving = asyncio.create_task(together.execute_command("ECHO", "a"))
    staying = asyncio.create_task(together.execute_command("ECHO", "b"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == b"b"
    assert await together.execute_command("ECHO", "c") == b"c"
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_a_broken_connection_is_heard_by_all_and_forgotten() -> None:
    class Broken:
        """A client whose first pipeline breaks."""

        breaks = True

        def pipeline(self, **_: Any) -> Any:
            return self

        def execute_command(self, *_: Any) -> None:
            self.asked = True

        async def execute(self, **_: Any) -> list[Any]:
            if self.breaks:
                self.breaks = False
                raise RedisConnectionError("gone")
            return ["back"]

    together = Together(Broken())  # type: ignore[arg-type]
    answers = await asyncio.gather(*(together.execute_command("x") for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in answers] == [RedisConnectionError] * 3
    assert await together.execute_command("x") == "back"


async def test_submits_at_once_are_accepted_once_each_though_the_server_forgot_the_scripts(
    queue: Queue,
) -> None:
    """D1: of equal ids one is created, whatever goes in the same pipeline."""
    await queue.client.script_flush()
    created = await asyncio.gather(*(queue.submit(f"job-{n % 40}") for n in range(120)))
    assert sum(created) == 40
    assert len(await queue.claim(100)) == 40
