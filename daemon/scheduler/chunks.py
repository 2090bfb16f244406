"""How many prompt tokens a step may compute: as many as leave running queries their pace.

    | <--- inter-token target of the most urgent class that has a row ---> |
    | decode step | prompt tokens computed before it             | spare   |

Large chunks compute prompts faster, since each forward reads all weights and each step is paid by all rows;
small ones keep the time between two tokens of everybody short. What a step and a prompt token take is learned
from the steps themselves, so the same rule fits any model and machine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batond.policies.classes import SlaClass

#: Below, a forward over so few tokens costs nearly what twice as many do.
LEAST_TOKENS: Final = 64
#: Beyond, a step gains little, a more urgent arrival waits for its end, and the scores of eager attention,
#: which grow with the square, would take gigabytes.
MOST_TOKENS: Final = 2048
#: Until the first prompt was timed.
FIRST_TOKENS: Final = 256
#: Of the target; the rest is for what varies.
USED_SHARE: Final = 0.9
#: What a new step counts for beside all that were before.
NEW_SHARE: Final = 0.2


class ChunkBudget:
    """Learns what steps take, and says how many prompt tokens the next may compute. Knows no clock."""

    def __init__(self) -> None:
        self._decode_s = 0.0
        self._prompts_s = 0.0
        self._prompt_tokens = 0.0

    def note(self, step_s: float, prompt_tokens: int) -> None:
        """Take account of a step that decoded, and parked or resumed nobody.

        Args:
            step_s: What it took.
            prompt_tokens: Computed in it; 0 tells what a decode step alone takes.
        """
        if not prompt_tokens:
            new = NEW_SHARE if self._decode_s else 1.0
            self._decode_s += new * (step_s - self._decode_s)
            return
        if step_s < self._decode_s:
            # No decode step takes longer than a whole one. What was slow, as first steps are, must not count
            # until there is a step without prompts: that may take long. If all is wrong, half is a guess.
            self._decode_s = step_s if 2 * step_s > self._decode_s else step_s / 2
        # Sums, so that a prompt of a few tokens doesn't tell what a token costs.
        self._prompts_s += max(step_s - self._decode_s, 0.0) - NEW_SHARE * self._prompts_s
        self._prompt_tokens += prompt_tokens - NEW_SHARE * self._prompt_tokens

    def tokens(self, running: Iterable[SlaClass]) -> int:
        """Prompt tokens of the next step.

        Args:
            running: Classes of the queries that have a row.
        """
        first = min(running, key=lambda sla: (sla.order, sla.tpot_target_s), default=None)
        target_s = math.inf if first is None else first.tpot_target_s
        if math.isinf(target_s):
            return MOST_TOKENS
        if not self._prompts_s:
            return FIRST_TOKENS
        room_s = USED_SHARE * target_s - self._decode_s
        wanted = room_s * self._prompt_tokens / max(self._prompts_s, 1e-9)
        return int(min(max(wanted, LEAST_TOKENS), MOST_TOKENS))
