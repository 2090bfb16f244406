"""Steps that wait for Redis, several as one: whoever is behind writes less, and so catches up.

Of each job the parts are joined into one commit and one event. Watchers must not see a chunk end where Redis
has none: a client that comes back to it would get text twice. So events are joined as commits are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from batond.daemon.front.steps import JobStep
from batond.daemon.queue import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batond.daemon.queue import StepCommit

#: Fields of a commit, and what in them says nothing.
_NOTHING: Final = (
    *((field, -1) for field in ("prompt_tokens", "preemptions", "recomputed_tokens", "cached_prompt_tokens")),
    *((field, "") for field in ("finish_reason", "error_reason", "error_message")),
)
#: Tokens of one choice in one commit, at most.
MOST_TOKENS: Final = 512


class Merger:
    """Joins the steps that are added, job by job.

    Args:
        steps: The first step's: one a job.
    """

    def __init__(self, steps: Sequence[JobStep]) -> None:
        self._by_job = {_name(step): step for step in steps}
        self._twice = list(steps) if len(self._by_job) < len(steps) else None  # Left as it is.

    @property
    def steps(self) -> list[JobStep]:
        """One a job, in the order in which the jobs came."""
        return self._twice or list(self._by_job.values())

    def add(self, steps: Sequence[JobStep]) -> bool:
        """Take in the next step, or change nothing: returns whether all of it could be joined."""
        joined = {_name(step): _join(self._by_job.get(_name(step)), step) for step in steps}
        whole = {key: step for key, step in joined.items() if step is not None}
        if self._twice or len(whole) < len(steps):
            return False
        self._by_job |= whole
        return True


def _name(step: JobStep) -> tuple[str, str]:
    return step.commit.tenant, step.commit.job_id


def _join(first: JobStep | None, second: JobStep) -> JobStep | None:
    """Both steps of one job as one; None if they can't be."""
    if first is None:
        return second
    if first.held is not second.held:
        return None  # Two claims of one job: Redis answers for each by itself.
    # What happened to its row stands between the tokens, and must go on standing there.
    if first.usage is not None or not all(isinstance(event, Chunk) for event in second.events):
        return None
    chunks = {chunk.choice: chunk for chunk in first.commit.chunks}
    events = list(first.events)
    for chunk in second.commit.chunks:
        before = chunks.get(chunk.choice)
        if before is None:
            chunks[chunk.choice] = chunk
            events.append(chunk)
        elif _fits(before, chunk):
            chunks[chunk.choice] = events[_place(events, before)] = _joined(before, chunk)
        else:
            return None
    commit = _commit(first.commit, second.commit, tuple(chunks.values()))
    return JobStep(second.held, commit, events, second.usage)


def _place(events: Iterable[object], chunk: Chunk) -> int:
    return next(place for place, event in enumerate(events) if event is chunk)


def _fits(before: Chunk, chunk: Chunk) -> bool:
    return (
        bool(before.token_ids and chunk.token_ids)  # Text alone is told once an index.
        and not before.finish_reason
        and chunk.first_index == before.first_index + len(before.token_ids)
        and (before.logprobs is None) == (chunk.logprobs is None)
        and chunk.prompt_logprobs is None
        and len(before.token_ids) + len(chunk.token_ids) <= MOST_TOKENS
    )


def _joined(before: Chunk, chunk: Chunk) -> Chunk:
    return msgspec.structs.replace(
        before,
        token_ids=[*before.token_ids, *chunk.token_ids],
        text=before.text + chunk.text,
        logprobs=None if before.logprobs is None else [*before.logprobs, *(chunk.logprobs or ())],
        finish_reason=chunk.finish_reason,
    )


def _commit(first: StepCommit, second: StepCommit, chunks: tuple[Chunk, ...]) -> StepCommit:
    """The second, with what only the first says."""
    changes: dict[str, object] = {"chunks": chunks}
    if second.state is None:
        changes["state"] = first.state
    for field, nothing in _NOTHING:
        if getattr(second, field) == nothing:
            changes[field] = getattr(first, field)
    return msgspec.structs.replace(second, **changes)
