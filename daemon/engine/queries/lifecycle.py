"""What becomes of a query: placed, parked, given a token, ended. One place changes and reports it."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from typing import TYPE_CHECKING

from batond.daemon.errors import ExhaustedError
from batond.daemon.scheduler.plan import ParkMode
from batond.daemon.wire.messages import (
    Finished,
    FinishReason,
    Preempted,
    QueryFailed,
    QueryState,
    Resumed,
    Started,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.queries.roster import Roster
    from batond.daemon.engine.sampling.sampler import Choice, Sampler
    from batond.daemon.wire.messages import QueryEvent

_log = logging.getLogger(__name__)


class Lifecycle:
    """Moves queries through their lives; counts and reports every move.

    Args:
        residency: Where their KV is.
        sampler: Its state per query is let go with the row.
        roster: Is told of every change and token.
        eos_token_ids: Ids that end a generation.
        counters: Counted into.
        inline: Whether prompts are computed inside the batch step.

    Attributes:
        queries: Live queries by id.
        counters: Monotonic counts since the start.
        on_event: Called with every event, in order; None drops them.
    """

    def __init__(
        self,
        residency: Residency,
        sampler: Sampler,
        roster: Roster,
        eos_token_ids: frozenset[int],
        counters: Counter[str],
        *,
        inline: bool,
    ) -> None:
        self.queries: dict[str, Query] = {}
        self.counters = counters
        self.on_event: Callable[[QueryEvent], None] | None = None
        self._residency, self._sampler, self._roster = residency, sampler, roster
        self._eos_token_ids, self._inline = eos_token_ids, inline
        self._parks = itertools.count(1)

    def place(self, query: Query, reason: str = "") -> None:
        """Give the query a row."""
        self._roster.note(query)
        # Memory may be sought between two tries, and its copy to the host fail meanwhile.
        lost = query.to_prefill_tokens and not self._inline
        row = None if lost else self._residency.place(query)
        if row is None:
            return  # Its parked copy is lost or damaged: the next plans compute it again.
        back = query.state is QueryState.PARKED
        query.transition(QueryState.RUNNING)
        query.park_seq = query.since_admission_tokens = 0
        if not query.started:
            query.started = True
            self._emit(Started(query_id=query.query_id, row=row, reason=reason))
        elif back:
            self.counters["resumes"] += 1
            self._emit(Resumed(query_id=query.query_id, row=row, reason=reason))

    def park(self, query: Query, mode: ParkMode, *, cause: str, for_query_id: str = "") -> None:
        """Take the query's row and device memory; keep its work in the host pool if it fits.

        One that was parked before, and whose KV is computed again, keeps its place in the line.
        """
        self._roster.note(query)
        kept_bytes = self._residency.vacate(query, mode)
        self._sampler.forget(query)
        if query.state is not QueryState.PARKED:
            query.transition(QueryState.PARKED)
            query.park_seq = next(self._parks)
        query.parks += 1
        self.counters["parks"] += 1
        self.counters[f"parks_for_{cause}"] += 1
        self.counters["parked_bytes"] += kept_bytes or 0
        self.counters["parks_dropped"] += kept_bytes is None
        self._emit(
            Preempted(
                query_id=query.query_id,
                cause=cause,
                kept=kept_bytes is not None,
                parked_bytes=kept_bytes or 0,
                for_query_id=for_query_id,
            )
        )

    def stow(self, query: Query, mode: ParkMode = ParkMode.OFFLOAD, *, cause: str) -> None:
        """Take what a query has on the device to the host: it goes on from there later. Also a parked one."""
        if query.state is not QueryState.PARKED:
            self.park(query, mode, cause=cause)
            return
        self._roster.note(query)
        self._residency.vacate(query, mode)

    def append(self, query: Query, choice: Choice) -> None:
        """Add a token to a query and end it where it must end."""
        token = choice.token_id
        if not self._follows_grammar(query, token):
            return
        self._roster.note(query)
        query.output_token_ids.append(token)
        if choice.logprobs is not None:
            query.output_logprobs.append(choice.logprobs)
        query.first_token_s = query.first_token_s or time.monotonic()
        self.counters["output_tokens"] += 1
        text, reason = query.advance_text(token, self._eos_token_ids)
        self._emit(query.tokens_event(token, text))
        if reason is not None:
            self.end(query, QueryState.FINISHED, reason)

    def replay(self, query: Query, token_ids: Sequence[int]) -> None:
        """Take over tokens emitted elsewhere; they may already complete the query."""
        for token in token_ids:
            if not self._follows_grammar(query, int(token)):
                return
            query.output_token_ids.append(int(token))
            if self._inline and query.sampling.logprobs is not None:
                query.output_logprobs.append(None)  # Inline prefill shows the newest token's logits alone.
            query.first_token_s = query.arrival_s
            _, reason = query.advance_text(int(token), self._eos_token_ids)
            if reason is not None:
                self.end(query, QueryState.FINISHED, reason)
                return

    def fail(self, query: Query, error: Exception) -> None:
        """End one query by its own fault."""
        error_id = secrets.token_hex(8)
        _log.error("query %s failed, error id %s", query.query_id, error_id, exc_info=error)
        # The tenant gets the id; what a model's code said may be about anything.
        query.error = (
            "INTERNAL",
            f"internal error {error_id}: the operator finds it in the log under this id",
        )
        self.end(query, QueryState.FAILED, FinishReason.ERROR)

    def fail_for_memory(self, query: Query) -> None:
        """End one query for which there was no memory, though all that could be spared was given back."""
        emitted = len(query.output_token_ids)
        _log.error(
            "query %s failed: no memory for its next forward, though all was given back; prompt of %d"
            " tokens, %d of output",
            query.query_id,
            len(query.prompt_token_ids),
            emitted,
        )
        self.counters["out_of_memory_failures"] += 1
        message = (
            f"out of memory after {emitted} tokens of output: shorten the prompt of"
            f" {len(query.prompt_token_ids)} tokens, or try again when the device has more memory free"
        )
        query.error = (ExhaustedError.reason, message)
        self.end(query, QueryState.FAILED, FinishReason.ERROR)

    def end(self, query: Query, state: QueryState, reason: FinishReason) -> None:
        """The only way out: every end gives back row, slices and host memory; a finished turn is kept."""
        query.transition(state)
        query.finish_reason = reason
        if state is QueryState.FINISHED:
            self._residency.keep_session(query)
        self.drop(query)
        self.counters[f"queries_{state.value}"] += 1
        if query.error is not None:
            name, message = query.error
            self._emit(
                QueryFailed(query_id=query.query_id, reason=name, message=message, usage=query.usage())
            )
        else:
            self._emit(Finished(query_id=query.query_id, finish_reason=reason, usage=query.usage()))

    def drop(self, query: Query) -> None:
        """Give back everything a query holds, and forget it."""
        self._sampler.forget(query)
        self._residency.release(query)
        self._roster.drop(query)
        del self.queries[query.query_id]

    def _follows_grammar(self, query: Query, token: int) -> bool:
        """Advance the query's grammar, if it has one; a token it does not allow ends the query."""
        if query.grammar is None or query.grammar.accept(token):
            return True
        query.error = ("GRAMMAR_DEAD_END", "no token of the vocabulary continues what the grammar began")
        self.end(query, QueryState.FAILED, FinishReason.ERROR)
        return False

    def count_prefill(self, query: Query, first: int, count: int) -> None:
        """Count `count` prompt tokens computed from index `first` on; some may be computed again."""
        again = max(0, min(first + count, query.computed_tokens) - first)
        query.recomputed_tokens += again
        self.counters["recomputed_tokens"] += again
        self.counters["prefill_tokens"] += count
        self._roster.note(query)
        self._roster.count(query, count, 0)

    def count_output(self, query: Query) -> None:
        """Count the token of output that a query is about to get in its row."""
        self._roster.count(query, 0, 1)
        query.since_admission_tokens += 1

    def count_decode(self, rows: int, *, idle: int, waiting: bool) -> None:
        """Count one decode step of `rows` rows."""
        self.counters["decode_steps"] += 1
        self.counters["row_steps"] += rows
        self.counters["idle_row_steps"] += idle
        if waiting:
            self.counters["waiting_row_steps"] += rows
            self.counters["waiting_idle_row_steps"] += idle

    def _emit(self, event: QueryEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)
