"""Gives jobs to the engine, and takes them back so that suspects are alone: does what suspects.py decides."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from batond.daemon.errors import BatondError
from batond.daemon.front.committer import RETRY_REDIS_S
from batond.daemon.front.hub import LostRow
from batond.daemon.front.suspects import LAPSES_TO_SUSPECT, Suspects
from batond.daemon.queue import HandBackOutcome
from batond.daemon.telemetry.logging import get_logger
from batond.daemon.wire.messages import Cancel, HandBack, ParkCause

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batond.daemon.front.committer import Committer
    from batond.daemon.front.engine_desk import EngineDesk
    from batond.daemon.front.held import HeldJob
    from batond.daemon.front.held_jobs import HeldJobs
    from batond.daemon.front.steps import JobStep
    from batond.daemon.front.traces import JobTraces
    from batond.daemon.queue import JobStore, TenantLimits
    from batond.daemon.telemetry.metrics import Metrics
    from batond.policies.classes import SlaClasses

_log = get_logger(__name__)


class Trials:
    """The one door through which jobs enter the engine and leave it before their end.

    Args:
        store: Notes who is alone, for the case that this daemon dies.
        owner: This run of this daemon.
        jobs: Held jobs.
        desk: The engine.
        committer: Hands back whom a death convicts.
        classes: SLA classes: their order is urgency.
        metrics: Figures.
        limits: Shares by tenant, as last claimed with.
        traces: Spans of jobs; None where there are none.
    """

    def __init__(
        self,
        *,
        store: JobStore,
        owner: str,
        jobs: HeldJobs,
        desk: EngineDesk,
        committer: Committer,
        classes: SlaClasses,
        metrics: Metrics,
        limits: Callable[[], Mapping[str, TenantLimits]],
        traces: JobTraces | None = None,
    ) -> None:
        self._store, self._owner, self._jobs, self._desk = store, owner, jobs, desk
        self._committer, self._metrics, self._limits, self._traces = committer, metrics, limits, traces
        self._urgency = {sla.name: place for place, sla in enumerate(classes)}
        self._suspects = Suspects()
        self._convicted: asyncio.Queue[tuple[HeldJob, str]] = asyncio.Queue()
        self._noted: HeldJob | None = None  # Whom Redis knows to be alone.
        self._leaving: list[HeldJob] = []  # Withdrawn, but the engine may be at work on them still.
        self._news = asyncio.Event()

    def take(self, held: HeldJob) -> None:
        """A job was claimed: give it to the engine, or let it wait for its turn."""
        record = held.claimed.record
        if record.attempts or record.lapses >= LAPSES_TO_SUSPECT:
            _log.warning(
                "suspect_claimed",
                **held.log_ids,
                attempts=record.attempts,
                lapses=record.lapses,
            )
            self._suspects.accuse(
                held.ref,
                self._urgency_of(held),
                choices=len(held.open_choices),
                deaths=max(1, record.attempts),
            )
        self._enter(held)
        if self._suspects:
            self._changed()

    def engine_up(self) -> None:
        """A new engine has nothing; give it whoever may be in it."""
        self._leaving.clear()
        for held in self._jobs:
            held.given = held.active = False
            if not self._suspects:
                self._enter(held)
        self._changed()

    def engine_down(self, why: str) -> None:
        """The engine died: its jobs are suspects, or the one that was alone in it has an attempt charged."""
        inside = [held for held in self._jobs if held.given and not held.ended]
        # One that only waited is not suspected, unless nobody was begun with: then a command killed it, or a
        # step with those who were withdrawn just before.
        leaving = [held for held in self._leaving if self._jobs.holds(held) and not held.given]
        begun = [held for held in inside if held.active] or [*inside, *leaving]
        self._leaving.clear()
        culprit = self._suspects.engine_died(
            {held.ref: (self._urgency_of(held), len(held.open_choices)) for held in begun}
        )
        for held in [*inside, *leaving]:
            had_rows = held.given and held in begun
            held.given = held.active = False
            if held.ref == culprit:
                held.ended = True  # Nothing more is sent to an engine for it, by this claim.
                self._convicted.put_nowait((held, why))
            elif had_rows:
                self._lose_rows(held)
        if begun:
            _log.error(
                "engine_died_with",
                jobs=[f"{held.tenant}/{held.job_id}" for held in begun],
                convicted=bool(culprit),
                why=why,
            )
        self._changed()

    def begun(self, query_ids: Sequence[str]) -> None:
        """The engine is about to compute queries for the first time: if it dies, it may be their doing."""
        for query_id in query_ids:
            held = self._jobs.running(query_id)
            if held is not None:
                held.active = True
                self._leaving.clear()  # Commands are taken in order.

    def heard(self, steps: Sequence[JobStep]) -> None:
        """Jobs have put something out."""
        if not self._suspects:
            return
        for step in steps:
            tokens = sum(len(chunk.token_ids) for chunk in step.commit.chunks)
            if self._suspects.heard(step.held.ref, tokens):
                _log.info("suspect_acquitted", **step.held.log_ids)
                self._changed()

    def left(self, held: HeldJob) -> None:
        """A job is held no more."""
        self._suspects.forget(held.ref)
        if self._suspects or self._suspects.alone:
            self._changed()

    def tries(self, held: HeldJob) -> bool:
        """Whether a job is a suspect: it takes its turns, or waits for one."""
        return held.ref in self._suspects

    async def run(self) -> None:
        """Take turns until cancelled. Without suspects there is nothing to do."""
        while True:
            try:
                async with asyncio.timeout(self._suspects.settle_in_s(time.monotonic())):
                    await self._news.wait()
            except TimeoutError:
                pass  # The others have had their time.
            self._news.clear()
            while not self._convicted.empty():
                await self._charge(*self._convicted.get_nowait())
            if self._desk.ready is None:
                continue  # A new one says so.
            try:
                await self._turn()
            except BatondError as error:
                _log.warning(
                    "turn_not_noted", error=error.message
                )  # Redis is away: nobody is tried without it.
                await asyncio.sleep(RETRY_REDIS_S)
                self._news.set()

    async def _turn(self) -> None:
        others = [
            self._urgency_of(held) for held in self._jobs if held.ref not in self._suspects and not held.ended
        ]
        self._suspects.settle(time.monotonic(), min(others, default=None))
        for held in self._jobs:
            if held.given and not self._suspects.admits(held.ref):
                self._withdraw(held)
        alone = next((held for held in self._jobs if held.ref == self._suspects.alone), None)
        if self._noted is not None and self._noted is not alone:
            if self._jobs.holds(self._noted):
                await self._note_alone(self._noted, alone=False)  # Tried again if Redis is away.
            self._noted = None
        if alone is not None and self._noted is not alone and not alone.ended:
            _log.info("suspect_tried_alone", **alone.log_ids, suspects=len(self._suspects))
            if not await self._note_alone(alone, alone=True):
                self._committer.abandon(alone)
            self._noted = alone
        self._metrics.suspects.set(len(self._suspects))
        for held in self._jobs:
            self._enter(held)

    def _enter(self, held: HeldJob) -> None:
        """Give a job to the engine, if it may be in it now; else its turn comes."""
        admitted = self._suspects.admits(held.ref) and (not self._suspects.alone or held is self._noted)
        if held.ended or held.given or not admitted or self._desk.ready is None:
            return
        record, limits = held.claimed.record, self._limits().get(held.tenant)
        waited_s = record.waited_ms / 1000 + time.monotonic() - held.claimed_s
        for command in held.submits(waited_s, limits.weight if limits is not None else 1.0):
            self._desk.tell(command)
        held.given = True
        if record.cancel_requested:
            self._desk.tell_all(Cancel, held)

    def _withdraw(self, held: HeldJob) -> None:
        """Take a job out of the engine; it goes on later from the tokens it has."""
        self._desk.tell_all(HandBack, held)
        if held.active:
            self._leaving.append(held)
        held.withdraw()
        self._lose_rows(held)

    async def _charge(self, held: HeldJob, why: str) -> None:
        """Count the claim as an attempt, with evidence. Others may try the job next, or nobody any more."""
        await self._committer.join()  # What it put out before stays.
        _log.error("job_killed_engine", **held.log_ids, why=why)
        while (outcome := await self._committer.hand_back(held, charge=why)) is None:
            if self._jobs.get(held.tenant, held.job_id) is not held:
                return  # Its lease has run out meanwhile, and Redis knows that it was alone.
            await asyncio.sleep(RETRY_REDIS_S)
        if outcome is HandBackOutcome.DEAD:
            _log.error("job_dead", **held.log_ids, attempts=held.claimed.record.attempts + 1)
        self._metrics.engine_kills.inc()
        self._jobs.let_go(held)

    async def _note_alone(self, held: HeldJob, *, alone: bool) -> bool:
        return await self._store.mark_alone(
            self._owner, held.tenant, held.job_id, held.claimed.record.epoch, alone=alone
        )

    def _lose_rows(self, held: HeldJob) -> None:
        """Tell watchers of a job that it goes on later."""
        lost = [index for index in held.open_choices if held.choices[index].had_row]
        if self._traces is not None:
            self._traces.lost_rows(held, lost)
        held.live.publish([LostRow(ParkCause.ENGINE_RESTART, kept=False, choice=index) for index in lost])

    def _urgency_of(self, held: HeldJob) -> int:
        """Of its class; one that this daemon does not know comes last."""
        return self._urgency.get(held.claimed.record.sla_class, len(self._urgency))

    def _changed(self) -> None:
        self._news.set()
