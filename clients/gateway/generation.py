"""One request for text: its jobs, and the answer as their events come. Who goes away cancels them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse

from batond.clients.errors import BatondClientError
from batond.clients.gateway import shapes
from batond.clients.gateway.problems import ApiError, of_error, of_job
from batond.clients.gateway.tokens import ids_of
from batond.clients.model import Chunk, Finished, FinishReason, Queued

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from starlette.types import Receive, Scope, Send

    from batond.clients.aio import AsyncClient
    from batond.clients.aio_stream import AsyncJobStream
    from batond.clients.gateway.asked import Asked
    from batond.clients.gateway.tokens import TokenTexts
    from batond.clients.model import Event, JobInfo

_STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the pieces.
)


class Generation:
    """An ASGI application that answers one request.

    Args:
        asked: What is wanted.
        client: Calls in the caller's name.
        texts: What the model's tokens stand for.
        tiers: SLA class by tier.
        keepalive_s: How often a silent stream gets a comment.
    """

    def __init__(
        self,
        asked: Asked,
        client: AsyncClient,
        texts: TokenTexts,
        *,
        tiers: Mapping[str, str],
        keepalive_s: float,
    ) -> None:
        self._asked, self._client, self._texts, self._tiers = asked, client, texts, tiers
        self._keepalive_s = keepalive_s
        self._name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._shape = shapes.Shape(asked, self._name, int(time.time()), texts)
        self._streams: list[AsyncJobStream] = []
        self._begun = self._gone = False
        self._sent_s = 0.0
        self._started: set[int] = set()
        self._ended: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        watcher = asyncio.create_task(self._watch(receive, send))
        try:
            await self._answer(scope, receive, send)
        finally:
            watcher.cancel()
            await self._close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._streams = [
                self._client.generate(**self._options(place)) for place in range(len(self._asked.prompts))
            ]
            if self._asked.stream:
                await self._stream(send)
            else:
                answer = await self._whole()
                headers = {"x-request-id": self._name}
                await JSONResponse(answer, headers=headers)(scope, receive, send)
        except (ApiError, BatondClientError) as raised:
            error = raised if isinstance(raised, ApiError) else of_error(raised)
            if self._gone:
                return
            if self._begun:
                await self._send(send, shapes.event(error.body), more=False)
            else:
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)

    def _options(self, place: int) -> dict[str, Any]:
        prompt = self._asked.prompts[place]
        name = self._name if len(self._asked.prompts) == 1 else f"{self._name}-{place}"
        options: dict[str, Any] = {**self._asked.options, "job_id": name}
        if isinstance(prompt, str):
            options["prompt"] = prompt
        elif prompt is not None:
            options["token_ids"] = prompt
        return options

    # -- whole ----------------------------------------------------------------------------------------------

    async def _whole(self) -> dict[str, Any]:
        tasks = [asyncio.create_task(stream.last_job()) for stream in self._streams]
        try:
            jobs = await asyncio.gather(*tasks)
        finally:
            await self._close()
            await asyncio.gather(*tasks, return_exceptions=True)
        for job in jobs:
            if (error := of_job(job)) is not None:
                raise error
            for one in shapes.outputs_of(job):
                await self._learn(ids_of((*job.prompt_logprobs, *one.logprobs)))
        await self._learn_prompts()
        self._shape.set_tier(self._tier(jobs[0].effective_sla_class))
        return self._shape.whole(jobs)

    # -- pieces ---------------------------------------------------------------------------------------------

    async def _stream(self, send: Send) -> None:
        jobs: dict[int, JobInfo] = {}
        async for place, event in self._events():
            if isinstance(event, Chunk):
                data = await self._chunk(place, event)
                if data:
                    await self._send(send, data)
            elif isinstance(event, Queued):
                await self._begin(event, send)
            elif isinstance(event, Finished):
                jobs[place] = event.job
                await self._finished(place, event.job, send)
                if len(jobs) == len(self._streams):
                    break
        data = (
            self._shape.usage([jobs[place] for place in sorted(jobs)]) if self._asked.include_usage else b""
        )
        await self._send(send, data + shapes.DONE, more=False)

    async def _begin(self, queued: Queued, send: Send) -> None:
        """Accepted: from here on errors are events of the stream."""
        if self._begun:
            return
        self._begun = True
        await self._learn_prompts()
        self._shape.set_tier(self._tier(queued.effective_sla_class))
        self._shape.begin()
        headers = [*_STREAM_HEADERS, (b"x-request-id", self._name.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, b"")  # Sends the head.

    async def _chunk(self, place: int, chunk: Chunk) -> bytes:
        index = place * self._asked.n + chunk.choice
        data = b""
        if index not in self._started:
            data = await self._first(place, index, chunk)
        if chunk.logprobs:
            await self._learn(ids_of(chunk.logprobs))
        if chunk.text or chunk.logprobs:
            data += self._shape.text(index, chunk.text, chunk.logprobs)
        if chunk.finish_reason is not FinishReason.UNKNOWN:
            self._ended.add(index)
            data += self._shape.last(index, chunk.finish_reason)
        return data

    async def _first(self, place: int, index: int, chunk: Chunk) -> bytes:
        self._started.add(index)
        data = self._shape.first(index)
        if self._asked.echo:
            await self._learn(ids_of(chunk.prompt_logprobs))
            data += self._shape.text(index, self._shape.prompt_text(place), chunk.prompt_logprobs)
        return data

    async def _finished(self, place: int, job: JobInfo, send: Send) -> None:
        if (error := of_job(job)) is not None:
            raise error
        data = b""
        for number, one in enumerate(shapes.outputs_of(job)):
            index = place * self._asked.n + number
            if index not in self._started:
                data += await self._first(place, index, Chunk(0, (), ""))
            if index not in self._ended:
                data += self._shape.last(index, one.finish_reason)
        if data:
            await self._send(send, data)

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """All streams' events as they come, with the place of their prompt."""
        if len(self._streams) == 1:
            async for event in self._streams[0]:
                yield 0, event
            return
        queue: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue(len(self._streams))

        async def read(place: int, stream: AsyncJobStream) -> None:
            try:
                async for event in stream:
                    await queue.put((place, event))
            except BatondClientError as error:
                await queue.put((place, error))

        tasks = [asyncio.create_task(read(place, one)) for place, one in enumerate(self._streams)]
        try:
            while True:
                place, found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                yield place, found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- shared ---------------------------------------------------------------------------------------------

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Cancel when the caller goes away; until then, keep a silent stream from being closed."""
        while True:
            try:
                async with asyncio.timeout(self._keepalive_s):
                    message = await receive()
            except TimeoutError:
                if self._begun and time.monotonic() - self._sent_s >= self._keepalive_s:
                    await self._send(send, shapes.KEEPALIVE)
                continue
            if message["type"] == "http.disconnect":
                self._gone = True
                await self._close()
                return

    async def _close(self) -> None:
        """End all streams, which cancels what has not ended."""
        await asyncio.gather(*(stream.close() for stream in self._streams))

    async def _learn_prompts(self) -> None:
        if self._asked.echo:
            for prompt in self._asked.prompts:
                if isinstance(prompt, list):
                    await self._learn(prompt)

    async def _learn(self, token_ids: Iterable[int]) -> None:
        # An older daemon can't tell: ids are shown then.
        with contextlib.suppress(BatondClientError):
            await self._texts.learn(self._client, token_ids, self._asked.model)

    def _tier(self, sla_class: str) -> str | None:
        """The tier that serves: the one asked for, unless the tenant was given another class."""
        if self._asked.tier and self._tiers.get(self._asked.tier) in {"", sla_class}:
            return self._asked.tier
        return next((tier for tier, one in self._tiers.items() if one == sla_class), None)
