"""Submits jobs by the million: so many at a time, as fast as the daemon takes them, and none twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from batond.clients import errors
from batond.clients.bulk_input import line_of, raw_lines
from batond.clients.bulk_output import record_of
from batond.clients.retry import Backoff, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import BinaryIO

    from batond.clients.aio import AsyncClient
    from batond.clients.build import JobOptions
    from batond.clients.bulk_input import Line
    from batond.clients.bulk_output import Output
    from batond.clients.model import JobInfo

T = TypeVar("T")

#: What the client itself repeats; the rest is done here, where it is shown and shared by all lines.
RETRY: Final = RetryPolicy(attempts=2)
PAUSES: Final = RetryPolicy(base_s=0.5, cap_s=15.0)
#: Lines that are handed in at the same time: a full queue is asked again by so many, not by all.
MOST_SUBMITTING: Final = 8
#: A job that ends, and expires before anybody looks, is run again so often.
MOST_RUNS: Final = 3


@dataclass(slots=True)
class Progress:
    """How far it is.

    Attributes:
        skipped_bytes: Of the input, of lines whose result was there before.
        done_bytes: Of lines whose result came since.
        in_flight: Jobs that were submitted and have not ended.
    """

    skipped_bytes: int = 0
    done_bytes: int = 0
    in_flight: int = 0


class Gate:
    """Holds back all calls of a kind: what one of them was told is true for the next."""

    def __init__(self) -> None:
        self._backoff = Backoff(1 << 62, PAUSES)
        self._not_before_s = 0.0
        self._why = ""

    @property
    def pause(self) -> str:
        """Why it is closed now; empty if it is not."""
        return self._why if time.monotonic() < self._not_before_s else ""

    async def passed(self) -> None:
        """Waits until it opens; by then another call may have closed it again, which is for that one."""
        if (left_s := self._not_before_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)

    def close(self, error: errors.BatondClientError) -> None:
        """Closes it for as long as the daemon says, or ever longer."""
        now_s = time.monotonic()
        if now_s >= self._not_before_s:
            later = error if isinstance(error, errors.RetryLaterError) else errors.UnavailableError("")
            self._not_before_s = now_s + (self._backoff.delay_s(later) or PAUSES.cap_s)
            self._why = error.message

    def open(self) -> None:
        """Notes that a call was answered."""
        self._backoff.reset()


class Bulk:
    """One run over an input.

    Args:
        client: Whose `retry` is `RETRY`.
        output: Where results go.
        defaults: What lines leave out.
        parallel: Most jobs submitted and not ended.
        patience_s: Longest time without a daemon that answers.

    Attributes:
        progress: How far it is, at any time.
    """

    def __init__(
        self,
        client: AsyncClient,
        output: Output,
        *,
        defaults: JobOptions,
        parallel: int,
        patience_s: float,
    ) -> None:
        self.progress = Progress()
        self._client, self._output, self._defaults = client, output, defaults
        self._parallel, self._patience_s = parallel, patience_s
        self._turnstile = asyncio.Semaphore(MOST_SUBMITTING)
        self._submits, self._waits = Gate(), Gate()
        self._heard_s = time.monotonic()

    @property
    def pause(self) -> str:
        """Why nothing is submitted now; empty if something is."""
        return self._submits.pause or self._waits.pause

    async def run(self, source: BinaryIO) -> None:
        """Handles all lines; returns when each has its line in the output.

        Args:
            source: Read, and closed, by a thread: who closes a pipe that another one reads waits for it.

        Raises:
            BatondClientError: Going on makes no sense: nobody answers, or we are not let in.
            UnusableOutputError: The output is of another input.
            OSError: The output can't be written, or the input not read.
        """
        lines: asyncio.Queue[Line | None] = asyncio.Queue(maxsize=self._parallel)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(source, lines))
                for _ in range(self._parallel):
                    group.create_task(self._work(lines))
        except BaseExceptionGroup as several:
            raise _first(several) from several

    async def _read(self, source: BinaryIO, lines: asyncio.Queue[Line | None]) -> None:
        """Reads in a thread, no further ahead than the queue is long: a pipe may say nothing for hours."""
        loop, ended = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def put(line: Line | None) -> None:
            asyncio.run_coroutine_threadsafe(lines.put(line), loop).result()

        def end(error: Exception | None) -> None:
            if not ended.done():
                ended.set_exception(error) if error is not None else ended.set_result(None)

        def read() -> None:
            failed: Exception | None = None
            try:
                with source:
                    for raw in raw_lines(source):
                        line = line_of(raw, self._output.run, self._defaults)
                        if self._output.has(line):
                            self.progress.skipped_bytes += line.nbytes
                        else:
                            put(line)
                put(None)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the task below raises it
                failed = error
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits for it.
                loop.call_soon_threadsafe(end, failed)

        # A daemon thread: nothing ends a read of a pipe that says nothing, and the program must end.
        threading.Thread(target=read, name="bulk input", daemon=True).start()
        await ended

    async def _work(self, lines: asyncio.Queue[Line | None]) -> None:
        while (line := await lines.get()) is not None:
            await self._handle(line)
        await lines.put(None)  # For the others.

    async def _handle(self, line: Line) -> None:
        job: JobInfo | None = None
        error: errors.BatondClientError | None = line.fault
        if error is None:
            try:
                job = await self._job(line)
            except errors.BatondClientError as raised:
                if _ends_all(raised):
                    raise
                error = raised
        self._output.write(record_of(line, job, error))
        self.progress.done_bytes += line.nbytes

    async def _job(self, line: Line) -> JobInfo:
        """Runs a line's job, or takes up the one that an earlier run has submitted."""
        options: JobOptions = line.options or {}
        for left in reversed(range(MOST_RUNS)):
            async with self._turnstile:
                job = await self._patiently(
                    self._submits, lambda: self._client.submit(line.prompt, **options)
                )
            if job.state.final:
                return job
            self.progress.in_flight += 1
            try:
                return await self._patiently(self._waits, lambda: self._client.wait(line.job_id))
            except errors.NotFoundError:
                if not left:
                    raise
            finally:
                self.progress.in_flight -= 1
        raise AssertionError("unreachable")

    async def _patiently(self, gate: Gate, call: Callable[[], Awaitable[T]]) -> T:
        """Calls until there is an answer: as often as the daemon says "later", as long as it is away."""
        while True:
            await gate.passed()
            try:
                answer = await call()
            except errors.ExhaustedError as error:
                self._heard_s = time.monotonic()
                if error.retry_after_s is None:  # Of this job alone, such as its size.
                    raise
                gate.close(error)
            except (errors.UnavailableError, errors.ClientDeadlineError) as error:
                if time.monotonic() - self._heard_s > self._patience_s:
                    raise
                gate.close(error)
            else:
                self._heard_s = time.monotonic()
                gate.open()
                return answer


def _ends_all(error: errors.BatondClientError) -> bool:
    """Whether no other line could do better."""
    return (
        isinstance(
            error,
            (
                errors.UnauthenticatedError,
                errors.UnavailableError,
                errors.UnsupportedCallError,
                errors.ClientDeadlineError,
            ),
        )
        or error.reason == "TENANT_DISABLED"
    )


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one that the others were ended for."""
    error: BaseException = several
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def own_stdin() -> BinaryIO:
    """Standard input, by a descriptor of our own: a program's end waits for who reads the interpreter's."""
    return os.fdopen(os.dup(0), "rb")
