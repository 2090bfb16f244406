"""Framed messages over a local socket pair: the engine's synchronous end and the front's asyncio end.

A frame is a 4-byte little-endian length and one msgpack-encoded message of `messages.py`. A frame that is
too long, can't be decoded or has an unknown tag raises `ChannelError`: both ends are one release of one
program, so a broken frame is a bug, and going on would lose a job silently.

The engine's end may block while it sends: the front never blocks while it writes, so the two can't wait for
each other.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from batond.daemon.wire.messages import Command, Event

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FRAME_BYTES: Final = 64 << 20  # A prompt of the largest request, as msgpack integers, with room to spare.
_HEADER: Final = struct.Struct("<I")
_RECEIVE_BYTES: Final = 256 << 10
_T = TypeVar("_T")


class ChannelError(RuntimeError):
    """The other end sent something that is no message; the connection can't be used any more."""


class ChannelClosed(ConnectionError):  # noqa: N818 - an ordinary end, not a fault
    """The other end is gone."""


def encode_frame(encoder: msgspec.msgpack.Encoder, message: msgspec.Struct) -> bytes:
    """Encode a message with its length in front.

    Raises:
        ChannelError: It is longer than `MAX_FRAME_BYTES`.
    """
    frame = bytearray(_HEADER.size)
    encoder.encode_into(message, frame, _HEADER.size)
    size = len(frame) - _HEADER.size
    if size > MAX_FRAME_BYTES:
        raise ChannelError(
            f"a {type(message).__name__} of {size} bytes exceeds the {MAX_FRAME_BYTES} of a frame"
        )
    _HEADER.pack_into(frame, 0, size)
    return bytes(frame)


class FrameBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take more bytes and yield the payload of each frame that is complete now.

        Raises:
            ChannelError: A header announces more than `MAX_FRAME_BYTES`.
        """
        self._bytes += data
        while len(self._bytes) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._bytes)
            if size > MAX_FRAME_BYTES:
                raise ChannelError(
                    f"a frame of {size} bytes was announced; at most {MAX_FRAME_BYTES} are allowed"
                )
            end = _HEADER.size + size
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            yield payload


class EngineChannel:
    """The engine's end: reads commands, writes events. `send` may be called from several threads.

    Args:
        connection: A connected stream socket, or the file descriptor of one, which is owned from then on.
    """

    def __init__(self, connection: socket.socket | int) -> None:
        self._socket = socket.socket(fileno=connection) if isinstance(connection, int) else connection
        self._socket.settimeout(None)
        self._frames = FrameBuffer()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._send_lock = threading.Lock()
        self._closed = False
        self._poller = select.poll()  # Not select(): it fails on descriptors above 1023.
        self._poller.register(self._socket, select.POLLIN)

    def fileno(self) -> int:
        """The file descriptor, for use with select."""
        return self._socket.fileno()

    def send(self, event: Event) -> None:
        """Write an event; blocks while the front's buffer is full.

        Raises:
            ChannelClosed: The front is gone.
            ChannelError: The event is too long.
        """
        frame = encode_frame(self._encoder, event)
        try:
            with self._send_lock:
                self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosed(f"the front is gone: {error}") from error

    def poll(self, timeout_s: float = 0.0) -> list[Command]:
        """Return the commands that are there, in order; wait at most `timeout_s` for the first.

        Raises:
            ChannelClosed: The front is gone and everything it sent was returned before.
            ChannelError: A frame is no command.
        """
        commands: list[Command] = []
        deadline_s = time.monotonic() + timeout_s
        while not self._closed and not (commands and not self._readable(0.0)):
            if not self._readable(max(deadline_s - time.monotonic(), 0.0)):
                break
            commands += self._read_once()
        if self._closed and not commands:
            raise ChannelClosed("the front is gone")
        return commands

    def waiting(self) -> bool:
        """Whether `poll` would find something, if only the end; takes a few microseconds."""
        return self._readable(0.0)

    def close(self) -> None:
        """Close this end; the front sees the end of the stream."""
        self._closed = True
        self._socket.close()

    def _readable(self, timeout_s: float) -> bool:
        return bool(self._poller.poll(timeout_s * 1000))

    def _read_once(self) -> list[Command]:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._closed = True
            return []
        return [_decode(self._decoder, payload) for payload in self._frames.feed(data)]


class FrontChannel:
    """The front's end: reads events, writes commands, on one asyncio loop. Made by `open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

    @classmethod
    async def open(cls, connection: socket.socket) -> FrontChannel:
        """Take over a connected stream socket."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=_RECEIVE_BYTES)
        return cls(reader, writer)

    def send(self, command: Command) -> None:
        """Write a command without waiting; the transport buffers what the engine has not read.

        What is buffered is bounded by the claim window, so there is no back-pressure here.

        Raises:
            ChannelClosed: The engine is gone.
            ChannelError: The command is too long.
        """
        if self._writer.is_closing():
            raise ChannelClosed("the engine is gone")
        self._writer.write(encode_frame(self._encoder, command))

    async def receive(self) -> Event:
        """Wait for the next event.

        Raises:
            ChannelClosed: The engine is gone.
            ChannelError: A frame is no event.
        """
        try:
            (size,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            if size > MAX_FRAME_BYTES:
                raise ChannelError(
                    f"a frame of {size} bytes was announced; at most {MAX_FRAME_BYTES} are allowed"
                )
            payload = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed(f"the engine is gone: {error}") from error
        return _decode(self._decoder, payload)

    async def close(self) -> None:
        """Close this end and wait until it is closed."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # The other end was faster.


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ChannelError(f"a frame of {len(payload)} bytes is no message: {error}") from error
