"""What a batch computes for a workload, step by step, without computing it: prompts, and stretches of steps.

    rows   0  [ cached | added ]   cached: its own tokens
           1  [ cached         ]   added:  columns that newcomers' prompts left in it (vector shaping)
           2  idle

Between two events, somebody coming or ending, every occupied row grows by a token a step: a stretch is known
from its first step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batond.bench.mixes.modes import Mode
    from batond.bench.workloads import Request


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's forward.

    Attributes:
        tokens: Of the prompt.
        rows: Rows of that forward, those that are padding included.
    """

    tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Decode steps with the same rows occupied.

    Attributes:
        steps: How many.
        occupied: Rows that get a token in each.
        top_rows: Rows up to the last occupied one, which are computed.
        columns: Columns of all rows that the first step reads, its own included.
        longest: The same of the row that has most.
    """

    steps: int
    occupied: int
    top_rows: int
    columns: int
    longest: int

    @property
    def all_columns(self) -> int:
        """Columns that all steps read."""
        return self.steps * self.columns + self.occupied * self._growth

    @property
    def all_longest(self) -> int:
        """The same of the row that has most."""
        return self.steps * self.longest + self._growth

    @property
    def _growth(self) -> int:
        return self.steps * (self.steps - 1) // 2


@dataclass(slots=True)
class _Row:
    cached: int
    left: int
    added: int = 0


def play(
    requests: Sequence[Request], rows: int, mode: Mode, *, reads_added: bool = True
) -> Iterator[Prompt | Stretch]:
    """What a mode computes, in order.

    Args:
        requests: All there from the start; in the order in which they get rows.
        rows: Rows of the batch.
        mode: How it is batched.
        reads_added: Steps read the columns that prompts left in running rows.
    """
    waiting = deque(requests)
    batch: list[_Row | None] = [None] * rows
    while waiting or any(batch):
        running = [row for row in batch if row is not None]
        if not (mode.whole_batches and running):
            leaves = mode.leaves_columns and reads_added
            yield from _admit(waiting, batch, running, shaped=mode.shaped, leaves=leaves)
        occupied = [row for row in batch if row is not None]
        if not occupied:
            continue
        steps = min(row.left for row in occupied)
        columns = [row.cached + row.added + 1 for row in occupied]
        top_rows = max(place for place, row in enumerate(batch) if row is not None) + 1
        yield Stretch(steps, len(occupied), top_rows, sum(columns), max(columns))
        for row in occupied:
            row.cached, row.left = row.cached + steps, row.left - steps
        batch = [row if row is not None and row.left else None for row in batch]


def _admit(
    waiting: deque[Request],
    batch: list[_Row | None],
    running: Sequence[_Row],
    *,
    shaped: bool,
    leaves: bool,
) -> Iterator[Prompt]:
    """Fill the free rows, lowest first; a prompt's last forward gives the first token."""
    for place in range(len(batch)):
        while batch[place] is None and waiting:
            request = waiting.popleft()
            tokens = len(request.prompt_token_ids)
            yield Prompt(tokens, len(running) + 1 if shaped else 1)
            if request.output_tokens > 1:
                batch[place] = _Row(tokens, request.output_tokens - 1)
            if leaves:
                for row in running:
                    row.added += tokens


def most_columns(requests: Sequence[Request], rows: int, mode: Mode, *, reads_added: bool = True) -> int:
    """Columns that one row holds at most."""
    played = play(requests, rows, mode, reads_added=reads_added)
    return max((one.longest + one.steps for one in played if isinstance(one, Stretch)), default=0)
