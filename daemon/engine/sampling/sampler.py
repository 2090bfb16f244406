"""From a step's logits to every row's token: the whole sampling contract, on the tensors of the batch.

What a query needs between steps is in its record (token lists, log-probabilities, grammar state). The sampler
only keeps what can be rebuilt from it; parked and ended queries are forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from batond.daemon.engine.sampling.filters import Draw, sample, sample_on_device
from batond.daemon.engine.sampling.grammar import Grammars
from batond.daemon.engine.sampling.logprobs import token_logprobs
from batond.daemon.engine.sampling.penalties import History, TokenCounts, penalize
from batond.daemon.engine.sampling.tensors import on_device
from batond.daemon.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.sampling.grammar import GrammarMatcher
    from batond.daemon.requests.params import SamplingParams
    from batond.daemon.wire.messages import TokenLogprobs


class Sampled(Protocol):
    """What sampling knows of a query, and what it notes there; see `queries.query.Query`."""

    query_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    output_logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[TokenLogprobs | None]
    grammar: GrammarMatcher | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One row's next token.

    Attributes:
        token_id: The token.
        logprobs: Its log-probabilities, if the query wants them.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class _Offsets:
    """What is added to a query's logits in every step: token ids int64 [count], values float32 [count]."""

    ids: torch.Tensor
    values: torch.Tensor


