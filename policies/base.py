"""What a policy sees and must answer. Pure Python: no torch, no clock, no I/O."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Hashable

#: Compared like a tuple; the smaller runs first.
Rank: TypeAlias = tuple[float, ...]


class Phase(enum.Enum):
    """Where a query stands, as far as scheduling cares."""

    WAITING = "waiting"  # Nothing of the prompt is computed.
    PREFILLING = "prefilling"  # Part of the prompt is computed.
    READY = "ready"  # The whole prompt is computed; needs a row.
    RUNNING = "running"  # Owns a row.
    PARKED = "parked"  # Lost its row; needs one again.


@dataclass(frozen=True, slots=True)
class QueryView:
    """One query as the planner and the policies see it.

    Attributes:
        query_id: Unique in the engine.
        tenant: Who pays.
        sla_class: Name of the class.
        class_order: 0 is the most urgent class.
        preemptible: Whether the class may be parked at all.
        arrival_s: When the query arrived (queueing elsewhere included), same clock as `now_s`.
        seq: Order of arrival in this engine; breaks ties.
        phase: See Phase.
        prompt_tokens: Length of the prompt.
        prefilled_tokens: How much of prompt + replayed output is computed.
        output_tokens: Tokens emitted so far.
        max_tokens: Most tokens it may emit.
        parks: How often it was parked by the planner.
        since_admission_tokens: Tokens decoded since it last got a row.
        park_seq: Order in which it was parked; 0 if it is not parked.
        held: Parked by hand, or put off for want of memory: the planner leaves it where it is.
        kv_bytes: Bytes its cached tokens take now.
        reserved_bytes: Bytes it may come to need: prompt + reserved output, never below `kv_bytes`.
        park_bytes: Bytes a park would take from the host pool.
        to_prefill_tokens: Tokens that must be computed before it can decode (0 unless WAITING, PREFILLING,
            or PARKED without a copy of its KV).
        deadline_s: When the tenant needs the last token, same clock as `now_s`; infinity: no deadline.
        ttft_target_s: Time from arrival to the first token that its class aims at; infinity: none.
        tpot_target_s: Time from one token to the next that its class aims at; infinity: none.
        tenant_weight: Share of the tenant among tenants, relative, above 0.
    """

    query_id: str
    tenant: str
    sla_class: str
    class_order: int
    preemptible: bool
    arrival_s: float
    seq: int
    phase: Phase
    prompt_tokens: int
    prefilled_tokens: int
    output_tokens: int
    max_tokens: int
    parks: int = 0
    since_admission_tokens: int = 0
    park_seq: int = 0
    held: bool = False
    kv_bytes: int = 0
    reserved_bytes: int = 0
    park_bytes: int = 0
    to_prefill_tokens: int = 0
    deadline_s: float = math.inf
    ttft_target_s: float = math.inf
    tpot_target_s: float = math.inf
    tenant_weight: float = 1.0


class Policy(Protocol):
    """Decides order and pre-emption; the planner adds the rules that every policy gets for free."""

    @property
    def name(self) -> str:
        """The name under which the policy is registered and reported."""

    def rank(self, query: QueryView, now_s: float) -> Rank:
        """Order of claims to a row; the smaller runs first.

        Called when a query joins the line, and from then on as often as the planner needs to know: in each
        step for the first of a line, of running queries only when victims are looked for.
        """

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        """Whether `newcomer` is strictly more urgent than `victim`. Must be irreflexive and asymmetric."""

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Account for tokens just computed for `query`."""


@runtime_checkable
class TracksEnds(Protocol):
    """A policy that remembers queries or learns from them; optional beside `Policy`."""

    def on_end(self, query: QueryView) -> None:
        """Forget a query that finished, failed or was cancelled; called once a query, in whatever phase."""


@runtime_checkable
class PreemptsByLevel(Protocol):
    """A policy whose `may_preempt` goes by class, or by the first number of `rank`; optional beside `Policy`.

    It makes full batches cheap: a planner looks at running queries one by one only where it has to.
    """

    def victim_bar(self, newcomer: QueryView, class_order: int, now_s: float) -> float | None:
        """The level (first number of `rank`) above which running queries of a class may be pre-empted.

        Returns:
            Infinity: none of the class. Minus infinity: all that are preemptible; then `rank` must put them
            behind all running queries of more urgent classes. A number: those of a higher level, whatever
            else they are. None: `may_preempt` is asked about each. Whoever is above the bar can't pre-empt
            `newcomer`, and `may_preempt` would say the same.
        """


@runtime_checkable
class CountsByOwner(Protocol):
    """A policy whose `on_tokens` asks whose query it is, not how far it has come; optional beside `Policy`.

    It spares a view for every token: `on_tokens` may get the query as it was some tokens ago. Who replaces
    `on_tokens` in a class of its own says so again, or gets the query as it is.
    """

    counts_by_owner: bool


@runtime_checkable
class KeepsLines(Protocol):
    """A policy that can say whose order never changes; optional beside `Policy`.

    It makes long queues cheap: a planner may sort a line once, as its queries arrive, and rank only the first
    of each line in a step.
    """

    def line_of(self, query: QueryView) -> Hashable:
        """Name the line of a query of which nothing is computed yet.

        Of two such queries of one line, the one that `rank` put first stays first as long as nothing of
        either is computed, whatever the time and whatever the policy is told meanwhile. Queries of which
        something is computed, and parked ones, have no line.
        """
