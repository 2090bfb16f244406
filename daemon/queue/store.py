"""The job store: the only door through which jobs change. Every method that changes one is one script."""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import structlog

from batond.daemon.errors import BatondError, ConflictError, InvalidRequestError, NotFoundError, StateError
from batond.daemon.queue import dead
from batond.daemon.queue.calls import call
from batond.daemon.queue.codec import (
    REFUSALS,
    decode_claimed,
    encode_commits,
    encode_limits,
    parse_renewal,
    refused_submit,
    refused_update,
    renew_args,
)
from batond.daemon.queue.keys import job_ref, split_ref
from batond.daemon.queue.limits import NO_LIMITS, TenantLimits
from batond.daemon.queue.reader import JobReader
from batond.daemon.queue.records import (
    ClaimedJob,
    CommitResult,
    GarbageError,
    HandBackOutcome,
    JobRecord,
    Reaped,
    Refusal,
    Renewal,
    StepCommit,
    Why,
    decode_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import redis.asyncio

    from batond.daemon.queue.calls import Argument

DAY_MS: Final = 24 * 3600 * 1000
REAP_LIMIT: Final = 200  # Jobs of each kind a reap: bounds the server's time.
SHOWN_CHARS: Final = 300  # Of a name in a message: it may be anything.
NOBODY: Final[Mapping[str, TenantLimits]] = MappingProxyType({})

_log = structlog.get_logger(__name__)


def _nothing(*_: object) -> None:
    """Tells nobody."""


class JobStore(JobReader):
    """Jobs of one model in Redis.

    All methods raise `UnavailableError` when Redis is away, loads or can't write, and `ExhaustedError` when
    its memory is full; whoever generates tokens keeps them and commits again: every write can be repeated.

    Args:
        client: See `open_async`. The caller closes it.
        model: Whose queue.
        classes: Names of all classes, most urgent first.
        max_queued: Waiting jobs the model's queue holds.
        max_attempts: Charged claims after which a job is dead.
        dead_ttl_ms: How long dead letters and their jobs are kept.
        replicas: So many must have what callers are told is done: submits, commits, cancels, updates.

    Attributes:
        on_ended: Told of jobs, by tenant and id, that a call of this store ended while nobody held them.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        model: str,
        classes: Sequence[str],
        *,
        max_queued: int = 10_000,
        max_attempts: int = 3,
        dead_ttl_ms: int = 7 * DAY_MS,
        replicas: int = 0,
    ) -> None:
        super().__init__(client, model, classes)
        self._max_queued = max_queued
        self._max_attempts = max_attempts
        self._dead_ttl_ms = dead_ttl_ms
        self._replicas = replicas
        self._claiming = asyncio.Lock()  # A claim names what is held; two at once would be given the same.
        self._held: dict[str, dict[str, int]] = {}  # owner -> ref -> epoch
        self.on_ended: Callable[[list[tuple[str, str]]], None] = _nothing

    # -- clients' side ------------------------------------------------------------------------------------

    async def submit(
        self,
        tenant: str,
        job_id: str,
        *,
        spec_json: bytes,
        body_hash: str,
        sla_class: str,
        prompt_tokens: int = 0,
        choices: int = 1,
        ttl_ms: int = DAY_MS,
        deadline_ms: int = 0,
        deadline_in_ms: int | None = None,
        longest_queue_ms: int = 0,
        limits: TenantLimits = NO_LIMITS,
        trace: str = "",
    ) -> tuple[JobRecord, bool]:
        """Accepts a job, or attaches to the one of this id with the same body.

        Args:
            tenant: Who pays; ids are scoped by tenant.
            job_id: The client's id, or one made for it.
            spec_json: An encoded `JobSpec`.
            body_hash: Of what the client sent, before anything (a seed) was drawn for it.
            sla_class: Effective class.
            prompt_tokens: For display before the engine counts.
            choices: Generations wanted: `sampling.n` of the spec.
            ttl_ms: How long the result is kept from the end.
            deadline_ms: When its last token must be out, by the Redis clock; 0 is never.
            deadline_in_ms: The same, from now; None is never. The earlier of both counts.
            longest_queue_ms: Time from now in which it must get its first row; 0 lets it wait.
            limits: The tenant's.
            trace: Kept with the job; empty is none.

        Returns:
            The record, and whether this call created it.

        Raises:
            ConflictError: The id is taken by a job with another body.
            DeadlineError: The deadline has passed already; no job was made.
            ExhaustedError: The queue is full (`QUEUE_FULL`), or the tenant's part of it
                (`TENANT_QUEUE_FULL`); the details have `limit`, `waiting` and `retry_ms`.
            InvalidRequestError: An id can't be used.
        """
        given: list[Argument] = ["tenant", tenant, "job_id", job_id, "model", self.keys.model]
        given += ["sla_class", sla_class, "body_hash", body_hash, "ttl_ms", ttl_ms]
        given += ["prompt_tokens", prompt_tokens, "choices", choices]
        given += ["trace", trace] if trace else []
        timing = [deadline_ms, "" if deadline_in_ms is None else deadline_in_ms, longest_queue_ms]
        # A pipeline of many would wait for the replicas of all of them.
        call = self._keep if self._replicas else self._call_together
        verdict, answer, retry_ms = await call(
            "submit",
            job_ref(tenant, job_id),
            spec_json,
            self._max_queued,
            limits.queued,
            *timing,
            *given,
        )
        if verdict in REFUSALS:
            raise refused_submit(verdict, answer, retry_ms, self._max_queued, limits)
        if verdict == b"conflict":
            raise ConflictError(
                f"job id {job_id!r} is taken by a job with another body: use another id", job_id=job_id
            )
        try:
            return decode_record(answer), verdict == b"created"
        except GarbageError as error:
            raise ConflictError(
                f"job id {job_id!r} is taken by a job whose record can't be read: use another id",
                job_id=job_id,
            ) from error

    async def update(
        self,
        tenant: str,
        job_id: str,
        *,
        present_class: str,
        sla_class: str,
        deadline_ms: int | None = None,
        longest_queue_ms: int = 0,
    ) -> JobRecord:
        """Moves a job to another class or gives it another deadline; its arrival stays.

        The daemon that runs it is told, and told again at its renewals.

        Args:
            tenant: Whose.
            job_id: Which.
            present_class: The class the caller decided by; another one there refuses.
            sla_class: The class it shall be in; may be the same.
            deadline_ms: By the Redis clock; None leaves it.
            longest_queue_ms: Of the new class, from the job's creation; 0 lets it wait.

        Raises:
            DeadlineError: The deadline has passed already; nothing changed.
            NotFoundError: There is no such job of this tenant.
            StateError: It has ended, or is in another class by now.
        """
        deadline: Argument = "" if deadline_ms is None else deadline_ms
        verdict, *rest = await self._keep(
            "update", job_ref(tenant, job_id), present_class, sla_class, deadline, longest_queue_ms
        )
        if verdict == b"done":
            try:
                return decode_record(rest[0])
            except GarbageError as error:
                raise NotFoundError(f"the record of job {job_id!r} can't be read", job_id=job_id) from error
        raise refused_update(verdict, job_id, rest[0] if rest else 0)

    async def cancel(self, tenant: str, job_id: str) -> JobRecord:
        """Cancels a waiting job at once, or tells the daemon that runs it. Nothing happens to an ended one.

        Raises:
            NotFoundError: There is no such job of this tenant.
        """
        ended, flat = await self._keep("cancel", job_ref(tenant, job_id))
        if ended:
            self.on_ended([(tenant, job_id)])
        try:
            return self._own(tenant, job_id, decode_record(flat) if flat else None)
        except GarbageError as error:
            raise NotFoundError(f"the record of job {job_id!r} can't be read", job_id=job_id) from error

    async def _keep(self, name: str, *args: Argument) -> Any:
        """Runs a script whose work must outlive the primary."""
        return await call(self._client, self.keys, name, *args, replicas=self._replicas)

    # -- daemons' side ------------------------------------------------------------------------------------

    async def claim(
        self,
        owner: str,
        limits: Mapping[str, int],
        *,
        lease_ms: int,
        tenants: Mapping[str, TenantLimits] = NOBODY,
        on_rest: Callable[[str, str], None] = _nothing,
    ) -> list[ClaimedJob]:
        """Takes waiting jobs: class, then tenant by its share, then deadline and arrival.

        Renew their leases from now on. Daemons of one queue should bring the same `tenants`. Where they
        don't, each job is charged by the weight of the daemon that claimed it, and each daemon holds its own
        quotas against the common counts: shares lie between, and the larger quota wins.

        Args:
            owner: Names this run of this daemon: no other run, before or beside it, may use it.
            limits: Most jobs to take of each class; classes left out get none.
            lease_ms: Time after which somebody else may take them if the lease is not renewed.
            tenants: Weights and quotas by tenant; one that is not named has weight 1 and no quota.
            on_rest: Is told of tenants that are at a quota, and of which, when they lose their turn.

        Raises:
            InvalidRequestError: The owner has no name, which in Redis means: nobody.
        """
        if not owner:
            raise InvalidRequestError("a claim needs an owner", field="owner")
        async with self._claiming:
            held = self._held.setdefault(owner, {})
            rooms: list[Argument] = []
            for sla_class in self.classes:
                if limits.get(sla_class, 0) > 0:
                    rooms += [sla_class, limits[sla_class]]
            shares = encode_limits(tenants)
            now_ms, reply, rests, late = await self._call(
                "claim", owner, lease_ms, shares, " ".join(held), *rooms
            )
            self._note_clock(int(now_ms))
            for tenant, quota in rests:
                on_rest(unquote(tenant.decode(errors="replace")), quota.decode())
            if late:
                self.on_ended([split_ref(ref.decode(errors="replace")) for ref in late])
            jobs = []
            for raw_ref, flat, spec, output in reply:
                try:
                    job = decode_claimed(raw_ref, flat, spec, output, int(now_ms))
                except GarbageError as error:
                    _log.warning("job_unreadable", ref=repr(raw_ref), error=str(error))
                    await self._call("bury", raw_ref, owner, str(error))
                    continue
                held[raw_ref.decode()] = job.record.epoch
                jobs.append(job)
            return jobs

    async def commit_step(self, owner: str, commits: Sequence[StepCommit]) -> CommitResult:
        """Makes a step's output durable, all jobs in one round trip. Deliver nothing to clients before.

        May be called again with the same commits when it is not known whether the first call arrived.
        """
        if not commits:
            return CommitResult(refused=[], cancel=[])
        refused, cancel = await self._keep("commit_step", owner, encode_commits(commits))
        refusals = [
            Refusal(
                tenant=commits[i].tenant, job_id=commits[i].job_id, why=Why(why.decode()), output_tokens=count
            )
            for i, why, count in refused
        ]
        gone = {(r.tenant, r.job_id) for r in refusals if r.why in {Why.MISSING, Why.FINAL, Why.FENCED}}
        kept = {(r.tenant, r.job_id) for r in refusals} - gone
        for commit in commits:
            key = (commit.tenant, commit.job_id)
            if key in gone or (commit.state is not None and commit.state.final and key not in kept):
                self.forget(owner, *key, epoch=commit.epoch)
        return CommitResult(refused=refusals, cancel=[split_ref(ref.decode()) for ref in cancel])

    async def finish(self, owner: str, commit: StepCommit) -> None:
        """Ends one job, outside a step; `commit.state` says how.

        Raises:
            StateError: It was refused; the details say why.
        """
        if commit.state is None or not commit.state.final:
            raise StateError(f"{commit.state} does not end a job", state=commit.state)
        for refusal in (await self.commit_step(owner, [commit])).refused:
            raise StateError(
                f"job {refusal.job_id!r} can't be ended by this claim: {refusal.why}",
                why=refusal.why,
                output_tokens=refusal.output_tokens,
            )

    async def hand_back(
        self, owner: str, tenant: str, job_id: str, epoch: int, *, charge: bool = False, why: str = ""
    ) -> HandBackOutcome:
        """Gives a job back to its old place in the queue, with its tokens.

        Args:
            owner: Who holds it.
            tenant: Whose.
            job_id: Which.
            epoch: Of the claim.
            charge: Count this claim as an attempt: the engine died with this job alone in it.
            why: Evidence, with `charge`.
        """
        ref = job_ref(tenant, job_id)
        outcome = await self._call(
            "hand_back", owner, ref, epoch, int(charge), why or "handed back", self._max_attempts
        )
        self.forget(owner, tenant, job_id, epoch=epoch)
        return HandBackOutcome(outcome.decode())

    async def mark_alone(self, owner: str, tenant: str, job_id: str, epoch: int, *, alone: bool) -> bool:
        """Notes that a job has an engine to itself: a lease that runs out then counts as an attempt.

        Returns:
            Whether this claim still holds it.
        """
        return bool(await self._call("alone", owner, job_ref(tenant, job_id), epoch, int(alone)))

    async def release_owner(self, owner: str) -> list[tuple[str, str]]:
        """Gives back all that a daemon still holds, uncharged, and forgets the daemon. Gives the jobs."""
        released = await self._call("release_owner", owner)
        self._held.pop(owner, None)
        return [split_ref(ref.decode()) for ref in released]

    async def renew(self, owner: str, held: Sequence[tuple[str, str, int]], *, lease_ms: int) -> Renewal:
        """Extends leases of (tenant, job id, epoch). Daemons use `LeaseKeeper`, which has its own thread."""
        return parse_renewal(await self._call("renew", *renew_args(owner, held, lease_ms)))

    async def reap(self) -> Reaped:
        """Takes jobs from dead daemons, fails those that wait too long, and removes what expired.

        Any daemon may call it at any time.
        """
        *lists, swept = await self._call("reap", self._max_attempts, REAP_LIMIT, self._dead_ttl_ms)
        requeued, cancelled, dead, late = (
            [split_ref(ref.decode(errors="replace")) for ref in refs] for refs in lists
        )
        if ended := [*cancelled, *dead, *late]:
            self.on_ended(ended)
        return Reaped(requeued=requeued, cancelled=cancelled, dead=dead, late=late, swept=swept)

    def forget(self, owner: str, tenant: str, job_id: str, *, epoch: int) -> None:
        """Drops a job that this daemon lost (a renewal said so) from what later claims name as held."""
        held = self._held.get(owner, {})
        ref = job_ref(tenant, job_id)
        if held.get(ref) == epoch:
            del held[ref]

    # -- operators' side ----------------------------------------------------------------------------------

    async def dead_retry(self, name: str) -> JobRecord:
        """Lets a dead job run again, from its committed tokens and with fresh attempts.

        Args:
            name: `DeadLetter.name`.

        Returns:
            The job after it; what it says of its place may be old already.

        Raises:
            NotFoundError: There is no such letter.
            StateError: It is of no job, or nobody could run it; the message says why.
        """
        member = dead.decode_name(name)
        obstacle = await self._obstacle(member)
        if not obstacle and await self._call("dead_retry", member):
            return await self.get(*split_ref(member.decode()))
        try:
            listed = await self._ask(self._client.zscore(self.keys.dead, member)) is not None
        except BatondError as error:
            if error.reason != "QUEUE_SCRIPT":  # Another type lies there; the next reap mends it.
                raise
            listed = False
        if not listed:
            raise _no_letter(name)
        raise StateError(
            f"{name[:SHOWN_CHARS]!r} can't be retried: {obstacle or dead.NO_JOB}", reason="NOT_RETRYABLE"
        )

    async def dead_drop(self, name: str) -> None:
        """Throws a dead letter away, with its job. `name` is `DeadLetter.name`.

        Raises:
            NotFoundError: There is no such letter.
        """
        if not await self._call("dead_drop", dead.decode_name(name)):
            raise _no_letter(name)


def _no_letter(name: str) -> NotFoundError:
    return NotFoundError(f"{name[:SHOWN_CHARS]!r} is not in the dead-letter list", name=name[:SHOWN_CHARS])
