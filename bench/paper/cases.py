"""The columns of the published tables: a workload and a batch size each, published lengths or shorter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from batond.bench import workloads
from batond.bench.mixes.modes import MODES
from batond.bench.paper.published import PUBLISHED, Published

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.bench.mixes.modes import Mode
    from batond.bench.workloads import Request

#: The methods of the paper, as modes of the mixes' engine, by the names that the paper gives them.
METHODS: Final = {
    "run_to_completion": "run to completion",
    "pd": "P&D separation",
    "inline": "Baton (inline)",
    "decoupled": "Baton-PD (decoupled)",
}
PAPER_MODES: Final[tuple[Mode, ...]] = tuple(mode for mode in MODES if mode.name in METHODS)
#: Numbers of the tables.
MIXES: Final = 1
SHORT: Final = 2
#: Queries of a mix come by the shares of its kinds: long-short, short-long, short-short twice.
_SHARE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One column of a table.

    Attributes:
        table: 1 is the mixes, 2 the short queries.
        rows: Batch size.
        queries: Of the workload.
        scale: Published lengths are so many times those of the workload.
        shorter: All lengths are divided by this.
        seed: Of lengths, order and token ids.
        columns: Of a short and of a middle row, at the published lengths, where steps are timed.
    """

    table: int
    rows: int
    queries: int
    scale: int = 1
    shorter: int = 1
    seed: int = 0
    columns: tuple[int, int] = (64, 260)

    @property
    def name(self) -> str:
        """For files."""
        return f"table{self.table}-batch{self.rows}"

    @property
    def title(self) -> str:
        """For people."""
        lengths = "" if self.scale == 1 else ", doubled lengths"
        lengths += "" if self.shorter == 1 else f", lengths / {self.shorter}"
        return f"Table {self.table}, batch {self.rows}{lengths}"

    @property
    def published(self) -> Published:
        """What is known of the paper's figures; nothing for batch sizes that it has not."""
        return PUBLISHED.get((self.table, self.rows), Published())

    def requests(self, vocab_size: int, *, queries: int | None = None) -> list[Request]:
        """The workload, or one of fewer queries with the same shares of each kind.

        Args:
            vocab_size: Token ids are drawn below it.
            queries: None is all.
        """
        count = self.queries if queries is None else queries
        if self.table == MIXES:
            whole = workloads.mix(vocab_size, queries=count, scale=self.scale, seed=self.seed)
        else:
            whole = workloads.short(vocab_size, queries=self.queries, seed=self.seed)[:count]
        return [
            replace(
                one,
                prompt_token_ids=one.prompt_token_ids[:: self.shorter],
                output_tokens=math.ceil(one.output_tokens / self.shorter),
            )
            for one in whole
        ]

    @property
    def share(self) -> int:
        """By how many queries a workload may be made smaller."""
        return _SHARE if self.table == MIXES else 1

    @property
    def step_columns(self) -> tuple[int, int]:
        """Columns of a short and of a middle row, where steps are timed."""
        short, middle = self.columns
        return short // self.shorter + 1, self.scale * middle // self.shorter + 1

    def at_published_lengths(self) -> Case:
        """The same with nothing shortened."""
        return replace(self, shorter=1)


def cases(
    tables: Sequence[int],
    batches: Sequence[int] | None = None,
    *,
    queries: int = 120,
    mix_shorter: int = 1,
    short_shorter: int = 1,
    mix_seed: int = 0,
    short_seed: int = 0,
) -> list[Case]:
    """The columns of the tables.

    Args:
        tables: Of 1 and 2.
        batches: Of these batch sizes alone; None is as published.
        queries: Of Table 1; Table 2 has 30.
        mix_shorter: Divides all lengths of Table 1.
        short_shorter: Divides all lengths of Table 2.
        mix_seed: Of Table 1.
        short_seed: Of Table 2.
    """
    found = []
    if MIXES in tables:
        found += [
            Case(
                table=MIXES,
                rows=rows,
                queries=queries,
                scale=scale,
                shorter=mix_shorter,
                seed=mix_seed,
                columns=(64, 2048),
            )
            for rows, scale in ((4, 2), (8, 1))
        ]
    if SHORT in tables:
        published = [rows for table, rows in PUBLISHED if table == SHORT]
        found += [
            Case(table=SHORT, rows=rows, queries=30, shorter=short_shorter, seed=short_seed)
            for rows in published
        ]
    return [case for case in found if batches is None or case.rows in batches]
