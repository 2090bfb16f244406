"""What a peer is asked to do, and what it answers: both go between processes as JSON.

Imports nothing but msgspec: a peer's process may have a Python path of its own, with other packages on it.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec


class PeerError(Exception):
    """A peer can't do what it was asked to; the message says why."""


class PeerMissingError(PeerError):
    """A peer can't be measured here at all: not installed, or not without a card."""


class Work(msgspec.Struct, frozen=True):
    """One request of a workload; its token ids follow from the task's seed.

    Attributes:
        prompt_tokens: Of its prompt.
        output_tokens: That it must emit, whatever they are.
    """

    prompt_tokens: int
    output_tokens: int


class Urgency(msgspec.Struct, frozen=True, kw_only=True):
    """Urgent requests under a full batch.

    Attributes:
        rows: Requests that run at most, and less urgent ones that fill them.
        fill_prompt_tokens: Of each of these.
        fill_output_tokens: That each of these emits.
        prompt_tokens: Of an urgent request.
        output_tokens: That it emits.
        count: Urgent requests, spread over the time in which the others run.
    """

    rows: int = 32
    fill_prompt_tokens: int = 256
    fill_output_tokens: int = 1500
    prompt_tokens: int = 512
    output_tokens: int = 8
    count: int = 20

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request."""
        return max(self.fill_prompt_tokens + self.fill_output_tokens, self.prompt_tokens + self.output_tokens)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one peer is to do.

    Attributes:
        peer: Name of it.
        model: The model's configuration, as its `config.json` has it; weights are random.
        dtype: Of weights and KV, such as "bfloat16".
        device: "cuda", "cuda:1", ... or "cpu".
        threads: Of torch on the CPU; 0 leaves them.
        rows: Requests that may run at once, one measurement of the workload for each.
        work: The workload, all there from the start; none leaves this out.
        urgency: None leaves that out.
        repeats: How often the workload is run for each of `rows`.
        memory_share: Part of the card that weights and KV may take.
        host_bytes: Host memory for KV that has lost its place, where the peer has such a thing.
        options: Of the peer itself, over those that its adapter chooses.
        seed: Of weights and token ids.
    """

    peer: str
    model: dict[str, Any]
    dtype: str
    device: str
    rows: tuple[int, ...]
    work: tuple[Work, ...] = ()
    urgency: Urgency | None = None
    threads: int = 0
    repeats: int = 1
    memory_share: float = 0.9
    host_bytes: int = 1 << 30
    options: dict[str, Any] = {}
    seed: int = 0

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self.model["vocab_size"])

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request."""
        work = (one.prompt_tokens + one.output_tokens for one in self.work)
        return max(*work, 2, self.urgency.longest_tokens if self.urgency is not None else 2)

    @property
    def most_rows(self) -> int:
        """Requests that run at once at most, in any of its measurements."""
        return max(*self.rows, 1, self.urgency.rows if self.urgency is not None else 1)

    def dice(self) -> random.Random:
        """Gives what token ids are drawn with: the same ones in the same order in each peer."""
        return random.Random(self.seed)  # noqa: S311 - repeatable prompts, no secret


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The peer stands.

    Attributes:
        about: Versions and how it was set up, for people.
        seconds: From the start of its process until then.
    """

    about: dict[str, str]
    seconds: float


class Saturated(msgspec.Struct, frozen=True, tag="saturated", kw_only=True):
    """The workload once, all of it there from the start.

    Attributes:
        rows: Requests that ran at once at most.
        seconds: From the first submit to the last token.
        requests: Of the workload.
        prompt_tokens: Of all prompts.
        output_tokens: Emitted.
    """

    rows: int
    seconds: float
    requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def output_rate(self) -> float:
        """Tokens emitted a second."""
        return self.output_tokens / self.seconds


class Urgent(msgspec.Struct, frozen=True, tag="urgent", kw_only=True):
    """Urgent requests on the idle peer and under a full batch. Times of each request, milliseconds.

    Attributes:
        idle_ms: To the first token, nobody else there.
        full_ms: To the first token, all rows taken.
        answer_ms: To the last token, all rows taken.
        alone_s: The less urgent requests without urgent ones, from the first submit to the last token.
        mixed_s: The same with them.
        fill_tokens: Emitted by the less urgent ones.
        urgent_tokens: Emitted by the urgent ones.
    """

    idle_ms: list[float]
    full_ms: list[float]
    answer_ms: list[float]
    alone_s: float
    mixed_s: float
    fill_tokens: int
    urgent_tokens: int

    @property
    def alone_rate(self) -> float:
        """Tokens a second without urgent work."""
        return self.fill_tokens / self.alone_s

    @property
    def mixed_rate(self) -> float:
        """Tokens a second with it, its own included."""
        return (self.fill_tokens + self.urgent_tokens) / self.mixed_s


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """The peer can't be measured here.

    Attributes:
        why: For people.
    """

    why: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A measurement came to nothing.

    Attributes:
        what: Which.
        why: For people.
    """

    what: str
    why: str


Answer = Ready | Saturated | Urgent | Missing | Failed
