"""Whether a final job is a success."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.clients.errors import JobCancelledError, JobFailedError
from batond.clients.model import JobState

if TYPE_CHECKING:
    from batond.clients.model import JobInfo


def succeeded(job: JobInfo) -> JobInfo:
    """Gives the job back if it succeeded.

    Raises:
        JobFailedError: It failed.
        JobCancelledError: It was cancelled.
    """
    if job.state is JobState.CANCELLED:
        raise JobCancelledError(job, f"job {job.job_id} was cancelled", reason="CANCELLED")
    if job.state is not JobState.SUCCEEDED:
        raise JobFailedError(
            job, f"job {job.job_id} failed: {job.error_message or job.state}", reason=job.error_reason
        )
    return job
