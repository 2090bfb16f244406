"""Whether a request can be served at all: checked once, when it is submitted."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from batond.daemon.engine.queries.sessions import SessionKey, check_session_id
from batond.daemon.errors import InvalidRequestError, RequestTooLargeError
from batond.daemon.requests.params import MAX_PROMPT_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.engine.sampling.sampler import Sampler
    from batond.daemon.requests.params import SamplingParams


class Admission:
    """Refuses what this engine can never serve.

    Args:
        sampler: Checks what it is asked to sample.
        vocab_size: Token ids lie below.
        max_query_tokens: Most prompt + output tokens.
        has_tokenizer: Whether there is text to look for stop strings in.
        inline: Whether prompts are computed inside the batch step.
        limit_reason: Why that is the most, to be said after it; empty where it is the model's or was set.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        vocab_size: int,
        max_query_tokens: int,
        has_tokenizer: bool,
        inline: bool,
        limit_reason: str = "",
    ) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._max_query_tokens = max_query_tokens
        self._has_tokenizer = has_tokenizer
        self._inline = inline
        self._limit_reason = limit_reason

    def check(self, token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        """Return the prompt as a list, if prompt and parameters can be served.

        Raises:
            InvalidRequestError: Empty prompt, unknown token id, or parameters that this engine can't follow.
            RequestTooLargeError: Prompt + max_tokens, or the log-probabilities asked for, are too many.
        """
        try:
            prompt = [operator.index(token) for token in token_ids]  # Not 5.7, not "567".
        except (TypeError, RuntimeError) as error:
            raise InvalidRequestError("the prompt must be a list of token ids", field="prompt") from error
        if not prompt:
            raise InvalidRequestError("the prompt is empty: give at least one token", field="prompt")
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise InvalidRequestError(
                f"token ids must be from 0 to {self._vocab_size - 1}",
                field="prompt",
                limit=self._vocab_size,
            )
        total = len(prompt) + sampling.max_tokens
        if total > self._max_query_tokens:
            raise RequestTooLargeError(
                f"prompt of {len(prompt)} + max_tokens {sampling.max_tokens} = {total} tokens; the limit is"
                f" {self._max_query_tokens}{self._limit_reason}",
                limit=self._max_query_tokens,
                prompt_tokens=len(prompt),
                max_tokens=sampling.max_tokens,
            )
        self._sampler.check(sampling)
        self._check_prompt_logprobs(sampling, len(prompt))
        if sampling.stop and not self._has_tokenizer:
            raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids", field="stop")
        return prompt

    @staticmethod
    def check_session(tenant: str, session_id: str | None, sampling: SamplingParams) -> SessionKey | None:
        """Return the session a turn belongs to, if it names one.

        Raises:
            InvalidRequestError: The id can't name a session, or log-probabilities of the prompt are wanted,
                of which those of reused tokens would be missing.
        """
        if session_id is None:
            return None
        if sampling.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs needs the whole prompt computed: ask for it without session_id",
                field="prompt_logprobs",
            )
        return SessionKey(tenant, check_session_id(session_id))

    def _check_prompt_logprobs(self, sampling: SamplingParams, prompt_tokens: int) -> None:
        if sampling.prompt_logprobs is None:
            return
        if self._inline:
            raise InvalidRequestError(
                "prompt_logprobs needs decoupled prefill; this engine runs inline", field="prompt_logprobs"
            )
        values = prompt_tokens * (1 + sampling.prompt_logprobs)
        if values > MAX_PROMPT_LOGPROBS:
            raise RequestTooLargeError(
                f"prompt_logprobs would report {values} numbers; the limit is {MAX_PROMPT_LOGPROBS}",
                field="prompt_logprobs",
                limit=MAX_PROMPT_LOGPROBS,
            )
