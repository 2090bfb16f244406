"""Does the decode step of the batch: one more token for every occupied row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from batond.daemon.engine.model.shortage import SHORTAGE_TYPES, is_shortage
from batond.daemon.engine.sampling.sampler import Choice
from batond.daemon.engine.step.relief import NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from batond.daemon.engine.queries.lifecycle import Lifecycle
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.sampling.sampler import Sampler
    from batond.daemon.engine.step.ahead import Ahead
    from batond.daemon.engine.step.choosing import Choosing
    from batond.daemon.engine.step.relief import Relief


class Computed(NamedTuple):
    """A forward of the batch.

    Attributes:
        rows: Rows it computed, and their owners.
        cached: Tokens of every row before it.
        new_tokens: Tokens it computed, by row.
        logits: float32, shape [rows, vocabulary].
    """

    rows: list[tuple[int, Query]]
    cached: list[int]
    new_tokens: dict[int, int]
    logits: torch.Tensor


class Decode:
    """Runs the batch one step and gives each row's query what came out.

    A row either decodes, and its query gets a new token, or replays: its query emitted tokens before, whose
    KV must be computed one by one, as it was the first time.

    Args:
        residency: Whose batch.
        sampler: Knows which rows want nothing but the likeliest token.
        choosing: Chooses the tokens.
        life: Is told what was computed, and takes the tokens.
        relief: Gives memory back where a forward finds none.
        ahead: Begins steps before the books of the last one are done.
    """

    def __init__(
        self,
        residency: Residency,
        sampler: Sampler,
        choosing: Choosing,
        life: Lifecycle,
        relief: Relief,
        *,
        ahead: Ahead,
    ) -> None:
        self._residency, self._sampler, self._choosing = residency, sampler, choosing
        self._life, self._relief, self._ahead = life, relief, ahead

    def run(self, go_on: Callable[[], bool] | None = None) -> bool:
        """One step; False if every row is idle.

        Args:
            go_on: Asked when its tokens are there, whether the next step may be begun at once; None is no.
        """
        if not self._residency.occupied:
            return False
        computed = self._taken() if self._ahead.begun else self._compute()
        if computed is None:
            return True
        token_ids = self._token_ids(computed, go_on)
        for row, query in computed.rows:
            if not computed.cached[row]:  # Inline: this step prefilled the newcomer (vector shaping).
                self._life.count_prefill(query, 0, computed.new_tokens[row])
        batch = self._residency.batch
        busy = len(computed.rows)
        self._life.count_decode(batch.rows, idle=batch.rows - busy, waiting=len(self._life.queries) > busy)
        decoding = [(row, query) for row, query in computed.rows if not query.replay_left]
        for row, query in computed.rows:
            if query.replay_left:
                self._note_replayed(query, computed.cached[row], computed.logits[row])
        if decoding:
            self._append(decoding, computed.logits, token_ids)
        return True

    def _taken(self) -> Computed:
        """The step begun before this one."""
        cached = list(self._residency.batch.lengths)
        rows, logits = self._ahead.take()
        return Computed(rows, cached, {row: 1 for row, _ in rows}, logits)

    def _token_ids(self, computed: Computed, go_on: Callable[[], bool] | None) -> Sequence[int] | None:
        """Token ids by row where nothing but logits decides them; begins the next step. None elsewhere."""
        decoding = [(row, query) for row, query in computed.rows if not query.replay_left]
        queries, batch = [query for _, query in decoding], self._residency.batch
        if not decoding or not self._sampler.takes_raw(queries):
            return None
        if not self._sampler.takes_likeliest(queries):
            on_card = go_on is not None and batch.goes_ahead and len(decoding) == len(computed.rows)
            if not on_card or not self._draw(decoding, computed.logits):
                return None
        ready = go_on is not None and self._ahead.prepare(computed.rows)
        token_ids = batch.likeliest()  # Waits for the step.
        if ready and token_ids is not None and go_on is not None and go_on():
            self._ahead.begin(token_ids)
        return token_ids

    def _draw(self, decoding: Sequence[tuple[int, Query]], logits: torch.Tensor) -> bool:
        """Draw tokens that the next step takes on the device; False without memory for it."""
        try:
            drawn = self._sampler.draw(logits, [row for row, _ in decoding], [query for _, query in decoding])
        except SHORTAGE_TYPES as error:
            if not is_shortage(error):
                raise
            return False  # Choosing them gives memory back.
        self._residency.batch.give(drawn)
        return True

    def _compute(self) -> Computed | None:
        """The forward, with as many rows as there is memory for; None if there is none for a single one."""
        try:
            return self._relief.survive(self._forward, victims=self._relief.all_but_one)
        except NoMemoryError:
            self._relief.give_up(self._residency.occupied[0][1])  # It is alone.
        except _RowsLostError as lost:
            said = str(lost)
            self._drop_rows(said)
        return None

    def _forward(self) -> Computed:
        """Can be repeated after a shortage, with fewer rows."""
        batch, occupied = self._residency.batch, self._residency.occupied
        cached = list(batch.lengths)
        inputs = {row: query.uncached_token_ids(cached[row]) for row, query in occupied}
        try:
            logits = batch.step(inputs)
        except SHORTAGE_TYPES as error:
            if is_shortage(error) and not batch.intact:
                raise _RowsLostError(str(error)) from None
            raise
        return Computed(occupied, cached, {row: len(new) for row, new in inputs.items()}, logits)

    def _drop_rows(self, said: str) -> None:
        """The rows are lost with the forward: all are computed again, fewer at once."""
        self._relief.note(said)
        queries = [query for _, query in self._residency.occupied]
        self._relief.drop_rows()
        if len(queries) == 1:
            self._relief.give_up(queries[0])

    def _note_replayed(self, query: Query, index: int, logits: torch.Tensor) -> None:
        """The KV of a token emitted before exists again; what follows it is known."""
        if query.lacks_given_logprobs and not self._choosing.record_given(query, index, logits[None]):
            return
        query.replay_left -= 1
        query.since_admission_tokens += (
            1  # Counts for the quantum: an urgent query doesn't wait for a replay.
        )
        self._life.count_prefill(query, index, 1)

    def _append(
        self, decoding: list[tuple[int, Query]], logits: torch.Tensor, token_ids: Sequence[int] | None
    ) -> None:
        """Give every decoding row its token: of those by row, where they are known, or all chosen at once."""
        queries = [query for _, query in decoding]
        if token_ids is not None:
            chosen = [(query, Choice(token_ids[row])) for row, query in decoding]
        else:
            chosen = self._choosing.choose(logits, [row for row, _ in decoding], queries)
        self._relief.culprits.succeeded([query.query_id for query, _ in chosen])
        for query, choice in chosen:
            self._life.count_output(query)
            self._life.append(query, choice)


class _RowsLostError(Exception):
    """A forward has failed for want of memory, and its rows can't be gone on from."""
