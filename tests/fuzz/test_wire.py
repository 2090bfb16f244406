"""Frames that no engine sends: each is refused as such, and nothing else comes out of the channel."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import TYPE_CHECKING

import msgspec

from batond.daemon.wire.channel import ChannelClosed, ChannelError, FrontChannel, encode_frame
from batond.daemon.wire.messages import (
    Finished,
    FinishReason,
    ParkCause,
    Preempted,
    StepEvents,
    Tokens,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Plan

USAGE = Usage(prompt_tokens=1, output_tokens=1, parks=0, recomputed_tokens=0, waited_s=0.0, parked_s=0.0)
GOOD = StepEvents(
    step=3,
    events=[
        Tokens(query_id="t/j@1", first_index=0, token_ids=[1, 2], text="ab"),
        Preempted(query_id="t/j@1", cause=ParkCause.ROW, kept=True, parked_bytes=1, for_query_id=""),
        Finished(query_id="t/j@1", finish_reason=FinishReason.LENGTH, usage=USAGE),
    ],
)


def hostile_frame(rng: random.Random) -> bytes:
    """A frame that was cut, flipped, lies about its size, or never was one."""
    good = bytearray(encode_frame(msgspec.msgpack.Encoder(), GOOD))
    match rng.randrange(6):
        case 0:
            return bytes(good[: rng.randrange(len(good))])
        case 1:
            for _ in range(rng.randint(1, 5)):
                good[rng.randrange(4, len(good))] ^= 1 << rng.randrange(8)
            return bytes(good)
        case 2:
            good[0:4] = rng.choice((0, 1, len(good), 1 << 26, (1 << 32) - 1)).to_bytes(4, "little")
            return bytes(good)
        case 3:
            size = rng.choice((1, 10, 5000))
            return size.to_bytes(4, "little") + rng.randbytes(size)
        case 4:
            deep = rng.choice((b"\x91", b"\x81\xa1a")) * 30_000
            return len(deep).to_bytes(4, "little") + deep
        case _:
            return rng.randbytes(rng.randrange(40))


async def test_a_frame_that_is_none_is_refused_as_such(plan: Plan, say: Callable[..., None]) -> None:
    """D3: the link takes these two for the end of the engine, and starts another one."""
    refused = 0
    for number in plan.numbers(500, 20_000):
        ours, theirs = socket.socketpair()
        channel = await FrontChannel.open(ours)
        with theirs:
            theirs.sendall(hostile_frame(random.Random(f"{plan.seed}/{number}")))
        try:
            async with asyncio.timeout(30):
                while True:
                    assert isinstance(await channel.receive(), msgspec.Struct)
        except (ChannelError, ChannelClosed):
            refused += 1
        await channel.close()
    say(f"{refused} streams ended as they should")
    assert refused == len(plan.numbers(500, 20_000))
