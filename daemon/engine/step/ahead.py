"""Begins a step before the books of the last one are done, so that the card never waits for them.

    card     | step t          | step t+1        | step t+2
    host      plan  ...waits...|t's tokens, books, plan  ...waits...|t+1's tokens, ...

The next step takes its tokens from the card, where the last one left them. It is prepared while the last one
runs, and launched as soon as that one's tokens are seen, before anything else is done with them; not earlier,
because by then it is known whether a row ends, and whether somebody has come who should not wait for it. What
needs the host between logits and token (biases, penalties, grammars, log-probabilities) is never begun ahead.

Until its tokens are taken in, nobody gets a row; plans wait that long. Rows may leave at any time: what the
step computes for them is nobody's. So the tokens are those of the loop that does one step after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.engine.model.shortage import SHORTAGE_TYPES, is_shortage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from batond.daemon.engine.queries.query import Query
    from batond.daemon.engine.queries.residency import Residency
    from batond.daemon.engine.queries.roster import Roster


class Ahead:
    """Decides who goes on without the host, and remembers who did.

    Args:
        residency: Whose batch.
        roster: Knows whether anybody waits for a row.
        eos_token_ids: Ids that end a generation.
    """

    def __init__(self, residency: Residency, roster: Roster, eos_token_ids: frozenset[int]) -> None:
        self._residency, self._roster, self._eos_token_ids = residency, roster, eos_token_ids
        self._rows: list[tuple[int, Query]] = []
        self._stops: set[int] = set()

    @property
    def begun(self) -> bool:
        """Whether a step is under way that is not in the books yet."""
        return self._residency.batch.ahead

    def prepare(self, rows: Sequence[tuple[int, Query]]) -> bool:
        """Have the next step ready behind the one that runs, if nobody needs the host in between.

        Args:
            rows: Of the one that runs: all that are occupied, and all take what is known of it on the device.

        Returns:
            Whether it is ready.
        """
        if any(query.replay_left for _, query in rows):
            return False
        going_on = [(row, query) for row, query in rows if not _takes_last(query)]
        if len(going_on) < len(rows) and self._roster.line.has_claims:
            return False  # A row comes free, and somebody wants it.
        try:
            ready = self._residency.batch.prepare_ahead([row for row, _ in going_on])
        except SHORTAGE_TYPES as error:
            if not is_shortage(error):
                raise
            return False  # The step that can't do without says so.
        self._rows, self._stops = going_on, self._stops_of(going_on)
        return ready

    def begin(self, token_ids: Sequence[int]) -> None:
        """Launch what was prepared, unless a row ends now, or there is no memory for it.

        Args:
            token_ids: What the step that it follows gave, by row.
        """
        if not self._stops.isdisjoint([token_ids[row] for row, _ in self._rows]):
            return
        try:
            self._residency.batch.begin_ahead()
        except SHORTAGE_TYPES as error:  # The step that can't do without says so, and gets memory.
            if not is_shortage(error):
                raise

    def take(self) -> tuple[list[tuple[int, Query]], torch.Tensor]:
        """Take the step begun ahead into the batch's books.

        Returns:
            Its rows that are still there, and its logits.
        """
        logits = self._residency.batch.take_ahead()
        by_row = self._residency.by_row
        rows, self._rows = self._rows, []
        return [(row, query) for row, query in rows if by_row[row] is query], logits

    def _stops_of(self, rows: Sequence[tuple[int, Query]]) -> set[int]:
        """Ids that end one of them. Which is known only with the text: a stop string costs a row's step."""
        stops: set[int] = set()
        for _, query in rows:
            stops.update(query.sampling.stop_token_ids)
        if not all(query.sampling.ignore_eos for _, query in rows):
            stops |= self._eos_token_ids
        return stops


def _takes_last(query: Query) -> bool:
    """Whether the token that is being computed is the last it may emit."""
    return len(query.output_token_ids) + 1 >= query.sampling.max_tokens
