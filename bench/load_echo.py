"""A bare gRPC server with the daemon's messages and nothing behind them: the floor the front is held against.

`python -m batond.bench.load_echo SOCKET ROWS STEP_S`. It answers a submit with the job as the front would
show it, and a stream with a token a step, all streams at the same moment, as they come from an engine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import grpc

from batond.v1 import jobs_pb2, jobs_pb2_grpc, types_pb2


class Echo(jobs_pb2_grpc.JobServiceServicer):
    """Answers at once.

    Args:
        rows: Streams that get tokens; those opened later wait.
        step_s: Time between two tokens of a stream.
    """

    def __init__(self, rows: int, step_s: float) -> None:
        self._free, self._step_s = rows, step_s
        self._stamp = ""
        self._beat = asyncio.Event()
        self._tokens: dict[str, int] = {}

    async def beat(self) -> None:
        """Wake all streams once a step, for ever."""
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self._step_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            self._stamp = f"{time.monotonic_ns()};"
            beat, self._beat = self._beat, asyncio.Event()
            beat.set()

    async def SubmitJob(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002 - the contract's names
        """Describe the job."""
        self._tokens[request.job_id] = request.spec.sampling.max_tokens
        job = types_pb2.Job(
            job_id=request.job_id,
            tenant="load",
            model="load",
            state=types_pb2.JOB_STATE_QUEUED,
            effective_sla_class="standard",
            queue_position=1,
            prompt_tokens=len(request.spec.tokens.token_ids),
        )
        job.created_time.GetCurrentTime()
        return jobs_pb2.SubmitJobResponse(job=job)

    async def GenerateStream(self, request: Any, context: Any) -> None:  # noqa: N802 - the contract's name
        """Stream tokens."""
        await self._stream(request.spec.sampling.max_tokens, context, jobs_pb2.GenerateStreamResponse)

    async def WatchJob(self, request: Any, context: Any) -> None:  # noqa: N802 - the contract's name
        """Stream tokens."""
        await self._stream(self._tokens.pop(request.job_id), context, jobs_pb2.WatchJobResponse)

    async def _stream(self, tokens: int, context: Any, response: Any) -> None:
        if not self._free:
            await asyncio.Event().wait()  # Until the caller leaves.
        self._free -= 1
        for index in range(tokens):
            await self._beat.wait()
            event = types_pb2.StreamEvent(sequence=index)
            event.time.GetCurrentTime()
            event.chunk.first_token_index = index
            event.chunk.token_ids.append(5)
            event.chunk.text = self._stamp
            await context.write(response(event=event))


async def serve(path: str, rows: int, step_s: float) -> None:
    """Serve until killed."""
    server = grpc.aio.server()
    echo = Echo(rows, step_s)
    jobs_pb2_grpc.add_JobServiceServicer_to_server(echo, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await echo.beat()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
