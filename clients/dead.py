"""Dead jobs as administrators see them, and their way from the contract."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batond.v1 import admin_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadJob:
    """Something that was given up for good. Prompts and outputs are not in it.

    Attributes:
        name: What `retry_dead_job` and `drop_dead_job` take.
        tenant: Whose job it is; empty if there is none.
        job_id: The job; empty if there is none.
        sla_class: The class it was served as; empty if that can't be read.
        reason: "ATTEMPTS", "BAD_RECORD" or "GARBAGE".
        message: The same in words.
        attempts: Claims that ended with the death of a daemon or an engine.
        evidence: A line for each claim that ended badly: time (ms since 1970), epoch, owner, why.
        died_time: When it was given up (UTC); None if that isn't known.
        can_retry: Whether `retry_dead_job` will do, as far as can be seen.
        obstacle: Why not; empty if it will.
    """

    name: str
    tenant: str = ""
    job_id: str = ""
    sla_class: str = ""
    reason: str = ""
    message: str = ""
    attempts: int = 0
    evidence: tuple[str, ...] = ()
    died_time: datetime | None = None
    can_retry: bool = False
    obstacle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadJobPage:
    """Dead jobs, newest first, and the token that asks for the next page (empty on the last)."""

    dead_jobs: tuple[DeadJob, ...]
    next_page_token: str


def page(message: admin_pb2.ListDeadJobsResponse) -> DeadJobPage:
    """Gives a page."""
    return DeadJobPage(
        dead_jobs=tuple(_dead_job(one) for one in message.dead_jobs),
        next_page_token=message.next_page_token,
    )


def _dead_job(message: admin_pb2.DeadJob) -> DeadJob:
    return DeadJob(
        name=message.name,
        tenant=message.tenant,
        job_id=message.job_id,
        sla_class=message.sla_class,
        reason=message.reason,
        message=message.message,
        attempts=message.attempts,
        evidence=tuple(message.evidence),
        died_time=message.died_time.ToDatetime(tzinfo=UTC) if message.HasField("died_time") else None,
        can_retry=message.can_retry,
        obstacle=message.obstacle,
    )
