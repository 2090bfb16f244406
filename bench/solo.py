"""The undisturbed run of a request, and how a disturbed one is compared with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from batond.bench.schedules import Outcome, Request
from batond.daemon.wire.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batond.bench.schedules import Player
    from batond.daemon.engine.local import LocalEngine
    from batond.daemon.wire.messages import TokenLogprobs

LOGPROB_TOLERANCE = 1e-4
TIE_LOGITS = 2e-5  # Rounding moves logits by less; two tokens nearer than this may change places.


class SoloRuns:
    """What requests give alone on an idle engine; each is run once.

    Args:
        engine: Serves nobody else.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self._known: dict[bytes, Outcome] = {}

    def outcome(self, request: Request) -> Outcome:
        """The request's result, undisturbed."""
        known = self._known.get(request.key)
        if known is None:
            known = self._known[request.key] = self._run(request)
        return known

    def is_tie(self, request: Request, place: int, found: int) -> bool:
        """Whether rounding can turn the token at a place into another one.

        Two tokens whose logits all but agree may change places with the shape of a forward. Shown by the
        request itself, with its logits moved by less than rounding moves them.
        """
        expected = self.outcome(request).token_ids
        biases = dict(request.sampling.logit_bias)
        for token, change in ((found, TIE_LOGITS), (expected[place], -TIE_LOGITS)):
            biases[token] = biases.get(token, 0.0) + change
        sampling = msgspec.structs.replace(request.sampling, logit_bias=biases)
        moved = self._run(Request(request.prompt_token_ids, sampling, request.seed)).token_ids
        return moved[: place + 1] == (*expected[:place], found)

    def _run(self, request: Request) -> Outcome:
        query = self.engine.submit(request.prompt_token_ids, request.sampling, seed=request.seed)
        self.engine.run_until_idle()
        return Outcome.of(query)


@dataclass(slots=True)
class Verdict:
    """What came of comparing a query with its solo run.

    Attributes:
        faults: Differences, in words.
        ties: Tokens that rounding may choose otherwise.
    """

    faults: list[str] = field(default_factory=list)
    ties: int = 0


def compare(player: Player, place: int, request: Request, solo: SoloRuns, *, exact: bool = False) -> Verdict:
    """Compare a query that has ended with the request's solo run.

    Args:
        player: Played the query.
        place: Of the query in the schedule.
        request: What was asked.
        solo: Undisturbed runs.
        exact: No bit may differ; otherwise what rounding explains is forgiven.
    """
    query = player.queries[place]
    found, expected = Outcome.of(query), solo.outcome(request)
    verdict = Verdict(list(player.stream_faults(query)))
    count = _common_tokens(found.token_ids, expected.token_ids)
    if (
        not exact
        and count < min(len(found.token_ids), len(expected.token_ids))
        and solo.is_tie(request, count, found.token_ids[count])
    ):
        verdict.ties = 1
        return verdict
    verdict.faults += _token_faults(found, expected)
    most = 0.0 if exact else LOGPROB_TOLERANCE
    verdict.faults += _logprob_faults("output", found.logprobs, expected.logprobs, most)
    verdict.faults += _logprob_faults("prompt", found.prompt_logprobs, expected.prompt_logprobs, most)
    return verdict


def _common_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right))
    )


def _token_faults(found: Outcome, expected: Outcome) -> Iterator[str]:
    """A cancelled query must have given the beginning of its solo run, every other one the whole."""
    if found.finish_reason is FinishReason.CANCELLED:
        if found.token_ids != expected.token_ids[: len(found.token_ids)]:
            yield f"cancelled at {list(found.token_ids)}, alone {list(expected.token_ids)}"
        if not expected.text.startswith(found.text):
            yield f"cancelled at text {found.text!r}, alone {expected.text!r}"
        return
    for name in ("token_ids", "text", "finish_reason", "error"):
        here, alone = getattr(found, name), getattr(expected, name)
        if here != alone:
            yield f"{name} {here!r}, alone {alone!r}"


def _logprob_faults(
    name: str, found: Sequence[TokenLogprobs | None], expected: Sequence[TokenLogprobs | None], most: float
) -> Iterator[str]:
    """Log-probabilities of as many places as both have: how many there must be follows from the tokens."""
    for place, (here, alone) in enumerate(zip(found, expected, strict=False)):
        if (here is None) != (alone is None):
            yield f"{name} log-probability {place} is {here}, alone {alone}"
        if here is None or alone is None:
            continue
        pairs = [(here.logprob, alone.logprob)]
        # The likeliest tokens by rank: two that all but agree may change places.
        pairs += [(one, other) for (_, one), (_, other) in zip(here.top, alone.top, strict=True)]
        worst = max(abs(one - other) for one, other in pairs)
        if not worst <= most:
            yield f"{name} log-probability {place} differs by {worst:.1e}: {here}, alone {alone}"
