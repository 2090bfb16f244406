"""A query: one generation, with everything that must survive a park in one record."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batond.daemon.errors import StateError
from batond.daemon.wire.messages import FinishReason, QueryState, Tokens, Usage

if TYPE_CHECKING:
    from batond.daemon.engine.batch.prefill import Prefill
    from batond.daemon.engine.queries.sessions import KeptSlice, SessionKey
    from batond.daemon.engine.sampling.grammar import GrammarMatcher
    from batond.daemon.engine.sampling.text import TextStream
    from batond.daemon.requests.params import SamplingParams
    from batond.daemon.wire.messages import TokenLogprobs
    from batond.offload.slice import KVSlice
    from batond.policies.classes import SlaClass

_LIVE = (
    QueryState.WAITING,
    QueryState.PREFILLING,
    QueryState.READY,
    QueryState.RUNNING,
    QueryState.PARKED,
)
_ENDS = {QueryState.FINISHED, QueryState.CANCELLED, QueryState.FAILED}

#: From state to the states it may move to. Terminal states are final.
ALLOWED_MOVES: dict[QueryState, set[QueryState]] = {
    # Straight to a row: inline, where the batch step computes the prompt.
    QueryState.WAITING: {QueryState.PREFILLING, QueryState.RUNNING, QueryState.PARKED} | _ENDS,
    QueryState.PREFILLING: {QueryState.READY, QueryState.PARKED} | _ENDS,
    QueryState.READY: {QueryState.RUNNING, QueryState.PARKED} | _ENDS,
    QueryState.RUNNING: {QueryState.PARKED} | _ENDS,
    QueryState.PARKED: {QueryState.RUNNING} | _ENDS,
    QueryState.FINISHED: set(),
    QueryState.CANCELLED: set(),
    QueryState.FAILED: set(),
}


@dataclass(slots=True, eq=False)
class Query:
    """One generation inside the engine.

    Attributes:
        query_id: Unique in the engine.
        prompt_token_ids: The prompt.
        sampling: How tokens are chosen.
        sla_class: The class it runs under.
        tenant: Who pays.
        seed: 64-bit seed of its noise.
        seq: Order of arrival.
        arrival_s: Monotonic time of arrival, queueing elsewhere included.
        deadline_s: Monotonic time at which the tenant needs the last token; infinity is never.
        tenant_weight: Share of the tenant among tenants, relative.
        output_token_ids: Tokens emitted so far, without the prompt.
        output_text: Text emitted so far; empty without a tokenizer.
        output_logprobs: One per output token, if asked for; None where a token was replayed inline.
        prompt_logprobs: One per prompt token whose place was computed, if asked for; None for the first.
        grammar: Where its output stands in the schema, expression or grammar it must follow.
        finish_reason: Set when it ended.
        error: (reason, message) if it failed.
        parks: How often it was parked, by whomever.
        planner_parks: Those of them that count against the cap: somebody else got what was taken.
        recomputed_tokens: Tokens whose KV had to be computed again.
        row: Its row while RUNNING.
        last_row: The row it had before; a resumed query is placed elsewhere where possible.
        held: Parked by hand.
        put_off: Kept out of the plans for a while: there was no memory for it.
        park_seq: Order of its last park; 0 once it runs again.
        reserved_tokens: Output tokens that memory is reserved for, raised as it outgrows them; None is all it
            may emit.
        since_admission_tokens: Tokens decoded since it last got a row.
        prefill: Prompt computation under way on the device.
        kv: Its complete slice on the device, waiting for a row.
        on_host_tokens: Tokens whose KV lies in the host pool.
        replays_by_step: Its emitted tokens are computed again in the batch, one a step, as they were first;
            otherwise with the prompt.
        replay_left: While in a row, emitted tokens before the newest that are still to be computed again.
        computed_tokens: Most tokens whose KV ever existed; what recomputation is counted against.
        text: Its detokenizer.
        session: The conversation it is a turn of; None is none.
        session_slice: What was kept of the session when `session_tokens` was found out.
        session_tokens: Tokens at the start of its prompt that the session will bring, while nothing of it is
            computed yet.
        cached_prompt_tokens: Tokens of its prompt that the session brought.
    """

    query_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sla_class: SlaClass
    tenant: str
    seed: int
    seq: int
    arrival_s: float
    deadline_s: float = math.inf
    tenant_weight: float = 1.0
    output_token_ids: list[int] = field(default_factory=list)
    output_text: str = ""
    output_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    grammar: GrammarMatcher | None = None
    finish_reason: FinishReason | None = None
    error: tuple[str, str] | None = None
    parks: int = 0
    planner_parks: int = 0
    recomputed_tokens: int = 0
    row: int | None = None
    last_row: int | None = None
    held: bool = False
    put_off: bool = False
    park_seq: int = 0
    reserved_tokens: int | None = None
    since_admission_tokens: int = 0
    prefill: Prefill | None = None
    kv: KVSlice | None = None
    on_host_tokens: int = 0
    replays_by_step: bool = False
    replay_left: int = 0
    computed_tokens: int = 0
    text: TextStream | None = None
    session: SessionKey | None = None
    session_slice: KeptSlice | None = None
    session_tokens: int = 0
    cached_prompt_tokens: int = 0
    started: bool = False
    prompt_logprobs_sent: bool = False
    first_token_s: float | None = None
    parked_s: float = 0.0
    _parked_since_s: float | None = None
    _state: QueryState = QueryState.WAITING

    @property
    def state(self) -> QueryState:
        """Where the query stands; changed by `transition` alone."""
        return self._state

    @property
    def live(self) -> bool:
        """Whether it can still produce tokens."""
        return self._state in _LIVE

    @property
    def to_cache_token_ids(self) -> list[int]:
        """The tokens whose KV must exist before the next decode step: all but the newest output."""
        return self.prompt_token_ids + self.output_token_ids[:-1]

    @property
    def to_prefill_token_ids(self) -> list[int]:
        """The tokens whose KV must exist before it can have a row."""
        return self.prompt_token_ids if self.replays_by_step else self.to_cache_token_ids

    @property
    def prefilled_tokens(self) -> int:
        """Tokens whose KV exists somewhere now, in the kept slice of its session at least."""
        if self.row is not None:
            return len(self.prompt_token_ids) + len(self.output_token_ids) - 1 - self.replay_left
        if self.kv is not None:
            return self.kv.n_tokens
        if self.prefill is not None:
            return self.prefill.done_tokens
        return self.on_host_tokens or self.session_tokens

    @property
    def untouched(self) -> bool:
        """Whether no KV of its own exists: what its session kept can still be of use."""
        on_device = self.row is not None or self.kv is not None or self.prefill is not None
        return not on_device and not self.on_host_tokens

    @property
    def to_prefill_tokens(self) -> int:
        """Tokens still to be computed before it can decode."""
        emitted = 0 if self.replays_by_step else max(len(self.output_token_ids) - 1, 0)
        missing = len(self.prompt_token_ids) + emitted - self.prefilled_tokens
        return 0 if self.row is not None else max(missing, 0)

    @property
    def lacks_given_logprobs(self) -> bool:
        """Whether log-probabilities of tokens still to be prefilled are wanted."""
        prompt_wanted = self.sampling.prompt_logprobs is not None
        output_wanted = self.sampling.logprobs is not None
        return (prompt_wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids)) or (
            output_wanted and len(self.output_logprobs) < len(self.output_token_ids)
        )

    def transition(self, to: QueryState, now_s: float | None = None) -> None:
        """Move to another state: the only door.

        Raises:
            StateError: The move is not in the table.
        """
        if to not in ALLOWED_MOVES[self._state]:
            raise StateError(
                f"query {self.query_id} is {self._state} and can't become {to}",
                query_id=self.query_id,
                state=self._state,
            )
        now_s = time.monotonic() if now_s is None else now_s
        if self._parked_since_s is not None:
            self.parked_s += now_s - self._parked_since_s
            self._parked_since_s = None
        if to is QueryState.PARKED:
            self._parked_since_s = now_s
        self._state = to

    def uncached_token_ids(self, cached: int) -> list[int]:
        """The tokens the next step must run: one of its output, or the whole prompt of an inline newcomer."""
        if self.replay_left:
            return [self.output_token_ids[cached - len(self.prompt_token_ids)]]
        if self.output_token_ids and cached == len(self.prompt_token_ids) + len(self.output_token_ids) - 1:
            return self.output_token_ids[-1:]
        return (self.prompt_token_ids + self.output_token_ids)[cached:]

    def advance_text(self, token: int, eos_token_ids: frozenset[int]) -> tuple[str, FinishReason | None]:
        """Turn the token just appended into text and decide whether it is the last.

        Returns:
            Text that is certain now (all of it if the query ends), and why the query ends, if it does.
        """
        stops = token in self.sampling.stop_token_ids or (
            token in eos_token_ids and not self.sampling.ignore_eos
        )
        reason = FinishReason.STOP if stops else None
        if reason is None and len(self.output_token_ids) >= self.sampling.max_tokens:
            reason = FinishReason.LENGTH
        if self.grammar is not None and self.grammar.terminated:
            reason = FinishReason.STOP
        if self.text is None:
            return "", reason
        may_stop = len(self.output_token_ids) > self.sampling.min_tokens
        piece = "" if stops else self.text.push(token, may_stop=may_stop)
        if reason is not None:
            piece += self.text.flush()
        if self.text.stopped:
            reason = FinishReason.STOP
        self.output_text += piece
        return piece, reason

    def tokens_event(self, token: int, text: str) -> Tokens:
        """The event for the token just appended; the first one brings the prompt's log-probabilities."""
        newest = self.output_logprobs[-1] if self.sampling.logprobs is not None else None
        prompt_due = self.sampling.prompt_logprobs is not None and not self.prompt_logprobs_sent
        self.prompt_logprobs_sent = True
        return Tokens(
            query_id=self.query_id,
            first_index=len(self.output_token_ids) - 1,
            token_ids=[token],
            text=text,
            logprobs=None if newest is None else [newest],
            prompt_logprobs=self.prompt_logprobs if prompt_due else None,
        )

    def usage(self) -> Usage:
        """What it cost so far."""
        waited_s = 0.0 if self.first_token_s is None else self.first_token_s - self.arrival_s
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            output_tokens=len(self.output_token_ids),
            parks=self.parks,
            recomputed_tokens=self.recomputed_tokens,
            waited_s=waited_s,
            parked_s=self.parked_s,
            cached_prompt_tokens=self.cached_prompt_tokens,
        )
