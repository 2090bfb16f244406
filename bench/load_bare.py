"""What the queue's scripts write, as plain commands in a pipeline: the floor they are held against.

No checks, no compare-and-set, no fair shares: only a record, its places and its output, written and read as
the scripts do for a job of no special kind.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    #: Writes what becomes of one job into a pipeline: (pipeline, class, reference, number of the job).
    Writer: TypeAlias = Callable[[Any, str, str, int], None]

_PREFIX = "bare:"
_DEADLINE = 1 << 53
_TTL_MS = 3_600_000


def submit(pipe: Any, sla_class: str, ref: str, number: int, *, spec: bytes) -> None:
    """Accept a job."""
    tenant, _, job_id = ref.partition("/")
    record: dict[str | bytes, str | int] = {
        "state": "queued",
        "arrival_us": time.time_ns() // 1000,
        "created_ms": time.time_ns() // 1_000_000,
        "queued_ms": time.time_ns() // 1_000_000,
        "tenant": tenant,
        "job_id": job_id,
        "model": "load",
        "sla_class": sla_class,
        "body_hash": "0" * 64,
        "ttl_ms": _TTL_MS,
        "prompt_tokens": 32,
        "choices": 1,
    }
    pipe.hset(_PREFIX + "job:" + ref, mapping=record)
    pipe.set(_PREFIX + "spec:" + ref, spec)
    pipe.set(_PREFIX + "clock", number)
    pipe.zadd(_PREFIX + "queue:" + sla_class, {ref: number})
    pipe.zadd(f"{_PREFIX}line:{sla_class}/{tenant}", {f"{number:016} {ref}": _DEADLINE})
    pipe.zadd(_PREFIX + "turn:" + sla_class, {tenant: number}, nx=True)
    pipe.zadd(_PREFIX + "tenant:" + tenant, {ref: number})
    pipe.hincrby(_PREFIX + "totals", "submitted", 1)
    pipe.publish(_PREFIX + "wake", sla_class)
    pipe.hgetall(_PREFIX + "job:" + ref)


def claim(pipe: Any, sla_class: str, ref: str, number: int) -> None:
    """Give a job to a daemon."""
    tenant = ref.partition("/")[0]
    pipe.zrem(_PREFIX + "queue:" + sla_class, ref)
    pipe.zrem(f"{_PREFIX}line:{sla_class}/{tenant}", f"{number:016} {ref}")
    pipe.zadd(_PREFIX + "accounts:" + sla_class, {tenant: number})
    pipe.hset(
        _PREFIX + "job:" + ref,
        mapping={"state": "claimed", "owner": "daemon", "epoch": 1, "claimed_ms": number, "waited_ms": 1},
    )
    pipe.sadd(_PREFIX + "owner:daemon", ref)
    pipe.sadd(_PREFIX + "holds:" + tenant, ref)
    pipe.zadd(_PREFIX + "leases", {ref: number})
    pipe.xrange(_PREFIX + "out:" + ref)
    pipe.get(_PREFIX + "spec:" + ref)
    pipe.hgetall(_PREFIX + "job:" + ref)


def commit(pipe: Any, _class: str, ref: str, number: int) -> None:
    """Commit one token of a job."""
    job = _PREFIX + "job:" + ref
    pipe.hmget(job, "state", "owner", "epoch", "output_tokens", "cancel_requested", "started_ms")
    pipe.xadd(_PREFIX + "out:" + ref, {"c": b'{"first_index":0,"token_ids":[5],"text":"a"}'})
    pipe.hset(
        job, mapping={"output_tokens": 1, "first_token_ms": number, "started_ms": number, "state": "running"}
    )
    pipe.publish(_PREFIX + "news:" + ref, "running")


def end(pipe: Any, sla_class: str, ref: str, number: int) -> None:
    """Finish a job."""
    job, tenant = _PREFIX + "job:" + ref, ref.partition("/")[0]
    pipe.hmget(job, "state", "owner", "epoch", "output_tokens", "cancel_requested", "started_ms")
    pipe.hset(
        job, mapping={"state": "succeeded", "owner": "", "finished_ms": number, "finish_reason": "length"}
    )
    pipe.zrem(_PREFIX + "leases", ref)
    pipe.srem(_PREFIX + "owner:daemon", ref)
    pipe.srem(_PREFIX + "holds:" + tenant, ref)
    pipe.hincrby(_PREFIX + "totals", "succeeded", 1)
    for kind in ("job:", "spec:", "out:"):
        pipe.pexpire(_PREFIX + kind + ref, _TTL_MS)
    pipe.zadd(_PREFIX + "expiring", {ref: number})
    pipe.publish(_PREFIX + "news:" + ref, sla_class)
