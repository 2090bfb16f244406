"""The socket pair between front and engine: framing, order, ends, and loud errors."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from batond.daemon.errors import InvalidRequestError
from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire import channel as channel_module
from batond.daemon.wire.channel import ChannelClosed, ChannelError, EngineChannel, FrameBuffer, FrontChannel
from batond.daemon.wire.messages import Cancel, Loading, StepEvents, Stop, Submit, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def _submit(query_id: str, prompt: list[int]) -> Submit:
    return Submit(
        query_id=query_id,
        tenant="t",
        sla_class="standard",
        prompt_token_ids=prompt,
        sampling=SamplingParams(stop=("a",)),
        seed=7,
    )


async def test_messages_arrive_equal_and_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    front, engine = await FrontChannel.open(pair[0]), EngineChannel(pair[1])
    commands = [_submit("q1", [1, 2]), Cancel(query_id="q1"), Stop()]
    for command in commands:
        front.send(command)
    received: list[object] = []
    while len(received) < len(commands):
        received += await asyncio.to_thread(engine.poll, 5.0)
    assert received == commands

    events = [
        Loading(note="x"),
        StepEvents(step=1, events=[Tokens(query_id="q1", first_index=0, token_ids=[3], text="é")]),
    ]
    for event in events:
        engine.send(event)
    assert [await front.receive() for _ in events] == events
    await front.close()


async def test_messages_larger_than_the_socket_buffer_pass_both_ways(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    front, engine = await FrontChannel.open(pair[0]), EngineChannel(pair[1])
    big = _submit("q1", list(range(600_000)))
    front.send(big)
    received: list[object] = []
    while not received:
        received += await asyncio.to_thread(engine.poll, 5.0)
    assert received == [big]

    event = Loading(note="n" * 3_000_000)
    sender = threading.Thread(target=engine.send, args=(event,))
    sender.start()
    assert await front.receive() == event
    sender.join(5)
    await front.close()


def test_poll_returns_at_once_with_what_is_there_and_else_waits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    engine = EngineChannel(pair[1])
    started_s = time.monotonic()
    assert engine.poll(0.05) == []
    assert time.monotonic() - started_s >= 0.045
    assert engine.poll() == []
    assert not engine.waiting()
    encoder = msgspec.msgpack.Encoder()
    pair[0].sendall(channel_module.encode_frame(encoder, Stop()))
    assert engine.waiting()
    assert engine.poll(600.0) == [Stop()]


def test_what_was_sent_before_the_end_is_delivered_before_the_end_is_raised(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    engine = EngineChannel(pair[1])
    pair[0].sendall(channel_module.encode_frame(msgspec.msgpack.Encoder(), Stop()))
    pair[0].close()
    assert engine.poll(1.0) == [Stop()]
    with pytest.raises(ChannelClosed):
        engine.poll(1.0)
    with pytest.raises(ChannelClosed):
        engine.send(Loading(note="anybody there?"))


async def test_the_front_sees_the_end_of_the_engine(pair: tuple[socket.socket, socket.socket]) -> None:
    front, engine = await FrontChannel.open(pair[0]), EngineChannel(pair[1])
    engine.close()
    with pytest.raises(ChannelClosed):
        await front.receive()
    await front.close()
    with pytest.raises(ChannelClosed):
        front.send(Stop())


@pytest.mark.parametrize(
    "payload",
    [b"\xc1", b"\x80", b"garbage", msgspec.msgpack.encode({"type": "Unheard"}), msgspec.msgpack.encode([1])],
)
async def test_garbage_is_loud(pair: tuple[socket.socket, socket.socket], payload: bytes) -> None:
    front, engine = await FrontChannel.open(pair[0]), EngineChannel(pair[1])
    frame = struct.pack("<I", len(payload)) + payload
    pair[0].send(frame)
    with pytest.raises(ChannelError):
        engine.poll(1.0)
    pair[1].send(frame)
    with pytest.raises(ChannelError):
        await front.receive()
    await front.close()


def test_a_value_out_of_range_does_not_pass_the_wire(pair: tuple[socket.socket, socket.socket]) -> None:
    good = msgspec.to_builtins(_submit("q1", [1]))
    good["sampling"]["top_p"] = 0.0
    payload = msgspec.msgpack.encode(good)
    pair[0].send(struct.pack("<I", len(payload)) + payload)
    with pytest.raises((ChannelError, InvalidRequestError)):
        EngineChannel(pair[1]).poll(1.0)


def test_frames_survive_any_split() -> None:
    stream = b"".join(struct.pack("<I", len(p)) + p for p in (b"", b"a", b"bc" * 300))
    for size in (1, 2, 3, 5, 7, len(stream)):
        frames = FrameBuffer()
        got = [p for i in range(0, len(stream), size) for p in frames.feed(stream[i : i + size])]
        assert got == [b"", b"a", b"bc" * 300]


async def test_an_announced_giant_is_refused_before_it_is_read(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, engine = await FrontChannel.open(pair[0]), EngineChannel(pair[1])
    giant = struct.pack("<I", channel_module.MAX_FRAME_BYTES + 1)
    pair[0].send(giant)
    with pytest.raises(ChannelError, match="announced"):
        engine.poll(1.0)
    pair[1].send(giant)
    with pytest.raises(ChannelError, match="announced"):
        await front.receive()
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ChannelError, match="exceeds"):
        front.send(_submit("q1", list(range(100))))
    await front.close()
