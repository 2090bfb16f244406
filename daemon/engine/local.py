"""The engine: one step at a time, in one process.

Over 400 lines because the public interface and its documentation stand in one place; how queries move is in
`queries/lifecycle.py`, what is refused in `queries/admission.py`.

`LocalEngine` is the whole engine without daemon, Redis or gRPC; the daemon's engine process wraps the same
object (`process.py`). It is single-threaded: call it from one thread.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from batond.daemon.engine.arguments import as_policy, check_arguments
from batond.daemon.engine.batch.card_steps import CardUse
from batond.daemon.engine.batch.prefill import LOGITS_TOKENS
from batond.daemon.engine.batch.ring_size import ring_room_bytes
from batond.daemon.engine.bounds import Bounds
from batond.daemon.engine.model.causal import CausalModel, load_model
from batond.daemon.engine.proof.serving import choose_batch
from batond.daemon.engine.queries.admission import Admission
from batond.daemon.engine.queries.lifecycle import Lifecycle
from batond.daemon.engine.queries.outgoing import Outgoing
from batond.daemon.engine.queries.query import Query
from batond.daemon.engine.queries.residency import Residency
from batond.daemon.engine.queries.roster import Roster
from batond.daemon.engine.queries.sessions import (
    DEFAULT_SHARE,
    DEFAULT_TTL_S,
    OWNER_MARK,
    Sessions,
)
from batond.daemon.engine.queries.spilling import Spilling
from batond.daemon.engine.queries.tiers import close_store, open_store
from batond.daemon.engine.queries.view import free_bytes, memory_snapshot, snapshot
from batond.daemon.engine.sampling.sampler import Sampler
from batond.daemon.engine.sampling.text import TextStream
from batond.daemon.engine.step.ahead import Ahead
from batond.daemon.engine.step.choosing import Choosing
from batond.daemon.engine.step.decode import Decode
from batond.daemon.engine.step.prompts import Prompts
from batond.daemon.engine.step.relief import Relief
from batond.daemon.engine.step.rows import Rows
from batond.daemon.errors import (
    ConfigError,
    InvalidRequestError,
    StateError,
)
from batond.daemon.requests.params import SamplingParams
from batond.daemon.scheduler.chunks import ChunkBudget
from batond.daemon.scheduler.expected import ExpectedOutput
from batond.daemon.scheduler.guard import PolicyGuard
from batond.daemon.scheduler.plan import BatchView, Gate, ParkMode
from batond.daemon.scheduler.planner import Planner, PlannerLimits
from batond.daemon.wire.messages import (
    FinishReason,
    QueryState,
)
from batond.offload.folder import auto_spill_bytes
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.governing import Governing
    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.engine.proof.serving import Serving
    from batond.daemon.memory.governor import MemoryStatus
    from batond.daemon.scheduler.plan import Plan
    from batond.daemon.wire.messages import QueryEvent, Snapshot
    from batond.offload.store import ParkedStore
    from batond.policies.base import Policy

_log = logging.getLogger(__name__)

DEFAULT_CHUNK_TOKENS = 256
MIN_QUERY_TOKENS = 2  # One of prompt, one of output.
STALLED_STEPS = 64  # A legal plan always moves something; this many empty steps in a row are a defect.


class LocalEngine:
    """Serves many queries in one batch; parks and resumes them without changing their tokens.

    Args:
        model: A Hugging Face causal model, a `CausalModel`, or the path of one.
        tokenizer: A Hugging Face or `tokenizers` tokenizer; without one there is no text and no stop string.
        rows: Rows of the batch.
        batch: "auto", "padded" or "ring".
        device: Where the model runs.
        policy: Name of a registered policy, or a policy.
        host_pool_bytes: Host RAM for parked queries.
        prefill: "decoupled" (vector embedding) or "inline" (vector shaping).
        gate: When rows are given out; `Gate.BATCH` is run-to-completion, for comparison.
        chunk_tokens: Most prompt tokens computed between two decode steps; None is no bound. "auto" follows
            the inter-token target of the most urgent class that has a row, see `ChunkBudget`.
        ready_limit: Prefilled queries kept ahead of free rows.
        max_query_tokens: Most prompt + output tokens of a query; None takes the model's context.
        kv_budget_bytes: Bytes of KV the batch may hold; None is no bound. `max_query_tokens` is lowered to
            what fits: a query that could not be held alone is refused.
        overcommit: With a bound on KV, reserve memory for the output that is expected of a query's class, not
            for all that it may emit; when memory runs short all the same, the least urgent is parked.
        classes: SLA classes; None takes the defaults.
        limits: Quantum and park cap; None takes the defaults.
        deterministic: Give a query the same bits whatever the load is: no kernel's shape depends on mates. In
            half precision rounding differs with the shape, and now and then a token with it. Costs attention
            over several rows at once, packed prompts and sessions; refused where a probe finds other bits.
        one_at_a_time: Serve a model that no shared batch serves exactly in a batch of one row.
        kernels: Decode on a card through the ring's own kernels, where they are exact for the model.
        graphs: Capture decode steps and prompts on a card, where they can be; needs the kernels.
        compiled: Compile the small parts of captured steps, where that is exact for the model.
        overlap: Begin a step before the books of the last one are done, where graphs are captured; the tokens
            are the same. See `step/ahead.py`.
        arena: What the ring's memory is: "plain" has all of it from the start; "elastic" follows the rows,
            and the ring may be larger than memory; "auto" follows them on the CPU, in a ring that fits.
        session_bytes: Most bytes of pool and files for slices of finished turns, which give way to parked
            queries; None is a quarter of both together, 0 keeps none.
        session_ttl_s: A session unused for so long is dropped.
        governor: Sets rows and bytes of KV in each step by what memory there is; the engine closes it.
        spill_dir: Directory for what the host pool can't hold; None keeps no files.
        spill_bytes: Most bytes of files in it, 0 keeps none; None is half of what its disk has free.
        poison: Fill given-back host memory with NaN patterns (tests).

    Attributes:
        rows: Rows of the batch; 1 where queries must take turns.
        batch_kind: "padded", "ring" or "uncached".
        batch_reason: Why.
        chunkable: Whether a prompt may be computed in parts, and a kept slice be extended by a prompt.
        preemption_mode: "offload" or "recompute".
        on_plan: Called with each plan before anything of it is computed; None is nobody.
        arrivals: Asked whether anything has come that the next step should know of before it is begun; None
            is nobody. Must be cheap: the card waits for the answer.
        keeps_sessions: Whether finished turns are kept. Not where a slice can't be extended exactly by a
            prompt, with inline prefill, or without room.

    Raises:
        UnsupportedModelError: The model can't be served exactly; the message says why.
        ConfigError: An argument has no meaning here.
    """

    def __init__(  # noqa: PLR0917 - the order of the first seven is public
        self,
        model: Any,
        tokenizer: Any = None,
        rows: int = 4,
        batch: str = "auto",
        device: str = "cpu",
        policy: str | Policy = "priority",
        host_pool_bytes: int = 1 << 28,
        *,
        prefill: str = "decoupled",
        gate: Gate = Gate.ITERATION,
        chunk_tokens: int | Literal["auto"] | None = DEFAULT_CHUNK_TOKENS,
        ready_limit: int = 1,
        max_query_tokens: int | None = None,
        kv_budget_bytes: int | None = None,
        overcommit: bool = True,
        classes: SlaClasses | None = None,
        limits: PlannerLimits | None = None,
        one_at_a_time: bool = False,
        deterministic: bool = False,
        kernels: bool = True,
        graphs: bool = True,
        compiled: bool = True,
        overlap: bool = True,
        arena: str = "auto",
        session_bytes: int | None = None,
        session_ttl_s: float = DEFAULT_TTL_S,
        governor: Governing | None = None,
        spill_dir: str | Path | None = None,
        spill_bytes: int | None = None,
        poison: bool = False,
    ) -> None:
        check_arguments(
            rows=rows,
            prefill=prefill,
            chunk_tokens=chunk_tokens,
            host_pool_bytes=host_pool_bytes,
            kv_budget_bytes=kv_budget_bytes,
            session_bytes=session_bytes,
            session_ttl_s=session_ttl_s,
            spill_bytes=spill_bytes,
        )
        self.planner = Planner(as_policy(policy), limits or PlannerLimits())
        if isinstance(model, str) or hasattr(model, "__fspath__"):
            model, loaded = load_model(model, device=device)
            tokenizer = loaded if tokenizer is None else tokenizer
        self.model = model if isinstance(model, CausalModel) else CausalModel(model, device)
        self.deterministic = deterministic
        self.classes = classes or SlaClasses()
        self._inline, self._overlap = prefill == "inline", overlap
        self._gate = gate
        self._ready_limit = 0 if self._inline else ready_limit
        self._kv_budget_bytes, self._governor = kv_budget_bytes, governor
        if spill_dir is not None and spill_bytes is None:
            spill_bytes = auto_spill_bytes(Path(spill_dir))
        if session_bytes is None:
            files_bytes = (spill_bytes or 0) if spill_dir is not None else 0
            session_bytes = (host_pool_bytes + files_bytes) // DEFAULT_SHARE
        serving = choose_batch(
            batch,
            self.model,
            rows,
            max_query_tokens=max_query_tokens,
            one_at_a_time=one_at_a_time,
            deterministic=deterministic,
            inline=self._inline,
            pack_tokens=None if chunk_tokens == "auto" else chunk_tokens,
            sessions=session_bytes > 0,
            card=CardUse(kernels=kernels, graphs=kernels and graphs, compiled=compiled, streamed=compiled),
            arena=arena,
            governed=governor is not None,
        )
        self._note_serving(serving, max_query_tokens, chunk_tokens)
        self.keeps_sessions = session_bytes > 0 and serving.extends_slices
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        with ExitStack() as undo:
            undo.callback(serving.batch.close)
            store = open_store(self.model.device, host_pool_bytes, spill_dir, spill_bytes or 0, poison=poison)
            undo.callback(close_store, store)
            if governor is not None:
                undo.callback(governor.close)
                largest_bytes = serving.batch.layout.nbytes(self.max_query_tokens)
                governor.attach(serving.batch, largest_bytes, lambda: store.pool.used_bytes)
                if not governor.on:
                    self._bound_by_room(serving.batch)
            self._assemble(serving, store, session_bytes if self.keeps_sessions else 0, session_ttl_s)
            self.on_plan: Callable[[Plan], None] | None = None
            self.arrivals: Callable[[], bool] | None = None
            governed = governor is not None and governor.on
            if overcommit and (self._kv_budget_bytes is not None or governed):
                self._roster.expected = ExpectedOutput()
            undo.pop_all()

    def _assemble(
        self, serving: Serving, store: ParkedStore, session_bytes: int, session_ttl_s: float
    ) -> None:
        """Put the parts together, from the store of slices up to the decode step."""
        counters: Counter[str] = Counter()
        outgoing = Outgoing(store)
        batch = serving.batch
        sessions = Sessions(
            store,
            outgoing,
            batch.layout,
            batch.device,
            counters,
            most_bytes=session_bytes,
            ttl_s=session_ttl_s,
        )
        self.residency = Residency(
            batch,
            serving.new_prefill_batch,
            store,
            outgoing,
            sessions,
            counters=counters,
            chunkable=serving.chunkable,
        )
        self._sampler = Sampler(self.model, self._tokenizer)
        self._roster = Roster(self.residency, PolicyGuard(self.planner, counters), inline=self._inline)
        self.residency.on_lost = self._roster.note
        self._spilling = Spilling(self.residency, self._roster.line, counters)
        self._life = Lifecycle(
            self.residency,
            self._sampler,
            self._roster,
            self.model.eos_token_ids,
            counters,
            inline=self._inline,
        )
        self._relief = Relief(self.residency, self._life, self._roster)
        self._bounds = Bounds(
            self.residency,
            self._relief,
            governor=self._governor,
            counters=counters,
            kv_budget_bytes=self._kv_budget_bytes,
            chunk_tokens=self._chunk_tokens,
            chunk_budget=ChunkBudget() if self._follows_pace else None,
        )
        choosing = Choosing(self._sampler, self._relief)
        self._prompts = Prompts(
            self.residency,
            self._sampler,
            choosing,
            self._life,
            self._relief,
            packer=serving.packer,
            divisible=self.chunkable,
            grid_tokens=self._chunk_tokens if self.deterministic else None,
            sizes=serving.prompt_steps.graphs.sizes if serving.prompt_steps is not None else (),
        )
        self._rows = Rows(
            self.residency, self._spilling, self._life, self._relief, self._roster, inline=self._inline
        )
        self._ahead = Ahead(self.residency, self._roster, self.model.eos_token_ids)
        self._decode = Decode(
            self.residency, self._sampler, choosing, self._life, self._relief, ahead=self._ahead
        )
        self._admission = Admission(
            self._sampler,
            vocab_size=self.model.vocab_size,
            max_query_tokens=self.max_query_tokens,
            has_tokenizer=self._tokenizer is not None,
            inline=self._inline,
            limit_reason=self._limit_reason,
        )
        self._arrivals, self._stalled_steps = itertools.count(1), 0

    def _note_serving(
        self, serving: Serving, max_query_tokens: int | None, chunk_tokens: int | Literal["auto"] | None
    ) -> None:
        """Keep what was found out about the model, and the limits that follow from it."""
        self.rows = serving.batch.rows
        self.batch_kind, self.batch_reason = serving.batch.kind, serving.reason
        self.preemption_mode = serving.preemption_mode
        self.chunkable = serving.chunkable
        self.max_query_tokens = serving.most_query_tokens(self.model, max_query_tokens)
        self._limit_reason = ""
        if self._kv_budget_bytes is not None:
            self._limit_tokens_by_bytes(serving.batch.layout, self._kv_budget_bytes)
        self._replays_by_step = serving.replay_by_step and not self._inline
        most_tokens = None if chunk_tokens == "auto" or self._inline or not self.chunkable else chunk_tokens
        if self.deterministic and self.chunkable:  # Chunks with wanted logits are cut no finer than others.
            most_tokens = min(most_tokens or LOGITS_TOKENS, LOGITS_TOKENS)
        self._chunk_tokens = most_tokens
        free = self.chunkable and not (self._inline or self.deterministic)
        self._follows_pace = chunk_tokens == "auto" and free

    def _limit_tokens_by_bytes(self, layout: RecordLayout, kv_budget_bytes: int) -> None:
        """Take no query that the whole budget could not hold: one number says so to everybody.

        The budget that was configured counts. Memory may be short for a while, which only makes queries wait.

        Raises:
            ConfigError: It holds not even one token of prompt and one of output.
        """
        if not layout.record_bytes:
            return  # Nothing grows with tokens.
        fit = (kv_budget_bytes - layout.state_bytes) // layout.record_bytes
        if fit < MIN_QUERY_TOKENS:
            raise ConfigError(
                f"kv_budget_bytes of {kv_budget_bytes} hold no query: {MIN_QUERY_TOKENS} tokens need"
                f" {layout.nbytes(MIN_QUERY_TOKENS)}",
                field="kv_budget_bytes",
            )
        if fit < self.max_query_tokens:
            self.max_query_tokens = fit
            self._limit_reason = f", as many as kv_budget_bytes of {kv_budget_bytes} hold"

    def _bound_by_room(self, batch: Batch) -> None:
        """Bound KV by what is free now: the ring may be larger than memory, and nobody says what others take.

        Raises:
            ConfigError: It holds not even one token of prompt and one of output.
        """
        room_bytes = ring_room_bytes(batch.device)
        if not batch.memory.elastic or batch.memory.reserved_bytes <= room_bytes:
            return
        _log.warning("memory is not watched: KV may take %d bytes, half of what is free now", room_bytes)
        self._kv_budget_bytes = min(self._kv_budget_bytes or room_bytes, room_bytes)
        self._limit_tokens_by_bytes(batch.layout, self._kv_budget_bytes)

    # -- what callers do ------------------------------------------------------------------------------

    @property
    def queries(self) -> dict[str, Query]:
        """Live queries by id."""
        return self._life.queries

    @property
    def counters(self) -> Counter[str]:
        """Monotonic counts since the start."""
        return self._life.counters

    @property
    def on_event(self) -> Callable[[QueryEvent], None] | None:
        """Called with every event, in order; None drops them."""
        return self._life.on_event

    @on_event.setter
    def on_event(self, listener: Callable[[QueryEvent], None] | None) -> None:
        self._life.on_event = listener

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        sla_class: str = "standard",
        tenant: str = "default",
        seed: int | None = None,
        query_id: str | None = None,
        waited_s: float = 0.0,
        emitted_token_ids: Sequence[int] = (),
        session_id: str | None = None,
        deadline_s: float = math.inf,
        tenant_weight: float = 1.0,
    ) -> Query:
        """Take a query; it runs in the steps that follow.

        Args:
            prompt_token_ids: At least one token id of the vocabulary.
            sampling: None is greedy with defaults.
            sla_class: Name of its class.
            tenant: Who pays.
            seed: Of its noise; None draws one.
            query_id: Unique name; None makes one.
            waited_s: Time it already waited elsewhere.
            emitted_token_ids: Tokens it produced elsewhere before; it continues after them.
            session_id: Names a conversation of the tenant. Where a turn before left its slice, only what the
                prompt adds to it is computed; the prompt is the whole conversation all the same. A turn that
                finishes leaves its own.
            deadline_s: Time left until its last token is needed; policies may heed it, nothing ends it.
            tenant_weight: Share of the tenant among tenants, relative.

        Raises:
            InvalidRequestError: Empty prompt, unknown token id or class, bad or taken id, stop strings
                without a tokenizer, n above 1, structured output that can't be had, a session together with
                prompt_logprobs, or a weight, deadline or time waited that is no number.
            RequestTooLargeError: Prompt + max_tokens is over `max_query_tokens`.
        """
        sampling = sampling or SamplingParams()
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InvalidRequestError(f"seed must be a whole number, not {seed!r}", field="seed")
        if not (0 < tenant_weight < math.inf and not math.isnan(deadline_s)):
            raise InvalidRequestError(
                f"tenant_weight {tenant_weight} must be above 0, deadline_s {deadline_s} a number",
                field="tenant_weight",
            )
        if not math.isfinite(waited_s):
            raise InvalidRequestError(f"waited_s {waited_s} must be a number", field="waited_s")
        prompt = self._admission.check(prompt_token_ids, sampling)
        session = self._admission.check_session(tenant, session_id, sampling)
        seq = next(self._arrivals)
        query = Query(
            query_id=f"q{seq}" if query_id is None else query_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            sla_class=self.classes.get(sla_class),
            tenant=tenant,
            seed=secrets.randbits(63) if seed is None else seed,
            seq=seq,
            arrival_s=time.monotonic() - waited_s,
            deadline_s=time.monotonic() + deadline_s,
            tenant_weight=tenant_weight,
            session=session if self.keeps_sessions else None,
            replays_by_step=self._replays_by_step,
        )
        if query.query_id in self.queries:
            raise InvalidRequestError(f"query id {query.query_id} is taken", query_id=query.query_id)
        if OWNER_MARK in query.query_id:
            raise InvalidRequestError("a query id has no NUL characters", field="query_id")
        if self._tokenizer is not None:
            query.text = TextStream(self._tokenizer, sampling.stop)
        self._sampler.prepare(query)
        if query.session is not None:
            self.residency.sessions.touch(query.session)
        self.queries[query.query_id] = query
        self._roster.note(query)
        self._life.replay(query, emitted_token_ids)
        return query

    def park(self, query: Query) -> None:
        """Park a query by hand and hold it until `resume` or `run_until_idle`.

        One that the planner parked, or that was resumed and has no row yet, is held where it is.

        Raises:
            StateError: It is held already, or has ended.
            InvalidRequestError: It belongs to another engine.
        """
        self._require_own(query)
        if query.held or not query.live:
            raise StateError(
                f"query {query.query_id} is {query.state}: only one that waits or runs can be parked",
                query_id=query.query_id,
                state=query.state,
            )
        query.held = True
        self._roster.note(query)
        if query.state is QueryState.PARKED:
            return
        self._life.park(query, ParkMode.OFFLOAD, cause="manual")

    def resume(self, query: Query) -> None:
        """Let a parked query compete for a row again.

        Raises:
            StateError: It is not parked.
            InvalidRequestError: It belongs to another engine.
        """
        self._require_own(query)
        if query.state is not QueryState.PARKED:
            raise StateError(
                f"query {query.query_id} is {query.state}: only a parked one can be resumed",
                query_id=query.query_id,
                state=query.state,
            )
        query.held = False
        self._roster.note(query)

    def update(self, query: Query, *, sla_class: str | None = None, deadline_s: float | None = None) -> None:
        """Give a live query another class or deadline; the next step ranks it anew, wherever it is.

        Args:
            query: Of this engine.
            sla_class: Name of its class from now on; None leaves it.
            deadline_s: Time left until its last token is needed, infinity is never; None leaves it.

        Raises:
            StateError: It has ended.
            InvalidRequestError: There is no such class, the deadline is no number, or it is another engine's.
        """
        self._require_own(query)
        if not query.live:
            raise StateError(f"query {query.query_id} has ended", query_id=query.query_id, state=query.state)
        if deadline_s is not None and math.isnan(deadline_s):
            raise InvalidRequestError("deadline_s must be a number", field="deadline_s")
        query.sla_class = query.sla_class if sla_class is None else self.classes.get(sla_class)
        if deadline_s is not None:
            query.deadline_s = time.monotonic() + deadline_s
        self._roster.change(query)

    def cancel(self, query: Query) -> bool:
        """End a query now; returns whether it was still alive.

        Raises:
            InvalidRequestError: It belongs to another engine.
        """
        if not query.live:
            return False
        self._require_own(query)
        self._life.end(query, QueryState.CANCELLED, FinishReason.CANCELLED)
        return True

    def _require_own(self, query: Query) -> None:
        if query.live and self.queries.get(query.query_id) is not query:
            raise InvalidRequestError(
                f"query {query.query_id} is not in this engine", query_id=query.query_id
            )

    def forget(self, query: Query) -> None:
        """Drop a live query without an event: its job goes on elsewhere."""
        if query.live:
            query.transition(QueryState.CANCELLED)
            self._life.drop(query)

    def run_until_idle(self) -> None:
        """Resume everything held by hand, then step until every query has ended."""
        for query in self.queries.values():
            if query.held:
                query.held = False
                self._roster.note(query)
        while self.queries:
            self.step()

    def set_policy(self, policy: str | Policy) -> None:
        """Exchange the policy from the next step on; every live query is ranked anew, none is lost.

        What the old policy accounted for is gone: the new one begins with the tokens that follow.

        Args:
            policy: Name of a registered policy, or a policy.

        Raises:
            ConfigError: There is no such policy; the old one stays.
        """
        self.planner.policy = as_policy(policy)
        self.counters["policy_changes"] += 1
        _log.info("policy is %s from here on", self.planner.policy.name)

    @property
    def busy(self) -> bool:
        """Whether a step could move any query."""
        return any(not query.held for query in self.queries.values())

    def close(self) -> None:
        """Cancel what lives and give all memory back; the engine can't be used afterwards."""
        for query in list(self.queries.values()):
            self.cancel(query)
        self.residency.sessions.clear()
        if self._governor is not None:
            self._governor.close()
        close_store(self.residency.store)
        self.residency.batch.close()  # Last: copies that the store has waited for may have read its rows.

    @property
    def memory_status(self) -> MemoryStatus | None:
        """What the memory governor makes of its readings; None without one, or while it is off."""
        return None if self._governor is None else self._governor.status

    @property
    def tend_every_s(self) -> float:
        """How often an idle engine wants `tend`; infinity is never."""
        return self._governor.wait_s if self._governor is not None and self._governor.on else math.inf

    def tend(self) -> None:
        """What an idle engine does: takes in copies, drops old sessions, gives memory to neighbours."""
        self.residency.bring(())  # What was begun for those that are held again, or gone, is given up.
        self.residency.settle()
        self.residency.sessions.expire()
        self._bounds.limits()

    def snapshot(self) -> Snapshot:
        """The batch as it stands."""
        stats = self.residency.store.stats
        counters = {
            **self.counters,
            "corrupt_slices": stats.corruptions,
            "late_completions": stats.late_completions,
            "failed_copies": stats.failures,
        }
        queries, policy = self.queries.values(), self.planner.policy.name
        memory = memory_snapshot(self.residency, self.memory_status, self._bounds.kv_budget_bytes)
        memory = msgspec.structs.replace(memory, row_limit=self._relief.rows.bound(memory.row_limit))
        return snapshot(
            self.counters["steps"], queries, self.residency, counters, policy=policy, memory=memory
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where the engine's books contradict each other."""
        self.residency.check_integrity()
        self._roster.check_integrity(self.queries)
        for query in self.queries.values():
            if (query.state is QueryState.RUNNING) != (query.row is not None):
                raise AssertionError(f"query {query.query_id} is {query.state} in row {query.row}")
        owners = self.residency.store.owners  # Whose sessions those are the sessions have checked.
        astray = [owner for owner in owners if not owner.startswith(OWNER_MARK)]
        if not self.queries and astray:
            raise AssertionError(f"slices are parked for nobody: {astray}")

    # -- one step -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Plan, prefill, park, place, decode; returns whether anything moved.

        Copies to the device are begun before prompts and decode, which on a GPU they run beside; whose copy
        is under way gets its row in a later step. While nothing finds memory, a step only waits a moment.
        Where the decode was begun in the step before, its rows are fixed: who is to get one, or to lose one,
        does in the next.
        """
        self.counters["steps"] += 1
        if self._relief.pausing():
            self.tend()
            return False
        began_s = time.perf_counter()
        self.residency.settle()
        plan = self._plan()
        self._spilling.write_ahead()
        chunks = self._rows.prepare(plan)
        held_back = self._ahead.begun and self._rows.can_move(plan)
        keep = held_back or not self._overlap or self._completes_soon(plan)
        go_on = None if keep else self._may_go_on
        if self._ahead.begun:
            plan = plan.without_moves()
        self._note_reasons(plan)
        if self.on_plan is not None:
            self.on_plan(plan)
        prefilled_tokens = self.counters["prefill_tokens"]
        self._prompts.run(chunks)
        computed = self.counters["prefill_tokens"] - prefilled_tokens  # Chunks may end before the plan's.
        self._spilling.let_go()
        if not self._relief.struck:  # Else rows may have been parked, and whoever got one would lose it.
            self._rows.run(plan)
        decoded = self._decode.run(go_on)
        calm = not self._relief.struck
        self._relief.note_step(decoded=decoded, prompts=bool(chunks), rows=self.rows)
        if decoded and calm and not (plan.park or plan.resume):
            self._bounds.note_step(time.perf_counter() - began_s, computed)
        return self._note_progress(plan, moved=decoded or not plan.empty)

    def _plan(self) -> Plan:
        """Ask the planner; nothing changes but what is known of sessions."""
        self.residency.sessions.expire()
        line = self._roster.refresh()
        rows, kv_budget_bytes = self._bounds.limits(line.taken_bytes)
        view = BatchView(
            now_s=time.monotonic(),
            rows=self._relief.rows.bound(rows),
            queries=(),
            chunk_tokens=self._bounds.step_tokens(),
            ready_limit=self._ready_limit,
            row_step_bytes=self.residency.batch.layout.record_bytes,
            kv_free_bytes=free_bytes(line, kv_budget_bytes),
            host_free_bytes=self.residency.host_free_bytes,
            gate=self._gate,
            fixed_chunks=self.deterministic,
        )
        return self._roster.plan(view)

    def _completes_soon(self, plan: Plan) -> bool:
        """Whether a prompt may be complete by the next step: then its query gets a row, if none is begun."""
        most = self._bounds.step_tokens() if plan.chunks else None
        return any(
            most is None or self.queries[chunk.query_id].to_prefill_tokens - chunk.tokens <= most
            for chunk in plan.chunks
        )

    def _may_go_on(self) -> bool:
        """Whether the next decode may be begun before the books of this one are done."""
        return not self._relief.struck and (self.arrivals is None or not self.arrivals())

    def _note_reasons(self, plan: Plan) -> None:
        """Count why queries got rows or nothing."""
        self.counters.update(f"blocked_{reason}" for reason in plan.blocked.values())
        self.counters.update(f"rows_{reason}" for reason in plan.reasons.values() if reason != "row_soon")
        self.counters["prefetch_hints"] += len(plan.prefetch)
        if not plan.empty and _log.isEnabledFor(logging.DEBUG):
            parks = {order.query_id: (order.cause, order.for_query_id) for order in plan.park}
            _log.debug(
                "step %d: parks %s; rows %s; blocked %s",
                self.counters["steps"],
                parks,
                plan.reasons,
                plan.blocked,
            )

    def _note_progress(self, plan: Plan, *, moved: bool) -> bool:
        """A batch that can't move although somebody could is a defect: say so instead of spinning."""
        self._stalled_steps = 0 if moved or not self.busy else self._stalled_steps + 1
        if self._stalled_steps >= STALLED_STEPS:
            states = {query.query_id: str(query.state) for query in self.queries.values()}
            raise RuntimeError(
                f"no progress in {STALLED_STEPS} steps; blocked: {plan.blocked}; states: {states}"
            )
        return moved
