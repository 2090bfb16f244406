"""Puts a peer through the measurements: a workload at saturation, and urgent requests under a full batch."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from batond.bench.peers.task import PeerError, Saturated, Urgent, Work

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from batond.bench.peers.session import Session
    from batond.bench.peers.task import Task, Urgency

#: Urgent requests on the idle peer: before any is timed, and timed.
WARM_UPS: Final = 2
IDLE_ROUNDS: Final = 10
#: Tokens of each request of a warm-up.
_WARM_TOKENS: Final = 4
#: Polls whose median is the time between two tokens.
_RECENT_POLLS: Final = 32


@dataclass(slots=True)
class Times:
    """When one request's tokens came, by `time.perf_counter`.

    Attributes:
        due_s: When it arrived.
        left_tokens: Still to come.
        first_s: Of the first.
        last_s: Of the last.
    """

    due_s: float
    left_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True)
class Driver:
    """Submits and listens.

    Attributes:
        session: Of the peer.
        dice: Draws token ids.
        vocab_size: Below it.
        requests: By key, those that have ended included.
        emitted: Tokens by all of them.
    """

    session: Session
    dice: Random
    vocab_size: int
    requests: dict[str, Times] = field(default_factory=dict)
    emitted: int = 0
    _live: set[str] = field(default_factory=set)
    _polls_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_POLLS))

    def prompt(self, tokens: int) -> list[int]:
        """Random token ids."""
        return [self.dice.randrange(self.vocab_size) for _ in range(tokens)]

    def submit(
        self, key: str, prompt: Sequence[int], output_tokens: int, *, due_s: float, urgent: bool = False
    ) -> None:
        """Submit a request that arrived at `due_s`."""
        self.requests[key] = Times(due_s, output_tokens)
        self._live.add(key)
        self.session.submit(key, prompt, output_tokens, urgent=urgent)

    def poll(self, until_s: float | None = None) -> None:
        """Get on once.

        Raises:
            PeerError: A request emits more tokens than it was asked for.
        """
        began_s = time.perf_counter()
        came = self.session.poll(until_s)
        now_s = time.perf_counter()
        if came:
            self._polls_s.append(now_s - began_s)
        for key, token_ids in came:
            one = self.requests[key]
            if not token_ids:
                continue
            if len(token_ids) > one.left_tokens:
                raise PeerError(f"request {key} emitted {len(token_ids) - one.left_tokens} tokens too many")
            one.first_s = one.first_s or now_s
            one.left_tokens -= len(token_ids)
            self.emitted += len(token_ids)
            if not one.left_tokens:
                one.last_s = now_s
                self._live.discard(key)

    def finish(self) -> None:
        """Go on until nothing is left."""
        while self._live:
            self.poll()

    @property
    def live(self) -> int:
        """Requests that have tokens to come."""
        return len(self._live)

    @property
    def token_gap_s(self) -> float:
        """Time between two tokens of a request lately."""
        return statistics.median(self._polls_s) if self._polls_s else 0.0


def saturate(session: Session, task: Task, rows: int) -> Iterator[Saturated]:
    """Run the workload, all of it submitted at once, as often as the task says."""
    driver = Driver(session, task.dice(), task.vocab_size)
    _warm_up(driver, task.work, rows)
    prompts = [driver.prompt(one.prompt_tokens) for one in task.work]
    for repeat in range(task.repeats):
        before = driver.emitted
        began_s = time.perf_counter()
        for number, (work, prompt) in enumerate(zip(task.work, prompts, strict=True)):
            driver.submit(f"r{repeat}n{number}", prompt, work.output_tokens, due_s=began_s)
        driver.finish()
        yield Saturated(
            rows=rows,
            seconds=time.perf_counter() - began_s,
            requests=len(task.work),
            prompt_tokens=sum(one.prompt_tokens for one in task.work),
            output_tokens=driver.emitted - before,
        )


def measure_urgent(session: Session, task: Task, urgency: Urgency) -> Urgent:
    """Time urgent requests on the idle peer, then under a full batch, and what they cost that batch.

    One arrives each time the less urgent requests have emitted the next (count + 1)th part of their tokens,
    and a random part of the time between two tokens later: in the middle of whatever goes on. A peer that is
    stepped sees it when its step has ended, and the request's time runs from its arrival.
    """
    driver = Driver(session, task.dice(), task.vocab_size)
    _warm_up(driver, [Work(urgency.fill_prompt_tokens, urgency.fill_output_tokens)], urgency.rows)
    idle = [
        _answer(driver, f"idle{number}", urgency)
        for number in range(WARM_UPS + min(urgency.count, IDLE_ROUNDS))
    ][WARM_UPS:]
    alone_s, fill_tokens = _fill(driver, urgency, "alone", 0)
    mixed_s, all_tokens = _fill(driver, urgency, "mixed", urgency.count)
    urgent = [driver.requests[f"urgent{number}"] for number in range(urgency.count)]
    return Urgent(
        idle_ms=[1e3 * one for one in idle],
        full_ms=[1e3 * (one.first_s - one.due_s) for one in urgent],
        answer_ms=[1e3 * (one.last_s - one.due_s) for one in urgent],
        alone_s=alone_s,
        mixed_s=mixed_s,
        fill_tokens=fill_tokens,
        urgent_tokens=all_tokens - fill_tokens,
    )


def _warm_up(driver: Driver, work: Sequence[Work], rows: int) -> None:
    """Fill all rows for a few tokens: kernels, graphs and pools are there then."""
    for number in range(rows):
        one = work[number % len(work)]
        tokens = min(one.output_tokens, _WARM_TOKENS)
        driver.submit(f"warm{number}", driver.prompt(one.prompt_tokens), tokens, due_s=0.0)
    driver.finish()


def _answer(driver: Driver, key: str, urgency: Urgency) -> float:
    """Seconds to the first token of an urgent request that is alone."""
    prompt = driver.prompt(urgency.prompt_tokens)
    due_s = time.perf_counter()
    driver.submit(key, prompt, urgency.output_tokens, due_s=due_s, urgent=True)
    driver.finish()
    return driver.requests[key].first_s - due_s


def _fill(driver: Driver, urgency: Urgency, name: str, urgents: int) -> tuple[float, int]:
    """Run the less urgent requests with so many urgent ones; gives seconds, and tokens of all."""
    fill_prompts = [driver.prompt(urgency.fill_prompt_tokens) for _ in range(urgency.rows)]
    urgent_prompts = [driver.prompt(urgency.prompt_tokens) for _ in range(urgents)]
    before, began_s = driver.emitted, time.perf_counter()
    for number, prompt in enumerate(fill_prompts):
        driver.submit(f"{name}{number}", prompt, urgency.fill_output_tokens, due_s=began_s)
    part = urgency.rows * urgency.fill_output_tokens / (urgents + 1)
    for number, prompt in enumerate(urgent_prompts):
        # Tokens of urgent requests that came before count too; there are few of them.
        while driver.live and driver.emitted - before < part * (number + 1):
            driver.poll()
        due_s = time.perf_counter() + driver.dice.random() * driver.token_gap_s
        while (now_s := time.perf_counter()) < due_s:
            if driver.live:
                driver.poll(due_s)
            else:
                time.sleep(due_s - now_s)
        key = f"urgent{number}"
        driver.submit(key, prompt, urgency.output_tokens, due_s=due_s, urgent=True)
    driver.finish()
    return time.perf_counter() - began_s, driver.emitted - before
