"""Random schedules of submit, park, resume, cancel and step: drawn, played on an engine, compared.

A query must not notice what else happens: whatever the schedule, it must give what it gives alone on an idle
engine. `soak.py` plays many of them; the property tests draw theirs by hypothesis and share the comparison.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire.messages import CommandResult, Preempted, QueryState, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batond.daemon.engine.local import LocalEngine
    from batond.daemon.engine.queries.query import Query
    from batond.daemon.wire.messages import FinishReason, QueryEvent, TokenLogprobs

_DRAIN_STEPS = 2000  # Far more than any schedule needs: an engine that is still busy then never ends.


class Move(StrEnum):
    """What a schedule does next."""

    SUBMIT = "submit"
    STEP = "step"
    PARK = "park"
    RESUME = "resume"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a query's result depends on, and nothing else.

    Attributes:
        prompt_token_ids: The prompt.
        sampling: How tokens are chosen.
        seed: Of the noise.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int

    @property
    def key(self) -> bytes:
        """Equal for equal requests."""
        return msgspec.json.encode((self.prompt_token_ids, self.sampling, self.seed))

    def __str__(self) -> str:
        """Short enough for a report, complete enough to repeat it."""
        default = SamplingParams()
        fields = {
            name: value
            for name in SamplingParams.__struct_fields__
            if (value := getattr(self.sampling, name)) != getattr(default, name)
        }
        return f"prompt={list(self.prompt_token_ids)} seed={self.seed} sampling={fields}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request in a schedule.

    Attributes:
        request: What is wanted.
        sla_class: How urgent.
        tenant: Who pays.
        emitted_tokens: So many of its tokens were emitted elsewhere before.
    """

    request: Request
    sla_class: str = "standard"
    tenant: str = "lab"
    emitted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """What happens to an engine.

    Attributes:
        arrivals: Submitted one by one.
        moves: In order; the number says which of the queries that qualify is meant, counted round.
    """

    arrivals: tuple[Arrival, ...]
    moves: tuple[tuple[Move, int], ...]

    def __str__(self) -> str:
        """One line per arrival, one for the moves."""
        lines = [
            f"  {place}: {one.sla_class} {one.tenant} emitted={one.emitted_tokens} {one.request}"
            for place, one in enumerate(self.arrivals)
        ]
        moves = " ".join(
            move.value if move in {Move.STEP, Move.SUBMIT} else f"{move.value}:{n}" for move, n in self.moves
        )
        return "\n".join([*lines, f"  moves: {moves}"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """All of a query's result that its tenant sees.

    Attributes:
        token_ids: Its output.
        text: Its text.
        logprobs: Of its output.
        prompt_logprobs: Of its prompt.
        finish_reason: Why it ended.
        error: Reason of its failure.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs | None, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    finish_reason: FinishReason | None
    error: str | None

    @classmethod
    def of(cls, query: Query) -> Outcome:
        """The result of a query that has ended."""
        return cls(
            tuple(query.output_token_ids),
            query.output_text,
            tuple(query.output_logprobs),
            tuple(query.prompt_logprobs),
            query.finish_reason,
            None if query.error is None else query.error[0],
        )


@dataclass(slots=True)
class Stream:
    """What a query's events said, joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    parks: int = 0


class ScheduleError(AssertionError):
    """An engine's books contradict each other, or a schedule never ends."""


class Player:
    """Plays schedules on an engine that is idle, one move at a time.

    Args:
        engine: Idle; its listener is taken.

    Attributes:
        queries: Submitted so far, in order.
        streams: What their events said, by query id.
        counts: Moves that changed something.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.queries: list[Query] = []
        self.streams: dict[str, Stream] = {}
        self.counts: Counter[str] = Counter()
        self._emitted: dict[str, int] = {}
        engine.on_event = self._note

    def submit(self, arrival: Arrival, emitted_token_ids: Sequence[int] = ()) -> Query:
        """Submit the next arrival."""
        query_id = f"s{len(self.queries)}"
        self.streams[query_id] = Stream()
        self._emitted[query_id] = len(emitted_token_ids)
        query = self.engine.submit(
            arrival.request.prompt_token_ids,
            arrival.request.sampling,
            seed=arrival.request.seed,
            sla_class=arrival.sla_class,
            tenant=arrival.tenant,
            query_id=query_id,
            emitted_token_ids=emitted_token_ids,
        )
        self.queries.append(query)
        self.counts["submit"] += 1
        return query

    def apply(self, move: Move, number: int) -> None:
        """Make a move other than a submission; one that fits nobody is skipped."""
        if move is Move.STEP:
            self.step()
            return
        fitting = [query for query in self.queries if query.live and _fits(query, move)]
        if not fitting:
            return
        query = fitting[number % len(fitting)]
        if move is Move.PARK:
            self.engine.park(query)
        elif move is Move.RESUME:
            self.engine.resume(query)
        else:
            self.engine.cancel(query)
        self.counts[move.value] += 1
        self.engine.check_integrity()

    def step(self) -> None:
        """One step of the engine, books checked."""
        self.engine.step()
        self.engine.check_integrity()
        self.counts["step"] += 1

    def drain(self) -> None:
        """Resume everybody and step until all have ended.

        Raises:
            ScheduleError: That takes for ever, or host memory is left over.
        """
        for query in self.queries:
            if query.live and query.held:
                self.engine.resume(query)
        for _ in range(_DRAIN_STEPS):
            if not self.engine.queries:
                break
            self.step()
        else:
            raise ScheduleError(f"still busy after {_DRAIN_STEPS} steps: {list(self.engine.queries)}")
        self.engine.check_integrity()
        if used := self.engine.residency.store.pool.used_bytes:
            raise ScheduleError(f"{used} bytes of the host pool are left over")

    def stream_faults(self, query: Query) -> Iterator[str]:
        """Where a query's events don't add up to its result."""
        stream, emitted = self.streams[query.query_id], self._emitted[query.query_id]
        usage = query.usage()
        if stream.token_ids != query.output_token_ids[emitted:]:
            yield f"its stream brought {stream.token_ids}, its record says {query.output_token_ids[emitted:]}"
        if not query.output_text.endswith(stream.text) or (not emitted and stream.text != query.output_text):
            yield f"its stream brought {stream.text!r}, its record says {query.output_text!r}"
        if query.sampling.logprobs is not None and stream.logprobs != query.output_logprobs[emitted:]:
            yield "its stream brought other log-probabilities than its record"
        if (usage.prompt_tokens, usage.output_tokens) != (
            len(query.prompt_token_ids),
            len(query.output_token_ids),
        ):
            yield f"its usage counts {usage.prompt_tokens} + {usage.output_tokens} tokens"
        if usage.parks != stream.parks:
            yield f"its usage counts {usage.parks} parks of {stream.parks}"
        yield from self._logprob_faults(query, emitted)

    @staticmethod
    def _logprob_faults(query: Query, emitted: int) -> Iterator[str]:
        """Whether there are as many log-probabilities as tokens."""
        wanted = len(query.output_token_ids) if query.sampling.logprobs is not None else 0
        # Tokens that came along get theirs with the prompt: none if it ended before that was computed.
        unknown = emitted if len(query.output_token_ids) == emitted else 0
        if not wanted - unknown <= len(query.output_logprobs) <= wanted:
            yield f"it has {len(query.output_logprobs)} log-probabilities of {wanted} tokens"

    def _note(self, event: QueryEvent) -> None:
        if isinstance(event, CommandResult):
            return
        stream = self.streams[event.query_id]
        if isinstance(event, Tokens):
            expected = len(stream.token_ids) + self._emitted[event.query_id]
            if event.first_index != expected:
                raise ScheduleError(f"{event.query_id}: token {expected} came as {event.first_index}")
            stream.token_ids += event.token_ids
            stream.text += event.text
            stream.logprobs += event.logprobs or []
        elif isinstance(event, Preempted):
            stream.parks += 1
            self.counts["copied"] += event.parked_bytes > 0
            self.counts["dropped"] += not event.kept


def _fits(query: Query, move: Move) -> bool:
    """Whether a live query can make the move."""
    if move is Move.PARK:
        return not query.held
    return move is Move.CANCEL or (query.state is QueryState.PARKED and query.held)


def play(engine: LocalEngine, schedule: Schedule, alone: Callable[[Request], Outcome]) -> Player:
    """Play a whole schedule, until all its queries have ended.

    Args:
        engine: Idle.
        schedule: What happens.
        alone: What a request gives undisturbed; asked where a query brings tokens along.

    Raises:
        AssertionError: The engine's books contradict each other, or it never ends.
    """
    player = Player(engine)
    arrivals = iter(schedule.arrivals)
    for move, number in schedule.moves:
        if move is Move.SUBMIT:
            arrival = next(arrivals)
            emitted = arrival.emitted_tokens
            given = alone(arrival.request).token_ids[:emitted] if emitted else ()
            player.submit(arrival, given)
        else:
            player.apply(move, number)
    player.drain()
    return player
