"""Sends what `fuzz_messages` makes to a daemon and judges the answers.

Every call must end with a status that says what the caller did, well or wrong. UNKNOWN and INTERNAL are
faults of the daemon, and so is a call that never ends. Each fault comes with the number that repeats it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc

from batond.bench.fuzz_messages import Case, case

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping

#: Calls at the same time, each on a connection of its own: what harms a connection harms one call.
CALLERS: Final = 16
#: No call may take longer on the slowest machine.
LONGEST_S: Final = 60.0
HUNG: Final = "HUNG"
#: What the client's own side of gRPC could not send, or sent into a call that had ended.
LOCAL: Final = "NOT SENT"
_LOCAL_DETAILS: Final = frozenset({"Internal error from Core", "Invalid metadata"})
_FAULTS: Final = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "ABORTED", "OUT_OF_RANGE", HUNG})
_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


@dataclass(slots=True)
class Tally:
    """What came of a run.

    Attributes:
        statuses: How often each status was answered to each kind of request.
        faults: A line for each answer that must not be.
    """

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def calls(self) -> int:
        """Calls made."""
        return sum(self.statuses.values())

    def take(self, seed: int, one: Case, status: str, details: str) -> None:
        """Count an answer."""
        self.statuses[one.kind, status] += 1
        if status in _FAULTS:
            self.faults.append(
                f"seed {seed} number {one.number}: {one.kind} to {one.path}: {status} {details[:300]}"
            )

    def lines(self) -> Iterator[str]:
        """The counts, a line a kind."""
        for kind in sorted({kind for kind, _ in self.statuses}):
            counts = {status: n for (of, status), n in sorted(self.statuses.items()) if of == kind}
            yield f"{kind:16} " + ", ".join(f"{status} {n}" for status, n in counts.items())


async def fuzz(
    target: str,
    tokens: Mapping[str, str],
    seed: int,
    numbers: Iterable[int],
    *,
    between: Callable[[int], Awaitable[None]] | None = None,
    every: int = 500,
) -> Tally:
    """Make the calls of some numbers.

    Args:
        target: Address of the daemon.
        tokens: See `fuzz_messages.case`.
        seed: Of all calls.
        numbers: Which.
        between: Awaited beside the calls, with a number, after every so many.
        every: See `between`.
    """
    tally = Tally()
    left = iter(numbers)

    async def caller() -> None:
        async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
            for number in left:
                one = case(seed, number, tokens)
                tally.take(seed, one, *await answer(channel, one))
                if between is not None and number % every == every - 1:
                    await between(number)

    async with asyncio.TaskGroup() as group:
        for _ in itertools.repeat(None, CALLERS):
            group.create_task(caller())
    return tally


async def answer(channel: grpc.aio.Channel, one: Case) -> tuple[str, str]:
    """Make one call; returns name and details of its status."""
    # Bytes are sent as they are, which the types of these two do not know.
    unary_stream: Any = channel.unary_stream
    stream_stream: Any = channel.stream_stream
    call: Any
    if len(one.requests) == 1:
        call = unary_stream(one.path)(one.requests[0], metadata=one.metadata)
    else:
        call = stream_stream(one.path)(_sent(one.requests), metadata=one.metadata)
    try:
        async with asyncio.timeout(LONGEST_S):
            await _read(call, one.patience_s)
            code, details = await call.code(), await call.details()
    except TimeoutError:
        call.cancel()
        return HUNG, ""
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details()
    except asyncio.CancelledError:
        if not call.cancelled():
            raise  # Not the call: the run.
        return "CANCELLED", ""
    return (LOCAL if details in _LOCAL_DETAILS else code.name), details or ""


async def _read(call: Any, patience_s: float | None) -> None:
    """Read what is answered; of a stream that never ends, for a while."""
    try:
        async with asyncio.timeout(patience_s):
            async for _ in call:
                pass
    except TimeoutError:
        call.cancel()


async def _sent(requests: Iterable[bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request
