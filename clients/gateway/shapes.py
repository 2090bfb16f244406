"""Answers as OpenAI's API shapes them: whole ones, and the pieces of a stream as ready bytes. Pure.

A piece is made once a token and stream, so what stays the same over a stream is encoded once.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any, Final

from batond.clients.model import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from batond.clients.gateway.asked import Asked
    from batond.clients.gateway.tokens import TokenTexts
    from batond.clients.model import Choice, JobInfo, TokenLogprobs

DONE: Final = b"data: [DONE]\n\n"
KEEPALIVE: Final = b": waiting\n\n"
_REASONS: Final = {FinishReason.LENGTH: "length", FinishReason.STOP: "stop"}


def event(value: object) -> bytes:
    """A value as a server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def reason_of(reason: FinishReason) -> str:
    """Why a generation ended, in OpenAI's words."""
    return _REASONS.get(reason, "stop")


def usage_of(jobs: Iterable[JobInfo]) -> dict[str, Any]:
    """The tokens of some jobs. A prompt counts once, however many choices it had."""
    prompt = output = cached = 0
    for job in jobs:
        prompt, output = prompt + job.prompt_tokens, output + job.output_tokens
        cached += job.cached_prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Shape:
    """The form of one answer.

    Args:
        asked: What was asked for.
        name: The answer's id.
        created_s: Unix time.
        texts: What tokens stand for.
    """

    def __init__(self, asked: Asked, name: str, created_s: int, texts: TokenTexts) -> None:
        self._asked, self._texts = asked, texts
        self._kind = "chat.completion" if asked.chat else "text_completion"
        self._fixed: dict[str, Any] = {
            "id": name,
            "object": self._kind,
            "created": created_s,
            "model": asked.model,
            "system_fingerprint": None,
        }
        # How far into its text each choice is: plain completions tell it of each token.
        self._offsets: dict[int, int] = {}

    def set_tier(self, tier: str | None) -> None:
        """Note the tier that serves it; plain completions have no field for it."""
        if self._asked.chat:
            self._fixed["service_tier"] = tier

    # -- whole ----------------------------------------------------------------------------------------------

    def whole(self, jobs: Sequence[JobInfo]) -> dict[str, Any]:
        """The answer of all jobs, one a prompt."""
        choices = [
            self._choice(place * self._asked.n + number, one, job)
            for place, job in enumerate(jobs)
            for number, one in enumerate(outputs_of(job))
        ]
        return {**self._fixed, "choices": choices, "usage": usage_of(jobs)}

    def _choice(self, index: int, output: Choice | JobInfo, job: JobInfo) -> dict[str, Any]:
        place = index // self._asked.n
        reason = reason_of(output.finish_reason)
        if self._asked.chat:
            logprobs = self._chat_logprobs(output.logprobs) if self._asked.logprobs else None
            message = {"role": "assistant", "content": output.text, "refusal": None}
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        told: Sequence[TokenLogprobs] = (*job.prompt_logprobs, *output.logprobs)
        return {
            "index": index,
            "text": self.prompt_text(place) + output.text,
            "logprobs": self._plain_logprobs(index, told) if self._asked.logprobs else None,
            "finish_reason": reason,
        }

    def prompt_text(self, place: int) -> str:
        """The prompt as an answer repeats it; empty if it doesn't."""
        if not self._asked.echo:
            return ""
        prompt = self._asked.prompts[place]
        return prompt if isinstance(prompt, str) else self._texts.joined(prompt or ())

    # -- pieces ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Encode what all pieces share; the tier is known by now."""
        shared = dict(self._fixed)
        if self._asked.chat:
            shared["object"] = "chat.completion.chunk"
        self._shared = shared
        head = json.dumps(shared, separators=(",", ":"))[:-1]
        before = ',"delta":{"content":' if self._asked.chat else ',"text":'
        after = "}" if self._asked.chat else ""
        end = '}],"usage":null}\n\n' if self._asked.include_usage else "}]}\n\n"
        self._head = f'data: {head},"choices":[{{"index":'
        self._before, self._after = before, f'{after},"logprobs":'
        self._tail = f',"finish_reason":null{end}'

    def first(self, index: int) -> bytes:
        """What begins a choice: who speaks, or the prompt that is repeated; empty if there is nothing."""
        if self._asked.chat:
            delta = {"role": "assistant", "content": "", "refusal": None}
            return self._piece({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        return b""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        """Some tokens of a choice."""
        told = "null"
        if self._asked.logprobs:
            shown = (
                self._chat_logprobs(logprobs) if self._asked.chat else self._plain_logprobs(index, logprobs)
            )
            told = json.dumps(shown, separators=(",", ":"))
        return f"{self._head}{index}{self._before}{quoted(text)}{self._after}{told}{self._tail}".encode()

    def last(self, index: int, reason: FinishReason) -> bytes:
        """The end of a choice."""
        piece: dict[str, Any] = (
            {"index": index, "delta": {}} if self._asked.chat else {"index": index, "text": ""}
        )
        return self._piece({**piece, "logprobs": None, "finish_reason": reason_of(reason)})

    def usage(self, jobs: Sequence[JobInfo]) -> bytes:
        """The last piece but one, if it was asked for."""
        return event({**self._shared, "choices": [], "usage": usage_of(jobs)})

    def _piece(self, choice: Mapping[str, Any]) -> bytes:
        rest = {"usage": None} if self._asked.include_usage else {}
        return event({**self._shared, "choices": [choice], **rest})

    # -- log-probabilities ----------------------------------------------------------------------------------

    def _chat_logprobs(self, logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
        content = [
            {
                **self._told(one.token_id, one.logprob),
                "top_logprobs": [self._told(top.token_id, top.logprob) for top in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _told(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self._texts.raw(token_id)
        return {
            "token": self._texts.shown(token_id),
            "bytes": None if raw is None else list(raw),
            "logprob": logprob,
        }

    def _plain_logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens = [self._texts.shown(one.token_id) for one in logprobs]
        offsets, at = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._offsets[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [self._tops(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _tops(self, one: TokenLogprobs) -> dict[str, float] | None:
        if one.logprob is None:
            return None
        # The token itself comes last: it belongs there, likely or not, and may be one of the likeliest.
        return {self._texts.shown(top.token_id): top.logprob for top in one.top} | {
            self._texts.shown(one.token_id): one.logprob
        }


def outputs_of(job: JobInfo) -> Sequence[Choice | JobInfo]:
    """What a job of one or several choices brought; the job itself is its only choice."""
    return job.choices or (job,)
