"""Many calls, few round trips: what is asked while an answer is on its way goes with the next pipeline.

A call to Redis costs the event loop more than Redis: a connection taken and given back, a write, a read,
three time-outs. Under load they are shared by all that wait; a call that comes alone goes at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import redis.asyncio

MOST_TOGETHER: Final = 128  # Bounds the reply that one waits for.


class Together:
    """Sends commands in pipelines, one at a time. Each can be repeated, as scripts of ours can.

    Args:
        client: The caller closes it, after the last answer.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._asked: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def execute_command(self, *command: Any) -> Any:
        """As the client's own; a caller who leaves takes nothing from the others.

        Raises:
            RedisError: As the client's own; where the connection broke, each command of the pipeline does.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append((command, future))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await future

    async def _send(self) -> None:
        while self._asked:
            calls, self._asked = self._asked[:MOST_TOGETHER], self._asked[MOST_TOGETHER:]
            wanted = [(command, future) for command, future in calls if not future.done()]
            for (_, future), reply in zip(wanted, await self._ask(wanted), strict=True):
                if future.done():
                    continue  # Its caller has left meanwhile.
                if isinstance(reply, BaseException):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)

    async def _ask(self, calls: list[tuple[tuple[Any, ...], asyncio.Future[Any]]]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for command, _ in calls:
            pipe.execute_command(*command)
        try:
            return await pipe.execute(raise_on_error=False)
        except asyncio.CancelledError:  # The loop ends.
            for _, future in calls:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, each caller hears of it
            return [error] * len(calls)
