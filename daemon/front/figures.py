"""What happens to jobs, as metrics by class and tenant. Observes, and keeps the times it needs for that."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from batond.daemon.front.recent import Recent
from batond.daemon.front.steps import choice_of
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.wire.messages import (
    CommandResult,
    Finished,
    ParkCause,
    Preempted,
    QueryFailed,
    Resumed,
    Started,
    Tokens,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from batond.daemon.front.held import ChoiceTimes, HeldJob
    from batond.daemon.front.steps import JobStep
    from batond.daemon.queue import Counts
    from batond.daemon.telemetry.metrics import Metrics
    from batond.daemon.wire.messages import QueryEvent

#: Labels for names that stand in Redis are bounded.
_MOST_STRANGE: Final = 16

_log = get_logger(__name__)


class Figures:
    """Turns what happens to held jobs into metrics.

    Args:
        metrics: Where they go.
        classes: Names of all classes.

    Attributes:
        recent: The latest times by class.
    """

    def __init__(self, metrics: Metrics, classes: Collection[str]) -> None:
        self._metrics, self._classes = metrics, tuple(classes)
        self.recent = Recent(self._classes)
        self._strange: list[str] = []  # Classes that this daemon does not serve, and in which jobs waited.

    def heard(self, held: HeldJob, event: QueryEvent) -> None:
        """Observe an event of a job, before the job takes it in."""
        if isinstance(event, CommandResult):
            return
        now_s, times = time.monotonic(), held.choices[choice_of(event.query_id)].times
        match event:
            case Started():
                self._got_row(held, times, now_s)
                if not held.had_row:
                    self._metrics.queue_time.labels(*self._labels(held)).observe(held.age_s)
            case Tokens():
                self._got_tokens(held, times, event, now_s)
            case Preempted():
                mode = "kept" if event.kept else "dropped"
                self._metrics.preemptions.labels(*self._labels(held), event.cause, mode).inc()
                times.parked_s = now_s
                # Who was parked by hand does not compete for a row.
                times.rowless_s = None if event.cause == ParkCause.MANUAL else now_s
            case Resumed():
                self._got_row(held, times, now_s)
            case Finished() | QueryFailed():
                self._got_row(held, times, now_s)
                if times.first_token_s is not None and times.later_tokens:
                    per_token_s = (times.last_token_s - times.first_token_s) / times.later_tokens
                    self._metrics.output_token.labels(*self._labels(held)).observe(per_token_s)
                    self.recent.output_token(held.claimed.record.sla_class, per_token_s, now_s)

    def engine_died(self, held: HeldJob) -> None:
        """The choices of a job have no rows any more."""
        now_s = time.monotonic()
        for index in held.open_choices:
            times = held.choices[index].times
            if times.rowless_s is None and times.parked_s is None:
                times.rowless_s = now_s

    def ended(self, step: JobStep) -> None:
        """Count the end of a job."""
        usage, state = step.usage, step.commit.state
        if usage is None or state is None:
            return
        tenant, sla_class = self._labels(step.held)
        self._metrics.jobs_ended.labels(tenant, sla_class, state.value).inc()
        self._metrics.tokens.labels(tenant, "prompt").inc(usage.prompt_tokens)
        self._metrics.tokens.labels(tenant, "output").inc(usage.output_tokens)

    def rested(self, tenant: str, quota: str) -> None:
        """A tenant lost its turn at a quota."""
        self._metrics.quota_refusals.labels(self._metrics.tenant(tenant), quota).inc()

    def counted(self, held: Iterable[HeldJob], counts: Counts) -> None:
        """The queue was counted: show how many wait or are dead, and whose wait is the longest, by class."""
        self._metrics.dead_jobs.set(counts.dead)
        self._find_strange(counts)
        shown = (*self._classes, *self._strange)
        for sla_class in shown:
            self._metrics.queued_jobs.labels(sla_class).set(counts.queued.get(sla_class, 0))
        now_s, ages_s = time.monotonic(), dict.fromkeys(shown, 0.0)
        for sla_class, wait_ms in counts.oldest_wait_ms.items():
            if sla_class in ages_s:
                ages_s[sla_class] = wait_ms / 1000
        for job in held:
            sla_class = job.claimed.record.sla_class
            for index in job.open_choices:
                rowless_s = job.choices[index].times.rowless_s
                if rowless_s is not None and sla_class in ages_s:
                    ages_s[sla_class] = max(ages_s[sla_class], now_s - rowless_s)
        for sla_class, age_s in ages_s.items():
            self._metrics.starvation_age.labels(sla_class).set(age_s)

    def _find_strange(self, counts: Counts) -> None:
        """Say once that nobody here serves a class: it was taken out of the configuration, and jobs wait."""
        for sla_class, jobs in counts.queued.items():
            known = sla_class in self._classes or sla_class in self._strange
            if jobs and not known and len(self._strange) < _MOST_STRANGE:
                self._strange.append(sla_class)
                _log.warning("class_not_served", sla_class=sla_class, waiting=jobs)

    def _got_row(self, held: HeldJob, times: ChoiceTimes, now_s: float) -> None:
        """A choice has a row again, or needs none any more."""
        if times.parked_s is not None:
            self._metrics.park_time.labels(*self._labels(held)).observe(now_s - times.parked_s)
        times.parked_s = times.rowless_s = None

    def _got_tokens(self, held: HeldJob, times: ChoiceTimes, event: Tokens, now_s: float) -> None:
        if not event.token_ids:
            return
        if times.first_token_s is not None:
            times.later_tokens += len(event.token_ids)
            times.last_token_s = now_s
            return
        times.first_token_s = now_s
        if not any(choice.token_ids for choice in held.choices):
            self._metrics.first_token.labels(*self._labels(held)).observe(held.age_s)
            self.recent.first_token(held.claimed.record.sla_class, held.age_s, now_s)

    def _labels(self, held: HeldJob) -> tuple[str, str]:
        return self._metrics.tenant(held.tenant), held.claimed.record.sla_class
