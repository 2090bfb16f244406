"""News of single jobs, from whichever daemon runs them, over one connection for all watchers of this daemon.

Each script that changes a job publishes on the job's own channel; a server sends that on to the daemons that
watch the job and to nobody else, so the cost of a token doesn't grow with the number of daemons. Pub/sub is
lossy: watchers look again now and then all the same.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from batond.daemon.queue.keys import Keys, job_ref, split_ref

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio.client import PubSub

SILENCE_S: Final = 30.0  # After this a server that says nothing is asked whether it is there.
RETRY_S: Final = 1.0
CANCEL_EVERY_S: Final = 0.2
HEARD: Final = frozenset({"subscribe", "message"})

_log = structlog.get_logger(__name__)


class NewsFeed:
    """Listens to the channels of the jobs that are watched here.

    Args:
        open_pubsub: Opens a subscriber of the queue's server, or of any node of its cluster.
        keys: The model's.
        on_news: Is told the tenant and id of a job of which there may be more to read: when listening to it
            began (what came before that is not told), and at each message.

    Attributes:
        up: Whether the connection stands. While it does not, nothing is told.
    """

    def __init__(
        self, open_pubsub: Callable[[], PubSub], keys: Keys, on_news: Callable[[str, str], None]
    ) -> None:
        self._open = open_pubsub
        self._keys = keys
        self._on_news = on_news
        self._prefix_chars = len(keys.news(""))
        self._wanted: set[str] = set()
        self._changed: set[str] = set()  # Channels to subscribe to or to leave.
        self._change = asyncio.Event()
        self.up = False

    def listen(self, tenant: str, job_id: str) -> None:
        """Tell of this job from now on."""
        channel = self._keys.news(job_ref(tenant, job_id))
        self._wanted.add(channel)
        self._note(channel)

    def leave(self, tenant: str, job_id: str) -> None:
        """Tell of it no longer."""
        channel = self._keys.news(job_ref(tenant, job_id))
        self._wanted.discard(channel)
        self._note(channel)

    async def run(self) -> None:
        """Listen until cancelled; a connection that breaks is made anew."""
        while True:
            await self._change.wait()
            try:
                async with self._open() as pubsub:
                    await self._serve(pubsub)
            except (RedisError, OSError) as error:
                _log.warning("news_lost", error=str(error), watched=len(self._wanted))
            finally:
                self.up = False
            await asyncio.sleep(RETRY_S)
            self._changed = set(self._wanted)
            if self._wanted:
                self._change.set()

    async def _serve(self, pubsub: PubSub) -> None:
        sent: set[str] = set()
        await self._send(pubsub, sent)  # Connects; there is nothing to read before.
        connection: Any = pubsub.connection
        if connection is None:  # Whoever watched has left before there was a connection.
            return
        # Reader and writer must not both mend a broken connection; it goes back to its pool as it was.
        kept, connection.retry = connection.retry, Retry(NoBackoff(), 0)
        self.up = True
        tasks = [asyncio.create_task(self._read(pubsub)), asyncio.create_task(self._write(pubsub, sent))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _end(tasks)
            connection.retry = kept

    async def _write(self, pubsub: PubSub, sent: set[str]) -> None:
        while True:
            await self._change.wait()
            await self._send(pubsub, sent)

    async def _send(self, pubsub: PubSub, sent: set[str]) -> None:
        """Subscribes to and leaves what changed since the last time, each with one command."""
        self._change.clear()
        changed, self._changed = self._changed, set()
        wanted = {channel for channel in changed if channel in self._wanted}
        if more := wanted - sent:
            await pubsub.subscribe(*more)
            sent |= more
        if fewer := (changed - wanted) & sent:
            await pubsub.unsubscribe(*fewer)
            sent -= fewer

    async def _read(self, pubsub: PubSub) -> None:
        silent = False
        while True:
            message = await pubsub.get_message(timeout=SILENCE_S)
            if message is not None:
                silent = False
                if message["type"] in HEARD:
                    self._tell(message)
            elif silent:
                raise RedisTimeoutError("the server does not answer a subscriber's ping")
            else:
                silent = True
                await pubsub.ping()

    def _tell(self, message: dict[str, Any]) -> None:
        ref = message["channel"].decode()[self._prefix_chars :]
        self._on_news(*split_ref(ref))

    def _note(self, channel: str) -> None:
        self._changed.add(channel)
        self._change.set()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels until all have ended: the client's `wait_for` can swallow one cancel on Python 3.11."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_EVERY_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # Their errors are known, or of no interest.
