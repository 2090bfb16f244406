"""The durable job queue: Redis keys, Lua scripts and the embedded server."""

from batond.daemon.queue.check import check_server, check_target
from batond.daemon.queue.connection import open_async, open_sync
from batond.daemon.queue.embedded import EmbeddedRedis
from batond.daemon.queue.lease import LeaseKeeper
from batond.daemon.queue.limits import TenantLimits
from batond.daemon.queue.news import NewsFeed
from batond.daemon.queue.records import (
    Chunk,
    ClaimedJob,
    CommitResult,
    CommittedChoice,
    Counts,
    DeadLetter,
    DeadPage,
    HandBackOutcome,
    JobRecord,
    JobSpec,
    JobState,
    Notice,
    NoticeKind,
    Page,
    Place,
    Reaped,
    Refusal,
    Renewal,
    StepCommit,
    Why,
)
from batond.daemon.queue.store import JobStore

__all__ = [
    "Chunk",
    "ClaimedJob",
    "CommitResult",
    "CommittedChoice",
    "Counts",
    "DeadLetter",
    "DeadPage",
    "EmbeddedRedis",
    "HandBackOutcome",
    "JobRecord",
    "JobSpec",
    "JobState",
    "JobStore",
    "LeaseKeeper",
    "NewsFeed",
    "Notice",
    "NoticeKind",
    "Page",
    "Place",
    "Reaped",
    "Refusal",
    "Renewal",
    "StepCommit",
    "TenantLimits",
    "Why",
    "check_server",
    "check_target",
    "open_async",
    "open_sync",
]
