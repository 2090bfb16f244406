"""Jobs whose output is known beforehand, and clients that don't give up."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from batond.bench.fake_engine import fake_text, fake_tokens
from batond.clients import JobState, RetryPolicy
from batond.clients.errors import ClientDeadlineError, RetryLaterError
from batond.v1 import jobs_pb2, jobs_pb2_grpc

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from batond.bench.faults.crew import Daemon
    from batond.clients import Client, JobInfo

T = TypeVar("T")
PATIENCE_S: Final = 60.0
CLASSES: Final = ("interactive", "standard", "batch")
ONE_TRY: Final = RetryPolicy(attempts=1, stream_attempts=1)


@dataclass(frozen=True, slots=True)
class Job:
    """What is submitted, and so what must come out."""

    job_id: str
    tenant: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    sla_class: str

    @property
    def tokens(self) -> list[int]:
        """Its output, whoever runs it and however often it is interrupted."""
        return fake_tokens(self.prompt, self.seed, self.max_tokens)

    def submit(self, client: Client) -> JobInfo:
        """Submit it under its own id, so that doing it again does nothing."""
        return client.submit(
            token_ids=list(self.prompt),
            max_tokens=self.max_tokens,
            seed=self.seed,
            sla_class=self.sla_class,
            job_id=self.job_id,
        )

    def wrong(self, info: JobInfo) -> str:
        """What differs from an undisturbed run; empty if nothing does."""
        if info.state is not JobState.SUCCEEDED:
            return f"{self.job_id} is {info.state}: {info.error_reason} {info.error_message}"
        if list(info.output_token_ids) != self.tokens:
            return f"{self.job_id} has other tokens: {len(info.output_token_ids)} of {self.max_tokens}"
        if info.text != fake_text(self.tokens):
            return f"{self.job_id} has another text"
        return ""


def draw_job(rng: random.Random, job_id: str, tenant: str, longest: int = 40) -> Job:
    """A job of any class and length."""
    prompt = tuple(rng.randrange(1, 900) for _ in range(rng.randint(1, 8)))
    return Job(job_id, tenant, prompt, rng.randint(1, longest), rng.randrange(1 << 31), rng.choice(CLASSES))


def insist(daemon: Daemon, tenant: str, ask: Callable[[Client], T], *, patience_s: float = PATIENCE_S) -> T:
    """Ask until there is an answer; a daemon that was killed is started again.

    Raises:
        TimeoutError: There was none for too long.
    """
    deadline_s = time.monotonic() + patience_s
    last: Exception | None = None
    while time.monotonic() < deadline_s:
        daemon.revive()
        try:
            with daemon.client(tenant, timeout_s=2.0, retry=ONE_TRY) as client:
                return ask(client)
        except (RetryLaterError, ClientDeadlineError) as error:
            last = error
            time.sleep(0.02)
    raise TimeoutError(f"no answer of {daemon.folder.name} for {patience_s:.0f} s; the last: {last}")


class Watcher:
    """Reads the raw stream of a job, call after call, and counts what came twice and what was skipped.

    The clients' own streams mend both, so they would not show a daemon that delivers a token twice.

    Attributes:
        token_ids: What was delivered, in order.
        counts: `doubled` and `skipped` tokens, and `calls`.
        finished: Whether the end was delivered.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.token_ids: list[int] = []
        self.counts: Counter[str] = Counter()
        self.finished = False

    def request(self) -> jobs_pb2.WatchJobRequest:
        """The next call's."""
        self.counts["calls"] += 1
        return jobs_pb2.WatchJobRequest(job_id=self.job.job_id, from_token_index=len(self.token_ids))

    def see(self, event: jobs_pb2.WatchJobResponse) -> None:
        """Take one message."""
        kind = event.event.WhichOneof("event")
        if kind == "finished":
            self.finished = True
        if kind != "chunk":
            return
        chunk, have = event.event.chunk, len(self.token_ids)
        self.counts["doubled"] += max(0, have - chunk.first_token_index)
        self.counts["skipped"] += max(0, chunk.first_token_index - have)
        self.token_ids += chunk.token_ids

    def watch(self, daemon: Daemon, timeout_s: float = PATIENCE_S) -> None:
        """Make one call and read it to its end, or to that of the daemon."""
        metadata = (("authorization", f"Bearer {daemon.tokens[self.job.tenant]}"),)
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            stub = jobs_pb2_grpc.JobServiceStub(channel)
            try:
                for event in stub.WatchJob(self.request(), timeout=timeout_s, metadata=metadata):
                    self.see(event)
            except grpc.RpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
                    raise

    def wrong(self) -> str:
        """What differs from an undisturbed stream; empty if nothing does."""
        if self.counts["doubled"] or self.counts["skipped"]:
            return f"{self.job.job_id}: {self.counts}"
        if not self.finished or self.token_ids != self.job.tokens:
            return f"{self.job.job_id}: {len(self.token_ids)} of {self.job.max_tokens} tokens were delivered"
        return ""
