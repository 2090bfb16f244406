"""How a client follows one job over any number of streams. Pure: what to send next, whether to try again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from batond.clients import build
from batond.clients.cursor import StreamCursor
from batond.clients.errors import BatondClientError, UnavailableError
from batond.clients.retry import Backoff, RetryPolicy
from batond.v1 import jobs_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batond.clients.model import Event
    from batond.clients.trip import Trip

Request = jobs_pb2.GenerateStreamRequest | jobs_pb2.WatchJobRequest
Response = jobs_pb2.GenerateStreamResponse | jobs_pb2.WatchJobResponse


class Follow:
    """The state of following a job.

    A generation starts with GenerateStream, which is repeated until the first event came; the id makes that
    safe. From then on, and for a watch from the start, WatchJob takes up the job at the next token.

    Attributes:
        job_id: The job's id.
        cursor: How far the events have come.
        end_s: When the caller's time-out is over, on the caller's clock; None is never.
    """

    def __init__(
        self,
        job_id: str,
        retry: RetryPolicy,
        trip: Trip,
        *,
        generation: jobs_pb2.GenerateStreamRequest | None = None,
        from_token_index: int = 0,
        choice_from_token_indexes: Mapping[int, int] | None = None,
        end_s: float | None = None,
    ) -> None:
        self.job_id = job_id
        choices = None if generation is None else max(1, generation.spec.sampling.n)
        self.cursor = StreamCursor(from_token_index, starts=choice_from_token_indexes, choices=choices)
        self.end_s = end_s
        self._retry = retry
        # A daemon that isn't there is told soon; one that is lost in the middle is waited for.
        self._trip = trip
        self._generation = generation
        self._attached = False  # Whether the end of the present call ends the job.
        self._sent = False

    @classmethod
    def watching(
        cls,
        job_id: str,
        retry: RetryPolicy,
        trip: Trip,
        *,
        from_token_index: int,
        choice_from_token_indexes: Mapping[int, int] | None,
        timeout_s: float | None,
    ) -> Self:
        """Follows a job from a token on.

        Raises:
            InvalidRequestError: An argument can't be sent: said here, not at the first event.
        """
        build.watch(job_id, from_token_index, choice_from_token_indexes)
        return cls(
            job_id,
            retry,
            trip,
            from_token_index=from_token_index,
            choice_from_token_indexes=choice_from_token_indexes,
            end_s=None if timeout_s is None else time.monotonic() + timeout_s,
        )

    @property
    def place(self) -> int:
        """Number of the address that the next stream is opened at."""
        return self._trip.place

    def next_request(self) -> Request:
        """Says what opens the next stream."""
        if self._generation is not None and not self.cursor.started:
            # Sent again it may meet the job that the first one made, which then ends with no stream.
            self._attached = not self._generation.detached and not self._sent
            self._sent = True
            return self._generation
        return build.watch(self.job_id, *self.cursor.resume_at())

    def timeout_s(self, now_s: float) -> float | None:
        """Says how long the next call may take."""
        return None if self.end_s is None else max(0.0, self.end_s - now_s)

    def time_is_over(self, now_s: float) -> bool:
        """Whether the caller's time-out is over."""
        return self.end_s is not None and now_s >= self.end_s

    def accept(self, response: Response) -> Event | None:
        """Takes in a message; gives None if there is nothing new in it."""
        if not self.cursor.started:
            self._trip.backoff = Backoff(self._retry.stream_attempts, self._retry)
        event = self.cursor.accept(response.event)
        if event is not None:
            self._trip.arrived()
            self._trip.backoff.reset()
        return event

    def broken(self, error: BatondClientError, now_s: float) -> float:
        """Notes that the stream broke, and says how long to wait before the next.

        Raises:
            BatondClientError: What it broke of: trying again can't help, or there is no time left.
        """
        self._attached = False
        delay_s = self._trip.after(error)
        if self.end_s is not None and now_s + delay_s >= self.end_s:
            raise error
        return delay_s

    def ended_early(self) -> UnavailableError:
        """Gives the error for a stream that ended cleanly without the job's final event."""
        return UnavailableError("the stream ended before the job did", reason="STREAM_ENDED")

    def needs_cancel(self) -> bool:
        """Whether a close must cancel the job by a call: it is the stream's own, which only watches now."""
        generation = self._generation
        if generation is None or generation.detached or self._attached:
            return False
        return self.cursor.started and not self.cursor.finished
