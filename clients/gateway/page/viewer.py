"""One open page and the events due to it: the latest of each kind alone, however slow its network is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from batond.clients.gateway.page import frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: Proxies and the page itself take a stream for dead that is silent for longer.
BEAT_S: Final = 5.0


class Viewer:
    """Takes events and gives them as they can be sent.

    Args:
        beat_s: How often a silent stream shows that it lives.
    """

    def __init__(self, beat_s: float = BEAT_S) -> None:
        self._beat_s = beat_s
        self._due: dict[str, bytes] = {}
        self._news = asyncio.Event()
        self._ended = False

    def put(self, kind: str, event: bytes) -> None:
        """Take an event in place of one of its kind that was not sent yet."""
        self._due.pop(kind, None)  # It goes to the end: what came last must be said last.
        self._due[kind] = event
        self._news.set()

    def end(self, event: bytes) -> None:
        """Take the last event."""
        self._due = {"end": event}
        self._ended = True
        self._news.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield what is due, whenever something is, and a beat in between; ends after the last event."""
        while True:
            try:
                async with asyncio.timeout(self._beat_s):
                    await self._news.wait()
            except TimeoutError:
                yield frames.BEAT
                continue
            self._news.clear()
            due, self._due = self._due, {}
            ended = self._ended
            yield b"".join(due.values())
            if ended:
                return
