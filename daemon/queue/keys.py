"""Every key the queue keeps in Redis: name, type, time to live, reason. No name is written anywhere else.

All keys of one model share the hash tag `{model}`, so that in Redis Cluster one script can touch them all.
Scripts get the common base as their only declared key (it routes the call and is itself never stored) and
build the other names from the prelude that `lua_prelude` renders from the table below. The names they build
lie in the same slot, which is what Cluster asks of a script.

A job is named inside Redis by its *reference*, `quote(tenant)/quote(job id)`: tenants can't collide, and no
id can forge the name of another key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from batond.daemon.errors import InvalidRequestError

MAX_ID_CHARS: Final = 256
#: Names that quoting leaves as they are: nearly all, and quoting takes ten times as long as this look.
_PLAIN: Final = re.compile(rf"[A-Za-z0-9_.~-]{{1,{MAX_ID_CHARS}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyKind:
    """One kind of key.

    Attributes:
        lua: Constant under which scripts know it.
        suffix: What follows `batond:{model}:`; a trailing colon means that an item's name follows.
        redis_type: Type in Redis, or "channel".
        ttl: When it goes away.
        reason: What it is for.
    """

    lua: str
    suffix: str
    redis_type: str
    ttl: str
    reason: str


RESULT_TTL: Final = (
    "the job's result time to live, from its end; a dead job's goes with its dead-letter entry"
)

KINDS: Final = (
    # -- per job ------------------------------------------------------------------------------------------
    KeyKind("JOB", "job:", "hash", RESULT_TTL, "state and counters of a job: JobRecord, small on purpose"),
    KeyKind(
        "SPEC", "spec:", "string", RESULT_TTL, "what to run: JobSpec as JSON; apart since it may be large"
    ),
    KeyKind(
        "OUT",
        "out:",
        "stream",
        RESULT_TTL,
        "output of a choice: an entry a commit, id <first token index>-<1 text only, 2 tokens, 3 end without "
        "tokens>, field c: Chunk. Choice 0's has the job's name, choice i's that and #i",
    ),
    # -- per model ----------------------------------------------------------------------------------------
    KeyKind(
        "QUEUE",
        "queue:",
        "zset",
        "empty when no job waits",
        "all waiting jobs of one class by arrival (microseconds of the Redis clock, strictly increasing): "
        "counts and ages; mends the lines",
    ),
    KeyKind(
        "LINE",
        "line:",
        "zset",
        "empty when none waits",
        "of <class>/<tenant>: waiting jobs (arrival, reference) by the time they are due, ms; 2^53: never",
    ),
    KeyKind(
        "TURN",
        "turn:",
        "zset",
        "empty when no job waits",
        "tenants with a line in one class that may be served, by virtual token counter",
    ),
    KeyKind(
        "RESTING",
        "resting:",
        "zset",
        "empty when nobody is at a quota",
        "tenants with a line in one class that are at a quota, by the time to look again, ms",
    ),
    KeyKind(
        "ACCOUNTS",
        "accounts:",
        "zset",
        "an hour after the last charge; dropped when nothing waits or runs; 10,000 entries",
        "tenants of one class by virtual token counter (tokens / weight), where it is above the floor",
    ),
    KeyKind(
        "FLOOR",
        "floor:",
        "string",
        "two hours after the last claim; dropped when nothing waits or runs",
        "counter of the tenant served last in one class: where new ones begin",
    ),
    KeyKind(
        "PACE",
        "pace:",
        "hash",
        "ten minutes after the last claim or start",
        "of one class: how fast its jobs were claimed and started lately (pace.lua), for estimates",
    ),
    KeyKind(
        "MINUTE", "minute:", "string", "two minutes", "of <tenant>/<minute>: tokens charged in it, for quotas"
    ),
    KeyKind("HOLDS", "holds:", "set", "empty when none runs", "claimed jobs of one tenant, for quotas"),
    KeyKind("DUE", "due", "zset", "empty when none waits", "waiting jobs that fail at a time, by it, ms"),
    KeyKind(
        "CLASSES", "classes", "set", "none: a handful of names", "classes that ever had a job, for counts"
    ),
    KeyKind(
        "CLOCK", "clock", "string", "none: one number", "last arrival given out; keeps arrivals in order"
    ),
    KeyKind(
        "LEASES", "leases", "zset", "empty when no job runs", "claimed jobs by lease end, ms of Redis clock"
    ),
    KeyKind(
        "OWNER",
        "owner:",
        "set",
        "empty when it holds no job",
        "jobs one daemon holds: hand-back, lost replies",
    ),
    KeyKind(
        "TENANT", "tenant:", "zset", "swept with its jobs", "jobs of one tenant by arrival, for ListJobs"
    ),
    KeyKind(
        "EXPIRING", "expiring", "zset", "swept", "ended jobs by expiry, ms: tells the sweep what to remove"
    ),
    KeyKind("DEAD", "dead", "zset", "swept after the dead-letter time", "dead letters by time of death, ms"),
    KeyKind("EVIDENCE", "evidence", "hash", "swept with `dead`", "dead letter -> DeadLetter as JSON"),
    KeyKind("TOTALS", "totals", "hash", "none: a handful of numbers", "monotonic counters for metrics"),
    # -- channels (lossy; each has a poll behind it) --------------------------------------------------------
    KeyKind("WAKE", "wake", "channel", "-", "payload: class with a new waiting job; idle daemons claim"),
    KeyKind(
        "ORDERS",
        "orders:",
        "channel",
        "-",
        "to one daemon: reference of a job to cancel, or `update` and that of one that was changed; renewals "
        "repeat both",
    ),
    KeyKind(
        "NEWS", "news:", "channel", "-", "of one job: output was committed, or it ended; watchers read on"
    ),
)


#: Tenants added at run time, of all models: name -> AddedTenant as JSON (front/tenant_book.py). No TTL.
TENANTS_KEY: Final = "batond:tenants"
#: Channel beside it: the name of a tenant that changed; lossy, daemons look again every few seconds.
TENANTS_CHANNEL: Final = "batond:tenants:news"
#: Daemons of all models: hash, id of the run -> when it counts as gone (ms of the Redis clock) and its
#: DaemonRecord as JSON (registry.py). TTL: that of the daemon that told of itself last. The tag puts it into
#: the slot of TENANTS_KEY.
DAEMONS_KEY: Final = f"batond:{{{TENANTS_KEY}}}:daemons"


class Keys:
    """The keys of one model.

    Raises:
        InvalidRequestError: The model has no name.
    """

    def __init__(self, model: str) -> None:
        if not model:
            raise InvalidRequestError("a model needs a name", field="model")
        self.model = model
        # Braces of the name itself would end the hash tag early.
        self.base = f"batond:{{{quote(model, safe='/')}}}"

    def _name(self, lua: str, item: str = "") -> str:
        return f"{self.base}:{_SUFFIXES[lua]}{item}"

    def job(self, ref: str) -> str:
        """Hash of one job."""
        return self._name("JOB", ref)

    def spec(self, ref: str) -> str:
        """String: the spec of one job."""
        return self._name("SPEC", ref)

    def out(self, ref: str, choice: int = 0) -> str:
        """Stream: the output of one choice of a job."""
        # A reference is quoted: no id can hold the sign itself.
        return self._name("OUT", f"{ref}#{choice}" if choice else ref)

    def queue(self, sla_class: str) -> str:
        """Sorted set: waiting jobs of one class."""
        return self._name("QUEUE", sla_class)

    def line(self, sla_class: str, tenant: str) -> str:
        """Sorted set: waiting jobs of one tenant in one class."""
        return self._name("LINE", f"{sla_class}/{quote(tenant, safe='')}")

    def turn(self, sla_class: str) -> str:
        """Sorted set: tenants of one class by counter."""
        return self._name("TURN", sla_class)

    def resting(self, sla_class: str) -> str:
        """Sorted set: tenants of one class that are at a quota."""
        return self._name("RESTING", sla_class)

    def pace(self, sla_class: str) -> str:
        """Hash: how fast one class is served."""
        return self._name("PACE", sla_class)

    def minute(self, tenant: str, minute: int) -> str:
        """String: tokens of one tenant in one minute of the Redis clock."""
        return self._name("MINUTE", f"{quote(tenant, safe='')}/{minute}")

    def accounts(self, sla_class: str) -> str:
        """Sorted set: tenants of one class by counter, above the floor."""
        return self._name("ACCOUNTS", sla_class)

    def floor(self, sla_class: str) -> str:
        """String: where the counters of one class begin."""
        return self._name("FLOOR", sla_class)

    @property
    def due(self) -> str:
        """Sorted set: waiting jobs that fail at a time."""
        return self._name("DUE")

    def tenant(self, tenant: str) -> str:
        """Sorted set: jobs of one tenant."""
        return self._name("TENANT", quote(tenant, safe=""))

    def owner(self, owner: str) -> str:
        """Set: jobs held by one daemon."""
        return self._name("OWNER", owner)

    @property
    def leases(self) -> str:
        """Sorted set: ends of leases."""
        return self._name("LEASES")

    @property
    def dead(self) -> str:
        """Sorted set: dead letters."""
        return self._name("DEAD")

    @property
    def evidence(self) -> str:
        """Hash: evidence of dead letters."""
        return self._name("EVIDENCE")

    @property
    def expiring(self) -> str:
        """Sorted set: ended jobs by expiry."""
        return self._name("EXPIRING")

    @property
    def wake(self) -> str:
        """Channel: a job waits."""
        return self._name("WAKE")

    def orders(self, owner: str) -> str:
        """Channel: orders to one daemon."""
        return self._name("ORDERS", owner)

    def news(self, ref: str) -> str:
        """Channel: news of one job."""
        return self._name("NEWS", ref)


_SUFFIXES: Final = {kind.lua: kind.suffix for kind in KINDS}


def job_ref(tenant: str, job_id: str) -> str:
    """Names a job inside Redis.

    Raises:
        InvalidRequestError: An id is empty, too long, or no valid text.
    """
    if _PLAIN.fullmatch(tenant) and _PLAIN.fullmatch(job_id):
        return f"{tenant}/{job_id}"
    for field, value in (("tenant", tenant), ("job_id", job_id)):
        if not 1 <= len(value) <= MAX_ID_CHARS:
            raise InvalidRequestError(f"{field} must have 1 to {MAX_ID_CHARS} characters", field=field)
    try:
        return f"{quote(tenant, safe='')}/{quote(job_id, safe='')}"
    except UnicodeEncodeError as error:
        raise InvalidRequestError("tenant and job_id must be valid Unicode text", field="job_id") from error


def split_ref(ref: str) -> tuple[str, str]:
    """Gives tenant and job id back; the inverse of `job_ref`."""
    tenant, _, job_id = ref.partition("/")
    return unquote(tenant), unquote(job_id)


def lua_prelude() -> str:
    """Renders the key names as Lua constants; JOB, SPEC ... are prefixes where an item's name follows."""
    return "".join(f"local {kind.lua} = KEYS[1] .. ':{kind.suffix}'\n" for kind in KINDS)
