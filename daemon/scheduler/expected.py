"""How long outputs are expected to be: what memory is reserved for, instead of all that was asked for.

    prompt | expected output | first step | second step ... | max_tokens
           | <--- reserved at first ---> |
           |        reserved once the expectation is outgrown |

Most tenants ask for far more tokens than they come to need. Reserving all of them leaves memory idle;
reserving what a class usually needs fills it, and now and then somebody is parked because others grew.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Final

#: Outputs of a class before anything is expected of it.
LEAST_OUTPUTS: Final = 16
#: Latest outputs of a class that count: what tenants do changes.
WINDOW_OUTPUTS: Final = 256
#: Part of the outputs that stay within the expectation. Fewer would save memory, and park more.
QUANTILE: Final = 0.8
#: A reserve grows by so many tokens at least, and else by half of itself: whoever needs ten times what was
#: expected is given more a handful of times, not with every few tokens.
STEP_TOKENS: Final = 32


class ExpectedOutput:
    """Remembers the latest finished outputs of each class. Knows no clock.

    An output that was cut off at what was asked for counts with the tokens it has: nobody knows more of it.
    """

    def __init__(self) -> None:
        self._latest: dict[str, deque[int]] = {}
        self._sorted: dict[str, list[int]] = {}

    def note(self, sla_class: str, output_tokens: int) -> None:
        """Learn from an output that came to its end.

        Args:
            sla_class: Name of its class.
            output_tokens: Its length.
        """
        latest = self._latest.setdefault(sla_class, deque())
        lengths = self._sorted.setdefault(sla_class, [])
        latest.append(output_tokens)
        insort(lengths, output_tokens)
        if len(latest) > WINDOW_OUTPUTS:
            del lengths[bisect_left(lengths, latest.popleft())]

    def tokens(self, sla_class: str, max_tokens: int) -> int:
        """Tokens to reserve memory for.

        Args:
            sla_class: Name of the class.
            max_tokens: Most tokens that may be emitted; all of them, until enough is known of the class.
        """
        lengths = self._sorted.get(sla_class, ())
        if len(lengths) < LEAST_OUTPUTS:
            return max_tokens
        return min(lengths[math.ceil(QUANTILE * len(lengths)) - 1], max_tokens)


def raised(reserved_tokens: int, output_tokens: int, max_tokens: int) -> int:
    """The reserve of a query that may have outgrown its reserve.

    Args:
        reserved_tokens: Output tokens that memory was reserved for.
        output_tokens: Tokens emitted so far.
        max_tokens: Most tokens that may be emitted.
    """
    while reserved_tokens < output_tokens:
        reserved_tokens += max(STEP_TOKENS, reserved_tokens // 2)
    return min(reserved_tokens, max_tokens)
