"""Tasks that are waited for, ended, or reached from other threads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

CANCEL_EVERY_S: Final = 0.5


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None]) -> Callable[..., None]:
    """The same call, made on the loop by whatever thread calls it."""

    def hand_over(*arguments: object) -> None:
        loop.call_soon_threadsafe(call, *arguments)

    return hand_over


async def end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until all have ended: the Redis client's `wait_for` can swallow one cancel on Python 3.11."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_EVERY_S)


async def first_of(*waits: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Wait for whatever ends first, and raise what it raised."""
    own = [asyncio.ensure_future(wait) for wait in waits]
    done, _ = await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
    for wait, task in zip(waits, own, strict=True):
        if task is not wait:
            task.cancel()  # Ours; tasks that were given are the caller's.
    for task in done:
        task.result()
