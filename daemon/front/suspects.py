"""Who may be in the engine after one died, so that the job that killed it is found. Decides, does nothing.

A death says that one of the jobs the engine had begun on may have done it, not which: all of them are
suspects, and nobody is charged. Suspects then get *turns*: one of them has the engine to itself until it has
proven itself with some tokens, or has ended. A death in such a turn convicts, for nobody else can have done
it: nothing of others is computed meanwhile, because a mate would blur the evidence and become a suspect by
being there.

Between two such turns everybody who is not a suspect has the engine for a while, if somebody of them is more
urgent than the next suspect, or has waited for long. So urgent work waits for one proof at most, and each
suspect's turn comes. Where nobody is suspected, all this is an empty dictionary.

A proof has an end, so a killer that strikes late passes it and kills again among others; each death it was in
doubles what it has to prove, until it strikes alone. See docs/adr/0006.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Tokens (of each choice) after which a suspect is believed, after its first death.
PROOF_TOKENS: Final = 16
#: The longest proof: what urgent work may have to wait for, with one prefill.
MOST_PROOF_TOKENS: Final = 1024
#: How long the others have the engine between the turns of two suspects.
OPEN_TURN_S: Final = 5.0
#: The others get a turn after so long, though they are no more urgent: those who have proven themselves, too.
PATIENCE_S: Final = 30.0
#: Leases of a job that ran out among others before it is tried alone: daemons are killed for many reasons.
LAPSES_TO_SUSPECT: Final = 3


@dataclass(slots=True)
class _Suspect:
    urgency: int
    deaths: int
    left_tokens: int


class Suspects:
    """Names jobs by their references.

    Attributes:
        alone: Who has the engine alone in this turn; empty is nobody.
    """

    def __init__(self) -> None:
        self.alone = ""
        self._suspects: dict[str, _Suspect] = {}  # In the order in which they became it.
        self._deaths: dict[str, int] = {}  # Engines that died with it, of jobs that are held.
        self._opened_s: float | None = None  # When the others' turn began, if it is theirs.
        self._shut_s: float | None = None  # Since when they have had none.

    def __len__(self) -> int:
        """Suspects that have not proven themselves."""
        return len(self._suspects)

    def __contains__(self, ref: str) -> bool:
        """Whether a job is a suspect now."""
        return ref in self._suspects

    def admits(self, ref: str) -> bool:
        """Whether a job may be in the engine in this turn."""
        return ref == self.alone if self.alone else ref not in self._suspects

    def accuse(self, ref: str, urgency: int, *, choices: int = 1, deaths: int = 1) -> None:
        """Suspect a job, for so many more deaths.

        Args:
            ref: Which.
            urgency: Of its class; smaller is more urgent.
            choices: Generations that have to prove themselves.
            deaths: What it was in, besides those known here.
        """
        known = self._deaths[ref] = self._deaths.get(ref, 0) + deaths
        tokens = min(PROOF_TOKENS << min(known - 1, 16), MOST_PROOF_TOKENS)
        self._suspects.pop(ref, None)
        self._suspects[ref] = _Suspect(urgency, known, tokens * max(1, choices))

    def engine_died(self, begun: Mapping[str, tuple[int, int]]) -> str:
        """The engine died.

        Args:
            begun: The jobs that it may have computed: reference -> urgency, open choices.

        Returns:
            Who did it, if that is known; else all of `begun` are suspects.
        """
        alone, self.alone, self._opened_s = self.alone, "", None
        if len(begun) == 1 and self._deaths.get(only := next(iter(begun))):
            alone = only  # By chance, but it was, and not for the first time.
        if alone in begun and len(begun) == 1:
            self.forget(alone)
            return alone
        for ref, (urgency, choices) in begun.items():
            self.accuse(ref, urgency, choices=choices)
        return ""

    def heard(self, ref: str, tokens: int) -> bool:
        """A job has put out tokens; returns whether it is believed from now on."""
        suspect = self._suspects.get(ref)
        if suspect is None or ref != self.alone:
            return False
        suspect.left_tokens -= tokens
        if suspect.left_tokens > 0:
            return False
        del self._suspects[ref]  # Its deaths stay: if it strikes again, it has to prove more.
        return True

    def forget(self, ref: str) -> None:
        """A job has ended, or is not ours any more."""
        self._suspects.pop(ref, None)
        self._deaths.pop(ref, None)

    def settle(self, now_s: float, others: int | None) -> None:
        """Decide whose turn it is.

        Args:
            now_s: Monotonic.
            others: Urgency of the most urgent job that is held and not suspected; None if there is none.
        """
        if self.alone in self._suspects:
            return
        first = min(self._suspects, key=self._order, default="")
        if not first or others is None:
            self.alone, self._opened_s, self._shut_s = first, None, None
        elif self._opened_s is None:
            patient = self._shut_s is None or now_s - self._shut_s < PATIENCE_S
            if patient and others >= self._suspects[first].urgency:
                self.alone, self._shut_s = first, now_s if self._shut_s is None else self._shut_s
            else:
                self.alone, self._opened_s, self._shut_s = "", now_s, None
        elif now_s - self._opened_s >= OPEN_TURN_S:
            self.alone, self._opened_s, self._shut_s = first, None, now_s

    def settle_in_s(self, now_s: float) -> float | None:
        """When to settle again although nothing has happened; None is never."""
        if not self._suspects or self._opened_s is None:
            return None
        return max(0.0, self._opened_s + OPEN_TURN_S - now_s)

    def _order(self, ref: str) -> tuple[int, int]:
        """The most urgent first, of those the least suspicious; `min` keeps the order of arrival."""
        suspect = self._suspects[ref]
        return suspect.urgency, suspect.deaths
