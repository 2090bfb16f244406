"""The output of `batonctl bulk`: a line for each of the input, written once, whatever ends the program.

Beside the file `<name>.run` says which run its lines belong to, and is locked while one is under way. Lines
come in the order in which jobs end. A line that was cut off by the end of the program is taken away when the
next one goes on, and its job is asked for again, by its id: it was not run in vain.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import secrets
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

from batond.clients import cli_output, outcome
from batond.clients.errors import BatondClientError

if TYPE_CHECKING:
    from batond.clients.bulk_input import Line
    from batond.clients.model import JobInfo

#: Four bytes of memory a line: beyond this, a number in the file is no number of a line.
MOST_LINES: Final = 1 << 28
RUN_BYTES: Final = 4


class UnusableOutputError(Exception):
    """The file can't be gone on with; the message says why, and what to do."""


@dataclass(slots=True)
class Counts:
    """How many lines ended how: the job succeeded, it did not, or it was never accepted."""

    succeeded: int = 0
    failed: int = 0
    rejected: int = 0

    def add(self, record: dict[str, Any]) -> None:
        """Counts a line of the output."""
        if record["error"] is None:
            self.succeeded += 1
        elif record["job"] is not None:
            self.failed += 1
        else:
            self.rejected += 1

    @property
    def total(self) -> int:
        """All of them."""
        return self.succeeded + self.failed + self.rejected


class Output(Protocol):
    """Where results go.

    Attributes:
        run: Names the run; a part of the ids of jobs.
        counts: Of all lines in it, those of earlier runs of the program too.
        earlier: How many were there before.
    """

    run: str
    counts: Counts
    earlier: int

    def has(self, line: Line) -> bool:
        """Whether the line's result is there.

        Raises:
            UnusableOutputError: A result is there, but of another line.
        """

    def write(self, record: dict[str, Any]) -> None:
        """Puts a line there.

        Raises:
            OSError: It can't be.
        """

    def close(self) -> None:
        """Lets go of it."""


class Stream:
    """Standard output: nothing of it can be read again, so nothing is gone on with."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self.run = secrets.token_hex(RUN_BYTES)
        self.counts = Counts()
        self.earlier = 0
        self._stream = stream or sys.stdout.buffer

    def has(self, line: Line) -> bool:
        """See `Output`."""
        del line
        return False

    def write(self, record: dict[str, Any]) -> None:
        """See `Output`."""
        self._stream.write(_bytes(record))
        self._stream.flush()
        self.counts.add(record)

    def close(self) -> None:
        """See `Output`."""


class Results:
    """A file.

    Args:
        path: Of it; made if there is none, else gone on with.

    Raises:
        UnusableOutputError: It is not one of `bulk`, or another process writes it.
        OSError: It can't be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = Counts()
        self._ids = array.array("I")  # By the number of the line: a checksum of its job's id, 0 without one.
        self._lock = os.open(Path(f"{path}.run"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._file = -1
        try:
            self._take_lock()
            self.run = self._read_run()
            if self.run:
                self._read()
            else:
                self._begin()
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except BaseException:
            self.close()
            raise
        self.earlier = self.counts.total

    def has(self, line: Line) -> bool:
        """See `Output`."""
        known = self._ids[line.number] if line.number < len(self._ids) else 0
        if known and known != _checksum(line.job_id):
            raise UnusableOutputError(
                f"line {line.number} of the input is not the one whose result is in {self.path}: the input or"
                " the options have changed. Give them as they were, or take another --output"
            )
        return bool(known)

    def write(self, record: dict[str, Any]) -> None:
        """See `Output`."""
        left = memoryview(_bytes(record))
        while left:
            left = left[os.write(self._file, left) :]
        self.counts.add(record)

    def close(self) -> None:
        """Makes sure that the disk has all of it."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
        os.close(self._lock)
        self._file = self._lock = -1

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnusableOutputError(f"another batonctl writes {self.path}") from None

    def _read_run(self) -> str:
        """The run that the file belongs to; empty if there is none that could have submitted anything."""
        try:
            run = json.loads(os.pread(self._lock, 1 << 12, 0))["run"]
        except (ValueError, KeyError, TypeError):
            run = ""
        if self.path.exists():
            if not run and self.path.stat().st_size:
                raise UnusableOutputError(
                    f"{self.path} is no output of this command ({self.path.name}.run is not beside it):"
                    " take another --output"
                )
            return str(run)
        return ""  # Nothing is submitted before the file is there: it was removed to begin anew.

    def _begin(self) -> None:
        """Names a run, for good, before anything is submitted under its name."""
        self.run = secrets.token_hex(RUN_BYTES)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{json.dumps({'run': self.run})}\n".encode(), 0)
        os.fsync(self._lock)

    def _read(self) -> None:
        """Learns which lines are done, and cuts off one that is not whole."""
        whole = 0
        with self.path.open("rb") as file:
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self._learn(text, whole)
                whole += len(text)
        os.truncate(self.path, whole)

    def _learn(self, text: bytes, offset: int) -> None:
        try:
            record = json.loads(text)
            number, job_id = record["line"], record["job_id"]
            good = isinstance(number, int) and 0 < number < MOST_LINES and isinstance(job_id, str)
            if not good:
                raise ValueError  # noqa: TRY301 -- as those of what is read
            self.counts.add(record)
        except (ValueError, KeyError, TypeError):
            raise UnusableOutputError(
                f"{self.path} has a line that is none of this command's at byte {offset}: mend it, or take"
                " another --output"
            ) from None
        missing = number + 1 - len(self._ids)
        if missing > 0:
            self._ids.frombytes(bytes(missing * self._ids.itemsize))
        self._ids[number] = _checksum(job_id)


def record_of(line: Line, job: JobInfo | None, error: BatondClientError | None = None) -> dict[str, Any]:
    """Gives a line of the output; a job that did not succeed has its error beside it."""
    if job is not None and error is None:
        try:
            outcome.succeeded(job)
        except BatondClientError as ended:
            error = ended
    return {
        "line": line.number,
        "job_id": line.job_id,
        "job": job,
        "error": None if error is None else cli_output.error_object(error),
    }


def _bytes(record: dict[str, Any]) -> bytes:
    return f"{cli_output.to_json(record)}\n".encode()


def _checksum(job_id: str) -> int:
    return zlib.crc32(job_id.encode("utf-8", "surrogatepass")) or 1
