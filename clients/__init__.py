"""Python clients of the batond gRPC API: `Client` for threads, `AsyncClient` for asyncio.

    from batond.clients import Chunk, Client

    with Client("127.0.0.1:7431") as client, client.generate("Once upon a time", max_tokens=64) as stream:
        for event in stream:
            if isinstance(event, Chunk):
                print(event.text, end="", flush=True)

Needs grpcio, grpcio-status and protobuf only. `batond.clients.errors` draws the tree of what can be raised.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batond.clients.aio import AsyncClient
    from batond.clients.aio_stream import AsyncJobStream
    from batond.clients.batch import (
        BatchSnapshot,
        ClassSnapshot,
        GovernorState,
        MemorySnapshot,
        QuerySnapshot,
        QueryState,
        RecentTimes,
        RowSnapshot,
    )
    from batond.clients.build import ChatMessage, JobOptions
    from batond.clients.client import Client
    from batond.clients.daemons import DaemonInfo
    from batond.clients.dead import DeadJob, DeadJobPage
    from batond.clients.errors import (
        AccessError,
        AlreadyExistsError,
        BatondClientError,
        CallCancelledError,
        CallEndedError,
        ClientDeadlineError,
        ExhaustedError,
        InvalidRequestError,
        JobCancelledError,
        JobEndedError,
        JobFailedError,
        NotFoundError,
        PermissionDeniedError,
        RequestError,
        RetryLaterError,
        ServerAbortedError,
        ServerDeadlineError,
        ServerError,
        TimeoutExpiredError,
        UnauthenticatedError,
        UnavailableError,
        UnsupportedCallError,
        WrongStateError,
    )
    from batond.clients.model import (
        Choice,
        Chunk,
        Event,
        Finished,
        FinishReason,
        JobInfo,
        JobPage,
        JobState,
        Preempted,
        Queued,
        Resumed,
        ServerInfo,
        ServerState,
        SlaClass,
        Started,
        TokenLogprobs,
        TopLogprob,
    )
    from batond.clients.retry import RetryPolicy
    from batond.clients.stream import JobStream
    from batond.clients.tenants import PolicyInfo, TenantInfo, TenantLimits, TenantToken
    from batond.clients.transport import DEFAULT_TARGET, ClientTLS

__all__ = [
    "DEFAULT_TARGET",
    "AccessError",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncJobStream",
    "BatchSnapshot",
    "BatondClientError",
    "CallCancelledError",
    "CallEndedError",
    "ChatMessage",
    "Choice",
    "Chunk",
    "ClassSnapshot",
    "Client",
    "ClientDeadlineError",
    "ClientTLS",
    "DaemonInfo",
    "DeadJob",
    "DeadJobPage",
    "Event",
    "ExhaustedError",
    "FinishReason",
    "Finished",
    "GovernorState",
    "InvalidRequestError",
    "JobCancelledError",
    "JobEndedError",
    "JobFailedError",
    "JobInfo",
    "JobOptions",
    "JobPage",
    "JobState",
    "JobStream",
    "MemorySnapshot",
    "NotFoundError",
    "PermissionDeniedError",
    "PolicyInfo",
    "Preempted",
    "QuerySnapshot",
    "QueryState",
    "Queued",
    "RecentTimes",
    "RequestError",
    "Resumed",
    "RetryLaterError",
    "RetryPolicy",
    "RowSnapshot",
    "ServerAbortedError",
    "ServerDeadlineError",
    "ServerError",
    "ServerInfo",
    "ServerState",
    "SlaClass",
    "Started",
    "TenantInfo",
    "TenantLimits",
    "TenantToken",
    "TimeoutExpiredError",
    "TokenLogprobs",
    "TopLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedCallError",
    "WrongStateError",
]

_HOMES = (
    "model",
    "batch",
    "errors",
    "client",
    "aio",
    "stream",
    "aio_stream",
    "build",
    "retry",
    "transport",
    "tenants",
    "dead",
    "daemons",
)


def __getattr__(name: str) -> object:
    """Imports what is asked for when it is asked for.

    grpc reads how much to log when it is first imported; batonctl, which is part of this package, must be
    able to say so before that. It also keeps the plain values (`model`, `batch`) free of grpc.
    """
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                found: object = getattr(module, name)
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