class Sampler:
    """Chooses tokens.

    Args:
        model: Gives width and place of the logits, and the ids that end a generation.
        tokenizer: A `tokenizers.Tokenizer`; None allows no structured output.
    """

    def __init__(self, model: CausalModel, tokenizer: Any) -> None:
        self._vocab_size = model.vocab_size
        self._device = model.device
        self._eos_token_ids = model.eos_token_ids
        self._counts = TokenCounts(model.vocab_size, model.device)
        self._grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids)
        self._biases: dict[str, _Offsets] = {}
        self._bans: dict[str, _Offsets] = {}

    def check(self, sampling: SamplingParams) -> None:
        """Refuse what a single query of this model can't have.

        Raises:
            InvalidRequestError: n is not 1, or a biased id is not in the vocabulary.
        """
        if sampling.n != 1:
            raise InvalidRequestError(
                f"a query is one generation: submit {sampling.n} queries, see `split_sequences`", field="n"
            )
        if sampling.logit_bias and max(sampling.logit_bias) >= self._vocab_size:
            raise InvalidRequestError(
                f"token ids of logit_bias must be below {self._vocab_size}",
                field="logit_bias",
                limit=self._vocab_size,
            )

    def prepare(self, query: Sampled) -> None:
        """Give a new query its grammar's state and the empty first place of its prompt's log-probabilities.

        Raises:
            InvalidRequestError: The grammar can't be compiled, or structured output is not available.
        """
        if query.sampling.prompt_logprobs is not None:
            query.prompt_logprobs.append(None)  # Nothing stands before the first token.
        if query.sampling.structured:
            query.grammar = self._grammars.matcher(query.sampling)

    def forget(self, query: Sampled) -> None:
        """Drop what is kept for a query; it is rebuilt when the query comes back."""
        self._counts.forget(query.query_id)
        self._biases.pop(query.query_id, None)
        self._bans.pop(query.query_id, None)

    @staticmethod
    def takes_likeliest(queries: Sequence[Sampled]) -> bool:
        """Whether all want the tokens of their greatest raw logits, and nothing else."""
        return Sampler.takes_raw(queries) and all(query.sampling.temperature <= 0.0 for query in queries)

    @staticmethod
    def takes_raw(queries: Sequence[Sampled]) -> bool:
        """Whether all want tokens of their raw logits, by noise or without, and nothing else.

        Then what a row gets depends on no token that the host has not seen yet, but through the logits.
        """
        return all(
            query.sampling.logprobs is None
            and not query.sampling.logit_bias
            and not query.sampling.penalized
            and query.grammar is None
            and len(query.output_token_ids) >= query.sampling.min_tokens
            for query in queries
        )

    @staticmethod
    def draw(logits: torch.Tensor, rows: Sequence[int], queries: Sequence[Sampled]) -> torch.Tensor:
        """The next tokens of queries that take them from raw logits, without waiting for the device.

        Args:
            logits: Raw float32 logits, shape [rows, vocabulary].
            rows: Of the logits, one by query.
            queries: Each once; see `takes_raw`.

        Returns:
            int64, shape of the logits without the vocabulary; rows of nobody have the likeliest.
        """
        tokens = logits.argmax(dim=-1)
        index = on_device(rows, torch.int64, logits.device)
        draws = [Draw(query.sampling, query.seed, len(query.output_token_ids)) for query in queries]
        tokens[index] = sample_on_device(logits[index], draws)
        return tokens

    def choose(self, logits: torch.Tensor, queries: Sequence[Sampled]) -> list[Choice]:
        """The next token of every row.

        Args:
            logits: Raw float32 logits, shape [len(queries), vocabulary]; left as they are.
            queries: One per row, each once.
        """
        edited = self._masked(self._penalized(self._biased(logits, queries), queries), logits, queries)
        draws = [Draw(query.sampling, query.seed, len(query.output_token_ids)) for query in queries]
        tokens = sample(edited, draws)
        wanted = [row for row, query in enumerate(queries) if query.sampling.logprobs is not None]
        found: dict[int, TokenLogprobs] = {}
        if wanted:
            tops = [queries[row].sampling.logprobs or 0 for row in wanted]
            reported = token_logprobs(logits[wanted], [tokens[row] for row in wanted], tops)
            found = dict(zip(wanted, reported, strict=True))
        return [Choice(token, found.get(row)) for row, token in enumerate(tokens)]

    def record_given(self, query: Sampled, first: int, logits: torch.Tensor) -> None:
        """Note the log-probabilities of tokens that were given: the prompt's, and those of replayed output.

        What is noted already stays: a park that dropped KV computes its tokens a second time.

        Args:
            query: Whose tokens.
            first: Index (prompt and output counted together) of the first token the logits stand behind.
            logits: Raw, shape [tokens, vocabulary].
        """
        tokens = query.prompt_token_ids + query.output_token_ids
        prompt_tokens = len(query.prompt_token_ids)
        places = range(first + 1, min(first + len(logits) + 1, len(tokens)))
        kinds = (
            (query.sampling.prompt_logprobs, query.prompt_logprobs, 0),
            (query.sampling.logprobs, query.output_logprobs, prompt_tokens),
        )
        for top, noted, offset in kinds:
            end = prompt_tokens if not offset else len(tokens)
            new = [p for p in places if top is not None and offset + len(noted) <= p < end]
            if new and top is not None:
                rows = logits[new[0] - first - 1 : new[-1] - first]
                noted.extend(token_logprobs(rows, [tokens[p] for p in new], [top] * len(new)))

    def _biased(self, logits: torch.Tensor, queries: Sequence[Sampled]) -> torch.Tensor:
        """Biases added, and ids that may not end the generation yet set to minus infinity."""
        offsets: list[_Offsets] = []
        rows: list[int] = []
        for row, query in enumerate(queries):
            for one in self._offsets(query):
                offsets.append(one)
                rows.append(row)
        if not offsets:
            return logits
        counts = on_device([len(one.ids) for one in offsets], torch.int64, self._device)
        ids = torch.cat([one.ids for one in offsets])
        at_rows = on_device(rows, torch.int64, self._device).repeat_interleave(counts, output_size=len(ids))
        values = torch.cat([one.values for one in offsets])
        return logits.index_put((at_rows, ids), values, accumulate=True)

    def _offsets(self, query: Sampled) -> list[_Offsets]:
        """The query's biases and bans as tensors, made once while it stays in the batch."""
        sampling, key = query.sampling, query.query_id
        found: list[_Offsets] = []
        if sampling.logit_bias:
            if key not in self._biases:
                self._biases[key] = self._new_offsets(
                    list(sampling.logit_bias), list(sampling.logit_bias.values())
                )
            found.append(self._biases[key])
        if len(query.output_token_ids) < sampling.min_tokens:
            if key not in self._bans:
                banned = set(sampling.stop_token_ids) | (
                    set() if sampling.ignore_eos else self._eos_token_ids
                )
                ids = [token for token in banned if token < self._vocab_size]
                self._bans[key] = self._new_offsets(ids, [-torch.inf] * len(ids))
            found.append(self._bans[key])
        return found

    def _new_offsets(self, ids: list[int], values: list[float]) -> _Offsets:
        return _Offsets(
            on_device(ids, torch.int64, self._device),
            on_device(values, torch.float32, self._device),
        )

    def _penalized(self, logits: torch.Tensor, queries: Sequence[Sampled]) -> torch.Tensor:
        rows = [row for row, query in enumerate(queries) if query.sampling.penalized]
        if not rows:
            return logits
        mine = [queries[row] for row in rows]
        counts = self._counts.rows(
            [History(query.query_id, query.prompt_token_ids, query.output_token_ids) for query in mine]
        )
        index = on_device(rows, torch.int64, self._device)
        new = penalize(logits[index], counts, [query.sampling for query in mine])
        return logits.index_put((index,), new)

    def _masked(self, logits: torch.Tensor, raw: torch.Tensor, queries: Sequence[Sampled]) -> torch.Tensor:
        """Tokens that a grammar does not allow set to minus infinity."""
        rows = [row for row, query in enumerate(queries) if query.grammar is not None]
        if not rows:
            return logits
        matchers = [query.grammar for query in queries if query.grammar is not None]
        allowed = self._grammars.allowed(matchers, self._device)
        index = on_device(rows, torch.int64, self._device)
        new = logits[index].masked_fill(~allowed, -torch.inf)
        # A complete grammar allows nothing but the ids that min_tokens bans: the grammar wins.
        stuck = torch.isneginf(new).all(dim=-1, keepdim=True)
        new = torch.where(stuck & allowed, raw[index], new)
        return logits.index_put((index,), new)
