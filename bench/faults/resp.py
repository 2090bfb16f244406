"""Reads the Redis protocol (RESP2 and RESP3) value by value, and gives the bytes as they came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

PUSH: Final = b">"
_BULK: Final = b"$=!"
_AGGREGATES: Final = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
_NIL: Final = -1


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, list[bytes]]:
    """Read one command as clients send it: an array of bulk strings.

    Returns:
        Its bytes, and its words.

    Raises:
        asyncio.IncompleteReadError: The client closed the connection.
        ValueError: It is no such array.
    """
    head = await _line(reader)
    if not head.startswith(b"*"):
        raise ValueError(f"no command: {head!r}")
    parts, words = [head], []
    for _ in range(int(head[1:])):
        size_line = await _line(reader)
        body = await reader.readexactly(int(size_line[1:]) + 2)
        parts += [size_line, body]
        words.append(body[:-2])
    return b"".join(parts), words


async def read_reply(reader: asyncio.StreamReader) -> bytes:
    """Read one reply, however deep it is, as bytes.

    Raises:
        asyncio.IncompleteReadError: The server closed the connection.
    """
    parts: list[bytes] = []
    left = 1
    while left:
        left -= 1
        head = await _line(reader)
        parts.append(head)
        kind = head[:1]
        if kind in _AGGREGATES:
            left += max(0, int(head[1:])) * _AGGREGATES[kind]
            left += kind == b"|"  # Attributes stand before the value they are of.
        elif kind in _BULK and int(head[1:]) != _NIL:
            parts.append(await reader.readexactly(int(head[1:]) + 2))
    return b"".join(parts)


async def _line(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n")
