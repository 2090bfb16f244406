"""The callers, in a process of their own: `python -m batond.bench.load_client JSON`, a `Task` as JSON.

It says "ready" when its channels are connected and begins when it is sent a line. Streams say "steady" when
as many as there are rows have had a token, and "ending" a while later, or when the first has ended. The last
line is a `Result`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import msgspec

from batond.v1 import jobs_pb2, jobs_pb2_grpc, types_pb2

CHANNELS: Final = 8  # Callers in one process share connections, as tenants' programs do.
CONNECT_TIMEOUT_S: Final = 30.0
SERVICE: Final = "/batond.v1.JobService/"


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to call.

    Attributes:
        target: Address.
        token: Bearer token; empty is none.
        prefix: Of the jobs' names.
        calls: Jobs to submit, or streams to open.
        at_once: Submits under way at any time.
        max_tokens: Of each stream; 0 submits and does not look.
        rows: Streams that can have tokens at the same time; 0 is all.
        window_s: Streams are closed so long after the last has begun; 0 waits for their end.
        prompt_tokens: Of each job.
    """

    target: str
    token: str
    prefix: str
    calls: int
    at_once: int = 1
    max_tokens: int = 0
    rows: int = 0
    window_s: float = 0.0
    prompt_tokens: int = 32


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        wall_s: From the first call to the last answer.
        latencies_ms: Of submits.
        delays_ms: From the stamp in a token's text to its receipt, between "steady" and "ending".
        tokens: Received in all.
        broken: Streams that did not bring each token once and in order, all of them if they were not closed.
        behind: Tokens that came together with an earlier one of their stream, in one message.
    """

    wall_s: float
    latencies_ms: list[float] = []
    delays_ms: list[float] = []
    tokens: int = 0
    broken: int = 0
    behind: int = 0


@dataclass(slots=True)
class _Stream:
    """What one stream brought: time of receipt and the message as it came."""

    messages: list[tuple[int, bytes]] = field(default_factory=list)


def _stamped(data: bytes) -> tuple[int, bytes]:
    """In place of a parser: nothing is parsed before the end."""
    return time.monotonic_ns(), data


def say(word: str) -> None:
    """Tell the parent."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


class Callers:
    """Calls one server.

    Args:
        task: What to do.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._metadata = (("authorization", f"Bearer {task.token}"),) if task.token else ()
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [grpc.aio.insecure_channel(task.target, options=options) for _ in range(CHANNELS)]
        self._first_tokens = self._steady_ns = self._ending_ns = 0
        self._all_begun = asyncio.Event()

    async def run(self) -> Result:
        """Connect, wait for the word, call."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        gc.collect()
        gc.disable()  # Its pauses would count as the server's.
        try:
            return await (self._streams() if self._task.max_tokens else self._submits())
        finally:
            gc.enable()
            for channel in self._channels:
                await channel.close()

    def _spec(self, number: int) -> types_pb2.JobSpec:
        spec = types_pb2.JobSpec(sampling=types_pb2.SamplingParams(max_tokens=self._task.max_tokens or 64))
        spec.tokens.token_ids.extend((number + place) % 800 + 1 for place in range(self._task.prompt_tokens))
        return spec

    async def _submit(self, number: int) -> None:
        stub = jobs_pb2_grpc.JobServiceStub(self._channels[number % CHANNELS])
        job_id = f"{self._task.prefix}-{number}"
        request = jobs_pb2.SubmitJobRequest(job_id=job_id, spec=self._spec(number))
        answer = await stub.SubmitJob(request, metadata=self._metadata)
        if answer.job.job_id != job_id or answer.attached:
            raise RuntimeError(f"{job_id} is not the job that was made: {answer}")

    async def _submits(self) -> Result:
        numbers = iter(range(self._task.calls))
        latencies_ms = []

        async def caller() -> None:
            for number in numbers:
                started_s = time.monotonic()
                await self._submit(number)
                latencies_ms.append((time.monotonic() - started_s) * 1e3)

        started_s = time.monotonic()
        await asyncio.gather(*(caller() for _ in range(self._task.at_once)))
        return Result(wall_s=time.monotonic() - started_s, latencies_ms=latencies_ms)

    async def _streams(self) -> Result:
        started_s = time.monotonic()
        streams = [_Stream() for _ in range(self._task.calls)]
        tasks = [asyncio.create_task(self._stream(number, one)) for number, one in enumerate(streams)]
        if self._task.window_s:
            begun: asyncio.Task[Any] = asyncio.create_task(self._all_begun.wait())
            await asyncio.wait([begun, *tasks], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(tasks, timeout=self._task.window_s, return_when=asyncio.FIRST_COMPLETED)
            for one in tasks:
                if one.done():
                    one.result()  # None ends by itself so early.
            self._end_window()
            for one in (begun, *tasks):
                one.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        wall_s = time.monotonic() - started_s
        delays_ms: list[float] = []
        tokens = broken = behind = 0
        for number, stream in enumerate(streams):
            received, complete, together = self._read(number, stream, delays_ms)
            tokens, behind, broken = tokens + received, behind + together, broken + (not complete)
        return Result(wall_s=wall_s, delays_ms=delays_ms, tokens=tokens, broken=broken, behind=behind)

    async def _stream(self, number: int, stream: _Stream) -> None:
        """Every other stream is opened on a job that was submitted before."""
        channel = self._channels[number % CHANNELS]
        name, request = "GenerateStream", self._generate(number)
        if number % 2:
            await self._submit(number)
            name, request = "WatchJob", jobs_pb2.WatchJobRequest(job_id=f"{self._task.prefix}-{number}")
        method: Any = channel.unary_stream(
            SERVICE + name, request_serializer=type(request).SerializeToString, response_deserializer=_stamped
        )
        messages, marker, begun = stream.messages, b";", False
        async for message in method(request, metadata=self._metadata):
            messages.append(message)
            if not begun and marker in message[1]:
                begun = True
                self._begun()
        self._end_window()

    def _begun(self) -> None:
        self._first_tokens += 1
        if self._first_tokens == (self._task.rows or self._task.calls) and not self._ending_ns:
            self._steady_ns = time.monotonic_ns()
            self._all_begun.set()
            say("steady")

    def _end_window(self) -> None:
        if not self._ending_ns:
            self._ending_ns = time.monotonic_ns()
            say("ending")

    def _generate(self, number: int) -> Any:
        return jobs_pb2.GenerateStreamRequest(job_id=f"{self._task.prefix}-{number}", spec=self._spec(number))

    def _read(self, number: int, stream: _Stream, delays_ms: list[float]) -> tuple[int, bool, int]:
        """Parse what a stream brought.

        Returns:
            Its tokens, whether it was complete, and the tokens that came with an earlier one.
        """
        response = jobs_pb2.WatchJobResponse if number % 2 else jobs_pb2.GenerateStreamResponse
        received, complete, together = 0, True, 0
        for at_ns, data in stream.messages:
            event = response.FromString(data).event
            chunk = event.chunk
            if not chunk.token_ids:
                continue
            complete &= chunk.first_token_index == received
            received += len(chunk.token_ids)
            together += len(chunk.token_ids) - 1
            stamps = [int(stamp) for stamp in chunk.text.split(";")[:-1]]
            complete &= len(stamps) == len(chunk.token_ids)
            if self._steady_ns and self._steady_ns < at_ns <= self._ending_ns:
                delays_ms += [(at_ns - stamp) / 1e6 for stamp in stamps]
        if not self._task.window_s:
            complete &= received == self._task.max_tokens
        return received, complete, together


async def _main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    result = await Callers(task).run()
    say(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    asyncio.run(_main())
