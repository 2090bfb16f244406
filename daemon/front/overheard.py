"""What a process writes to standard error: passed on, and its last lines kept as evidence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from typing import Self

LINES_KEPT: Final = 4
LINE_CHARS: Final = 200
#: A longer line is passed on in parts: what comes without an end must not grow for ever.
LONGEST_LINE_BYTES: Final = 1 << 16
STDERR: Final = 2
#: Of what is passed on, so much waits for who reads our own standard error slowly; what is more is lost.
MOST_WAITING_BYTES: Final = 1 << 20

_UNPRINTABLE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f-\x9f]+")


class Outlet:
    """Writes to a descriptor on a thread of its own: a pipe that nobody reads holds up nobody but the thread.

    The descriptor itself must stay as it is: others share it, and don't expect a write that is refused.

    Args:
        descriptor: Where to.
        most_bytes: What may wait; beyond, data is dropped, and a line says how much.
    """

    def __init__(self, descriptor: int, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._descriptor, self._most_bytes = descriptor, most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._lost_bytes = 0  # What is being written counts as waiting.
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Pass data on, soon and whole, or not at all."""
        with self._changed:
            if self._waiting_bytes + len(data) > self._most_bytes:
                self._lost_bytes += len(data)
                return
            if self._lost_bytes:
                data = b"(%d bytes are lost: nobody read them)\n" % self._lost_bytes + data
                self._lost_bytes = 0
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is written; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting_bytes, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            size = len(data)
            with contextlib.suppress(OSError):  # Nobody can read it: the log is lost, the jobs are not.
                while data:
                    data = data[os.write(self._descriptor, data) :]
            with self._changed:
                self._waiting_bytes -= size
                self._changed.notify_all()


_stderr: Final = Outlet(STDERR)


class Overheard(asyncio.Protocol):
    """Reads one process's standard error until it is closed.

    Lines are passed on whole, so that those of two processes do not mix. Not asyncio's own pipe to a process:
    there some releases of Python wait for its end too when they wait for the process, and a grandchild may
    hold it open.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._lines: deque[bytes] = deque(maxlen=LINES_KEPT)
        self._ended = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None

    @classmethod
    async def open(cls) -> tuple[Self, int]:
        """Make one, and the descriptor to give to the process, which the caller closes."""
        ours, theirs = os.pipe()
        try:
            _, heard = await asyncio.get_running_loop().connect_read_pipe(cls, os.fdopen(ours, "rb"))
        except BaseException:
            os.close(theirs)
            raise
        return heard, theirs

    async def close(self, timeout_s: float) -> str:
        """Wait for the end and give the last lines, printable and short, on one line."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        if self._transport is not None:
            self._transport.close()
        self._flush()
        if not _stderr.wait(0.0):  # The daemon may be about to end.
            await asyncio.to_thread(_stderr.wait, timeout_s)
        return " | ".join(line for line in map(_printable, self._lines) if line)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.ReadTransport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if newline:
            self._lines.extend(whole.rsplit(b"\n", LINES_KEPT)[-LINES_KEPT:])
            _stderr.write(whole + newline)
        if len(self._rest) > LONGEST_LINE_BYTES:
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol names it
        """See asyncio.Protocol."""
        self._flush()
        self._ended.set()

    def _flush(self) -> None:
        if self._rest:
            self._lines.append(self._rest)
            _stderr.write(self._rest)
            self._rest = b""


def _printable(line: bytes) -> str:
    text = line[: LINE_CHARS * 8].decode(errors="replace")
    return _UNPRINTABLE.sub(" ", text).strip()[:LINE_CHARS]
