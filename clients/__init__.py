"""Python clients of the batond gRPC API: `Client` for threads, `AsyncClient` for asyncio.

    from batond.clients import Chunk, Client

    with Client("127.0.0.1:7431") as client, client.generate("Once upon a time", max_tokens=64) as stream:
        for event in stream:
            if isinstance(event, Chunk):
                print(event.text, end="", flush=True)

Needs grpcio, grpcio-status and protobuf only. `batond.clients.errors` draws the tree of what can be raised.
"""

from batond.clients.aio import AsyncClient
from batond.clients.aio_stream import AsyncJobStream
from batond.clients.build import ChatMessage, JobOptions
from batond.clients.client import Client
from batond.clients.errors import BatondClientError
from batond.clients.model import (
    BatchSnapshot,
    Chunk,
    Event,
    Finished,
    FinishReason,
    JobInfo,
    JobPage,
    JobState,
    Preempted,
    QuerySnapshot,
    QueryState,
    Queued,
    Resumed,
    RowSnapshot,
    ServerInfo,
    ServerState,
    SlaClass,
    Started,
)
from batond.clients.retry import RetryPolicy
from batond.clients.stream import JobStream
from batond.clients.transport import DEFAULT_TARGET, ClientTLS

__all__ = [
    "DEFAULT_TARGET",
    "AsyncClient",
    "AsyncJobStream",
    "BatchSnapshot",
    "BatondClientError",
    "ChatMessage",
    "Chunk",
    "Client",
    "ClientTLS",
    "Event",
    "FinishReason",
    "Finished",
    "JobInfo",
    "JobOptions",
    "JobPage",
    "JobState",
    "JobStream",
    "Preempted",
    "QuerySnapshot",
    "QueryState",
    "Queued",
    "Resumed",
    "RetryPolicy",
    "RowSnapshot",
    "ServerInfo",
    "ServerState",
    "SlaClass",
    "Started",
]
