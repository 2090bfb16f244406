"""What tests of the front share: a tokenizer of one token a byte, a tenant, held jobs without a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.front.held import HeldJob
from batond.daemon.front.hub import LiveJob
from batond.daemon.front.identity import Tenant
from batond.daemon.queue import ClaimedJob, CommittedChoice, JobRecord, JobSpec, JobState
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def tenant() -> Tenant:
    """A tenant of the standard class."""
    return Tenant(name="red", admin=False, classes=frozenset({"standard"}), default_class="standard")


@pytest.fixture
def hold() -> Callable[..., HeldJob]:
    """Holds a job as if it had just been claimed."""

    def make(
        *,
        token_ids: tuple[int, ...] = (),
        committed: list[CommittedChoice] | None = None,
        epoch: int = 1,
        **sampling: Any,
    ) -> HeldJob:
        record = JobRecord(
            tenant="t",
            job_id="j",
            model="m",
            sla_class="standard",
            state=JobState.CLAIMED,
            body_hash="h",
            arrival_us=1,
            epoch=epoch,
            output_tokens=len(token_ids),
            ttl_ms=1,
            created_ms=1,
        )
        spec = JobSpec(prompt_token_ids=[5, 6], sampling=SamplingParams(**sampling), seed=7, session_id="s")
        choices = committed or [CommittedChoice(token_ids=list(token_ids))]
        choices += [CommittedChoice()] * (spec.sampling.n - len(choices))
        claimed = ClaimedJob(record=record, spec=spec, choices=choices)
        return HeldJob(claimed, LiveJob(tuple(len(one.token_ids) for one in choices)), 0.0)

    return make
