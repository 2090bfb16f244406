"""One daemon, watched once for all its viewers.

    join      a viewer's own credentials must be those of an administrator, before it sees anything
    follow    one WatchBatch, in the name of one of the viewers; of another one when that one leaves
    look      asks how the daemon stands, and whether each viewer may still look

Nothing runs and no connection is open while nobody looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from batond.clients.aio import AsyncClient
from batond.clients.errors import AccessError, BatondClientError
from batond.clients.gateway.access import Doorkeeper, bearer_of
from batond.clients.gateway.page import frames
from batond.clients.gateway.page.viewer import Viewer
from batond.clients.gateway.problems import ApiError, of_error
from batond.clients.retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.datastructures import Headers

    from batond.clients.batch import BatchSnapshot
    from batond.clients.gateway.settings import GatewaySettings

MOST_VIEWERS: Final = 200
#: Short stays in a row should be seen; a large batch is sent less often, for the sake of those who read it.
INTERVAL_S: Final = 0.1
LARGE_INTERVAL_S: Final = 0.25
LARGE_ROWS: Final = 64
LOOK_EVERY_S: Final = 2.0
RECHECK_EVERY_S: Final = 15.0
_FIRST_DELAY_S: Final = 0.25
_LONGEST_DELAY_S: Final = 5.0
#: The page tries again itself, and shows that it does.
_RETRY: Final = RetryPolicy(attempts=1, wait_for_quota=False)
_CALL_TIMEOUT_S: Final = 10.0

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Badge:
    """Credentials, as several viewers may have brought them, and when they were last good."""

    client: AsyncClient
    checked_s: float
    viewers: set[Viewer] = field(default_factory=set)


class Watch:
    """See the module's docstring.

    Args:
        address: The daemon's.
        settings: The gateway's.
    """

    def __init__(self, address: str, settings: GatewaySettings) -> None:
        self._address, self._settings = address, settings
        self._badges: dict[str | None, _Badge] = {}
        self._some = asyncio.Event()  # There are badges.
        self._seats = 0
        self._base: AsyncClient | None = None
        self._work: asyncio.Task[None] | None = None
        self._stream: asyncio.Task[None] | None = None
        self._reader: _Badge | None = None  # In whose name the stream is.
        self._last: dict[str, bytes] = {}  # What a new viewer is shown at once.
        self._rows = 0
        self._closing: set[asyncio.Task[None]] = set()

    async def join(self, headers: Headers) -> Viewer:
        """Let a viewer in; `leave` must follow.

        Raises:
            ApiError: There are too many viewers, or no credentials where they are needed.
            BatondClientError: The daemon refuses the credentials, or is away.
        """
        if self._seats >= MOST_VIEWERS:
            raise ApiError(503, "too many people look at this daemon now", code="too_many_viewers")
        base = self._take_seat()
        try:
            token = bearer_of(headers)
            client = Doorkeeper(base, needs_token=self._settings.needs_token).calling(headers)
            await client.policy()  # For administrators alone, as WatchBatch is.
        except BaseException:
            self._give_seat()
            raise
        viewer = Viewer()
        badge = self._badges.setdefault(token, _Badge(client, time.monotonic()))
        badge.viewers.add(viewer)
        self._some.set()
        for kind, event in self._last.items():
            viewer.put(kind, event)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._watch())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """A viewer is gone. Doesn't wait: whoever leaves may be cancelled already."""
        for token, badge in list(self._badges.items()):
            if viewer in badge.viewers:
                badge.viewers.discard(viewer)
                if not badge.viewers:
                    self._drop(token)
        self._give_seat()

    def end(self) -> None:
        """End all streams: the gateway stops, and pages try again by themselves."""
        for badge in self._badges.values():
            for viewer in badge.viewers:
                viewer.end(frames.lost("the gateway was stopped"))

    def _take_seat(self) -> AsyncClient:
        self._seats += 1
        if self._base is None:
            self._base = AsyncClient(
                self._address,
                tls=self._settings.tls,
                timeout_s=min(self._settings.timeout_s, _CALL_TIMEOUT_S),
                retry=_RETRY,
                allow_plaintext_token=self._settings.allow_plaintext_token,
            )
        return self._base

    def _give_seat(self) -> None:
        self._seats -= 1
        if self._seats or self._base is None:
            return
        closing = asyncio.create_task(_close(self._base, self._work))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._base = self._work = self._stream = self._reader = None
        self._last.clear()

    def _drop(self, token: str | None) -> None:
        badge = self._badges.pop(token)
        if not self._badges:
            self._some.clear()
        if badge is self._reader and self._stream is not None:
            self._stream.cancel()  # Nothing goes on in the name of somebody who left.

    def _expel(self, badge: _Badge, error: AccessError) -> None:
        """Credentials are not good any more: their viewers are told, and see no more."""
        problem = of_error(error)
        for viewer in badge.viewers:
            viewer.end(frames.refused(problem.status, problem.message))
        badge.viewers.clear()
        for token, one in list(self._badges.items()):
            if one is badge:
                self._drop(token)

    async def _watch(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._look_on())
                tasks.create_task(self._follow_on())
        except* Exception:  # noqa: BLE001 - whatever it is, viewers must hear of it
            _log.exception("the live page lost sight of a daemon")
            for badge in self._badges.values():
                for viewer in badge.viewers:
                    viewer.end(frames.lost("the gateway had a fault; its log has the details"))

    async def _look_on(self) -> None:
        while True:
            await self._some.wait()
            with contextlib.suppress(BatondClientError):
                await self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        for badge in list(self._badges.values()):
            if time.monotonic() - badge.checked_s < RECHECK_EVERY_S:
                continue
            try:
                await badge.client.policy()
                badge.checked_s = time.monotonic()
            except AccessError as error:
                self._expel(badge, error)
        for badge in list(self._badges.values())[:1]:
            info = await badge.client.server_info()
            self._rows = info.rows
            self._tell("daemon", frames.daemon(info))

    async def _follow_on(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            await self._some.wait()
            badge = next(iter(self._badges.values()))
            step = self._last.get("batch")
            reason = await self._follow(badge)
            if reason is None:
                continue
            if self._last.get("batch") is not step:
                delay_s = _FIRST_DELAY_S
            self._last.pop("batch", None)
            self._tell("lost", frames.lost(reason))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    async def _follow(self, badge: _Badge) -> str | None:
        """Read one stream to its end; returns why it ended, None where another one should begin at once."""
        self._reader = badge
        self._stream = stream = asyncio.create_task(self._read(badge.client))
        try:
            await stream
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return None  # Its viewers left.
        except AccessError as error:
            self._expel(badge, error)
            return None
        except BatondClientError as error:
            return str(error)
        finally:
            self._stream = self._reader = None
        return "the daemon has ended its stream"

    async def _read(self, client: AsyncClient) -> None:
        interval_s = LARGE_INTERVAL_S if self._rows > LARGE_ROWS else INTERVAL_S
        snapshots = cast("AsyncGenerator[BatchSnapshot]", client.watch_batch(interval_s))
        async with contextlib.aclosing(snapshots):
            async for snapshot in snapshots:
                self._last.pop("lost", None)
                self._tell("batch", frames.batch(snapshot))

    def _tell(self, kind: str, event: bytes) -> None:
        self._last[kind] = event
        for badge in self._badges.values():
            for viewer in badge.viewers:
                viewer.put(kind, event)


async def _close(client: AsyncClient, work: asyncio.Task[None] | None) -> None:
    if work is not None:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    await client.close()
