"""Lines of the engine are passed on without waiting for who reads them."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from batond.daemon.front import overheard as module
from batond.daemon.front.overheard import Outlet, Overheard

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def full() -> Iterator[tuple[int, int, int]]:
    """Both ends of a pipe that takes no byte more, and how many are in it."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    held_bytes = 0
    try:
        while True:
            held_bytes += os.write(write, b"-" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    yield read, write, held_bytes
    os.close(read)
    os.close(write)


def read_exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += os.read(descriptor, count - len(data))
    return data


@pytest.mark.timeout(60)
async def test_a_full_pipe_holds_nobody_up(
    full: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop serves calls while nobody reads the daemon's own standard error."""
    read, write, held_bytes = full
    outlet = Outlet(write)
    monkeypatch.setattr(module, "_stderr", outlet)
    heard, theirs = await Overheard.open()
    os.write(theirs, b"one\ntwo\nthe end")
    os.close(theirs)
    assert await heard.close(0.05) == "one | two | the end"
    assert not outlet.wait(0.0)
    read_exactly(read, held_bytes)
    assert await asyncio.to_thread(read_exactly, read, 15) == b"one\ntwo\nthe end"
    assert outlet.wait(10.0)


@pytest.mark.timeout(60)
def test_what_waits_is_bounded_and_what_is_lost_is_told(full: tuple[int, int, int]) -> None:
    read, write, held_bytes = full
    outlet = Outlet(write, most_bytes=10)
    for line in (b"first\n", b"abc\n", b"too late\n"):
        outlet.write(line)
    read_exactly(read, held_bytes)
    assert read_exactly(read, 10) == b"first\nabc\n"
    assert outlet.wait(10.0)
    outlet.write(b"next\n")
    told = b"(9 bytes are lost: nobody read them)\nnext\n"
    assert read_exactly(read, len(told)) == told


def test_a_closed_descriptor_harms_nobody() -> None:
    read, write = os.pipe()
    os.close(read)
    outlet = Outlet(write)
    outlet.write(b"nobody reads this\n")
    assert outlet.wait(10.0)
    os.close(write)
