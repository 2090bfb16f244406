"""The reading half of the job store: nothing here changes a job."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

import msgspec
from redis.exceptions import RedisError

from batond.daemon.errors import BatondError, InvalidRequestError, NotFoundError
from batond.daemon.queue import dead
from batond.daemon.queue.calls import call, heed_cancel
from batond.daemon.queue.codec import decode_claimed
from batond.daemon.queue.connection import domain_error
from batond.daemon.queue.keys import Keys, job_ref, split_ref
from batond.daemon.queue.look import Look, Sight, ask_output, read_output, read_sight
from batond.daemon.queue.records import (
    Chunk,
    Counts,
    DeadLetter,
    DeadPage,
    GarbageError,
    JobRecord,
    JobSpec,
    JobState,
    Notice,
    NoticeKind,
    Page,
    Place,
    decode_record,
    decode_spec,
)
from batond.daemon.queue.together import Together

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence

    import redis.asyncio
    from redis.asyncio.client import PubSub

    from batond.daemon.queue.calls import Argument

MAX_PAGE: Final = 1000
MOST_DIGITS: Final = 18  # Of a counter.
PUBSUB_POLL_S: Final = 30.0
PAGE_CHUNKS: Final = 2000  # Of all choices, at once: some milliseconds of the server and of the event loop.
LOOK_AT: Final = 2000  # Index entries one page may look at: bounds the server's time for a rare state.


class JobReader:
    """Reads jobs of one model.

    Args:
        client: Not decoding responses. The caller closes it.
        model: Whose queue.
        classes: Names of all classes, most urgent first.
    """

    def __init__(self, client: redis.asyncio.Redis, model: str, classes: Sequence[str]) -> None:
        self._client = client
        self._together = Together(client)
        self.keys = Keys(model)
        self.classes = tuple(classes)
        self._ahead_ms = 0.0

    @property
    def now_ms(self) -> float:
        """What the clock of Redis shows, as of the last claim; the times in records are its."""
        return time.time() * 1000 + self._ahead_ms

    def _note_clock(self, now_ms: int) -> None:
        self._ahead_ms = now_ms - time.time() * 1000

    async def _call_together(self, name: str, *args: Argument) -> Any:
        """As `_call`, for what many clients ask at once."""
        return await call(cast("redis.asyncio.Redis", self._together), self.keys, name, *args)

    async def _call(self, name: str, *args: Argument) -> Any:
        return await call(self._client, self.keys, name, *args)

    async def _ask(self, question: Any) -> Any:
        """Awaits a plain command, with failures mapped as scripts' are."""
        try:
            return await cast("Awaitable[Any]", question)
        except RedisError as error:
            raise domain_error(error) from error
        finally:
            heed_cancel()

    async def ping(self) -> None:
        """Returns if Redis answers.

        Raises:
            UnavailableError: It does not.
        """
        await self._ask(self._client.ping())

    async def get(self, tenant: str, job_id: str) -> JobRecord:
        """Gives a job of this tenant.

        Raises:
            NotFoundError: There is none, it expired, or it is another tenant's.
        """
        ref = job_ref(tenant, job_id)
        with _readable(tenant, job_id):
            fields = await self._ask(self._client.hgetall(self.keys.job(ref)))
            flat = [item for pair in fields.items() for item in pair]
            return self._own(tenant, job_id, decode_record(flat) if flat else None)

    async def get_spec(self, tenant: str, job_id: str) -> JobSpec:
        """Gives what a job of this tenant runs.

        Raises:
            NotFoundError: See `get`.
        """
        with _readable(tenant, job_id):
            return decode_spec(await self._ask(self._client.get(self.keys.spec(job_ref(tenant, job_id)))))

    @staticmethod
    def _own(tenant: str, job_id: str, record: JobRecord | None) -> JobRecord:
        if record is None or (record.tenant, record.job_id) != (tenant, job_id):
            raise _not_found(tenant, job_id)
        return record

    async def read_chunks(
        self, tenant: str, job_id: str, from_index: int = 0, *, choice: int = 0, limit: int | None = None
    ) -> list[Chunk]:
        """Gives committed output of a choice from a token index on, in order.

        A chunk that begins before `from_index` and reaches over it comes whole: its text can't be cut at a
        token. The caller sees that by `first_index`.

        Args:
            tenant: Whose.
            job_id: Which.
            from_index: First output token wanted, from 0.
            choice: Which of the job's choices.
            limit: Most chunks to give; None gives all.

        Raises:
            InvalidRequestError: `from_index` is negative.
        """
        (chunks,) = await self._read(tenant, job_id, {choice: from_index}, limit)
        return chunks

    async def read_choices(self, tenant: str, job_id: str, from_indexes: Sequence[int]) -> list[list[Chunk]]:
        """Gives committed output of all choices, in one round trip unless it is long; see `read_chunks`.

        Args:
            tenant: Whose.
            job_id: Which.
            from_indexes: First output token wanted of each choice, from 0.

        Raises:
            InvalidRequestError: An index is negative.
        """
        return await self._read(tenant, job_id, dict(enumerate(from_indexes)), None)

    async def _read(
        self, tenant: str, job_id: str, from_indexes: Mapping[int, int], limit: int | None
    ) -> list[list[Chunk]]:
        """Output of some choices, by the first token wanted of each."""
        pipe = self._client.pipeline(transaction=False)
        size = max(1, PAGE_CHUNKS // max(1, len(from_indexes)))
        names = [self.keys.out(job_ref(tenant, job_id), choice) for choice in from_indexes]
        for name, from_index in zip(names, from_indexes.values(), strict=True):
            if from_index < 0:
                raise InvalidRequestError(
                    "from_index must not be negative", field="from_index", value=from_index
                )
            ask_output(pipe, name, from_index, size if limit is None else min(limit, size))
        with _readable(tenant, job_id):
            replies = await self._ask(pipe.execute())
            pages = zip(names, from_indexes.values(), replies[::2], replies[1::2], strict=True)
            return [
                (read_output(before, page, start) + await self._rest(name, page, size, limit))[:limit]
                for name, start, before, page in pages
            ]

    async def _rest(self, name: str, page: Any, size: int, limit: int | None) -> list[Chunk]:
        """What follows a first page of one choice; others get their turn between the pages."""
        chunks: list[Chunk] = []
        while len(page) == size and (limit is None or len(chunks) + size < limit):
            after = f"({page[-1][0].decode()}"
            page = await self._ask(self._client.xrange(name, after, "+", count=size))
            chunks += read_output([], page, 0)
        return chunks

    async def look(self, looks: Sequence[Look]) -> list[Sight]:
        """Gives state and committed output of many jobs, in one round trip; of long output the beginning."""
        pipe = self._client.pipeline(transaction=False)
        for look in looks:
            ref = job_ref(look.tenant, look.job_id)
            # The state comes first: if it is final, all output is there to be read.
            pipe.hget(self.keys.job(ref), "state")
            for choice, from_index in enumerate(look.from_indexes):
                ask_output(pipe, self.keys.out(ref, choice), from_index, look.limit)
        # A key somebody wrote by hand fails its own look only.
        replies = iter(await self._ask(pipe.execute(raise_on_error=False)))
        return [
            read_sight(next(replies), [(next(replies), next(replies)) for _ in look.from_indexes], look)
            for look in looks
        ]

    async def place(self, tenant: str, job_id: str) -> Place | None:
        """Estimates the jobs that will be claimed before this one, and its start; None if it does not wait.

        Costs a few look-ups a class and a tenant, whatever waits.

        Raises:
            NotFoundError: See `get`.
        """
        found = await self._call_together("position", job_ref(tenant, job_id), *self.classes)
        if found is None:
            raise _not_found(tenant, job_id)
        if not isinstance(found, list):
            return None
        ahead, start_ms, left_ms = found
        return Place(ahead=ahead, start_ms=int(start_ms), left_ms=int(left_ms))

    async def list_jobs(
        self, tenant: str, *, state: JobState | None = None, cursor: str = "", limit: int = 100
    ) -> Page:
        """Gives a tenant's jobs, newest first.

        Args:
            tenant: Whose.
            state: Only these; None is all.
            cursor: `next_cursor` of the page before; empty begins.
            limit: Most jobs to give, 1 to 1000.

        Raises:
            InvalidRequestError: The cursor is none of ours, or the limit is out of range.
        """
        if cursor and not (cursor.isascii() and cursor.isdigit()):
            raise InvalidRequestError(
                "this cursor was not given by a list call", field="cursor", value=cursor
            )
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidRequestError(f"limit must be from 1 to {MAX_PAGE}", field="limit", value=limit)
        found, following = await self._call(
            "list", quote(tenant, safe=""), state or "", cursor, limit, LOOK_AT
        )
        jobs = []
        for flat in found:
            with contextlib.suppress(GarbageError):
                jobs.append(decode_record(flat))
        return Page(jobs=jobs, next_cursor=following.decode())

    async def counts(self) -> Counts:
        """Gives the figures for metrics, in one call."""
        classes, held, dead, totals = await self._call("counts")
        return Counts(
            queued={name.decode(errors="replace"): waiting for name, waiting, _ in classes},
            oldest_wait_ms={name.decode(errors="replace"): age_ms for name, _, age_ms in classes},
            held=held,
            dead=dead,
            totals={
                name.decode(errors="replace"): _number(n)
                for name, n in zip(totals[::2], totals[1::2], strict=True)
            },
        )

    async def dead_page(self, *, cursor: str = "", limit: int = 50) -> DeadPage:
        """Gives dead letters, newest first. For operators: names jobs of all tenants.

        Letters that are dropped or added between two pages move no other one out of the list.

        Args:
            cursor: `next_cursor` of the page before; empty begins.
            limit: Most letters to give, 1 to 200: so many fit into an answer, whatever is in them.

        Raises:
            InvalidRequestError: The cursor is none of ours, or the limit is out of range.
        """
        if not 1 <= limit <= dead.MAX_PAGE:
            raise InvalidRequestError(f"limit must be from 1 to {dead.MAX_PAGE}", field="limit", value=limit)
        found, more = await self._call("dead_list", *dead.decode_cursor(cursor), limit)
        letters = []
        for member, score, evidence, flat, has_spec in found:
            letter = dead.decode_letter(member, score, evidence, flat, has_spec=bool(has_spec))
            if letter.reason == "BAD_RECORD" and not letter.obstacle:
                letter = msgspec.structs.replace(letter, obstacle=await self._obstacle(member))
            letters.append(letter)
        return DeadPage(letters=letters, next_cursor=dead.encode_cursor(*found[-1][:2]) if more else "")

    async def dead_letters(self) -> list[DeadLetter]:
        """Gives the first page of dead letters."""
        return (await self.dead_page(limit=dead.MAX_PAGE)).letters

    async def _obstacle(self, member: bytes) -> str:
        """Says why a dead letter can't be retried, by all that its job has; empty if it can."""
        ref = member.decode(errors="replace")
        try:
            fields = await self._ask(self._client.hgetall(self.keys.job(ref)))
            flat = [item for pair in fields.items() for item in pair]
            if not flat:
                return dead.NO_JOB
            record = decode_record(flat)
            if record.state is not JobState.DEAD:
                return f"its job is {record.state}"
            spec = await self._ask(self._client.get(self.keys.spec(ref)))
            outputs = []
            for choice in range(record.choices):
                chunks = await self._ask(self._client.xrange(self.keys.out(ref, choice)))
                outputs.append(
                    [(at, [part for pair in kept.items() for part in pair]) for at, kept in chunks]
                )
            decode_claimed(member, flat, spec, outputs, 0)
        except GarbageError as error:
            return dead.printable(str(error))
        except BatondError as error:
            if error.reason != "QUEUE_SCRIPT":
                raise
            return "a key of it holds something of another type"
        return ""

    async def notices(self, owner: str) -> AsyncIterator[Notice]:
        """Tells a daemon of new jobs and of cancels. The first notice, SYNC, comes when it is listening.

        Notices can get lost while Redis is away: poll slowly beside this (claims, renewals).

        Raises:
            UnavailableError: The connection broke; call again.
        """
        orders = self.keys.orders(owner)
        async with self._client.pubsub() as pubsub:
            try:
                await pubsub.subscribe(self.keys.wake, orders)
                async for message in _messages(pubsub):
                    notice = _notice(message, orders)
                    if notice is not None:
                        yield notice
            except RedisError as error:
                raise domain_error(error) from error


async def _messages(pubsub: PubSub) -> AsyncIterator[dict[str, Any]]:
    """Like `listen`, which some versions of the client end with the socket's time-out."""
    while True:
        message = await pubsub.get_message(timeout=PUBSUB_POLL_S)
        if message is not None:
            yield message


@contextlib.contextmanager
def _readable(tenant: str, job_id: str) -> Iterator[None]:
    """What somebody wrote by hand where a job's keys belong is no job."""
    try:
        yield
    except GarbageError as error:
        raise _not_found(tenant, job_id) from error
    except BatondError as error:
        if error.reason != "QUEUE_SCRIPT":  # A key of another type.
            raise
        raise _not_found(tenant, job_id) from error


def _number(raw: bytes) -> int:
    """A counter, 0 if it is none."""
    return int(raw) if raw.isdigit() and len(raw) <= MOST_DIGITS else 0


def _not_found(tenant: str, job_id: str) -> NotFoundError:
    return NotFoundError(
        f"there is no job {job_id!r}: it was never submitted by this tenant, or its result has expired",
        tenant=tenant,
        job_id=job_id,
    )


def _notice(message: dict[str, Any], orders: str) -> Notice | None:
    """Reads a message of a daemon's two channels. The second confirmation means: listening to both."""
    if message["type"] == "subscribe":
        return Notice(kind=NoticeKind.SYNC) if message["channel"].decode() == orders else None
    if message["type"] != "message":
        return None
    payload = message["data"].decode(errors="replace")
    if message["channel"].decode() != orders:
        return Notice(kind=NoticeKind.WAKE, sla_class=payload)
    # A reference has no spaces.
    order, _, ref = payload.rpartition(" ")
    tenant, job_id = split_ref(ref)
    try:
        job_ref(tenant, job_id)
    except InvalidRequestError:
        return None  # Somebody else spoke.
    kind = NoticeKind.UPDATE if order == "update" else NoticeKind.CANCEL
    return Notice(kind=kind, tenant=tenant, job_id=job_id)
