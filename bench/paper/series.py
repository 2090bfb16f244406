"""What a run has got done, and what it holds, over time: the curves of the figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

#: Points that a curve is thinned to: more than a figure shows.
MOST_POINTS: Final = 1000


@dataclass(slots=True)
class Series:
    """Points over time; each holds from its moment on.

    Attributes:
        seconds: Since the first submit.
        queries: Completed.
        tokens: Emitted.
    """

    seconds: list[float] = field(default_factory=lambda: [0.0])
    queries: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=lambda: [0])

    def note(self, seconds: float, queries: int, tokens: int) -> None:
        """Add a point."""
        self.seconds.append(seconds)
        self.queries.append(queries)
        self.tokens.append(tokens)

    def thinned(self, most: int = MOST_POINTS) -> Series:
        """At most so many points, evenly taken, the last among them."""
        kept = kept_points(len(self.seconds), most)
        return Series(
            [self.seconds[place] for place in kept],
            [self.queries[place] for place in kept],
            [self.tokens[place] for place in kept],
        )


def kept_points(count: int, most: int = MOST_POINTS) -> list[int]:
    """Places of at most so many of count points, evenly, first and last among them."""
    if count <= most:
        return list(range(count))
    return [place * (count - 1) // (most - 1) for place in range(most)]
