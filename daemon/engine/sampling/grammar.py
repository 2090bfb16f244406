"""Output held to a JSON schema, a regular expression or a grammar, by the `xgrammar` library.

A matcher's state belongs to its query's record, so it travels with a parked query; after a crash it is
rebuilt by accepting the tokens emitted so far. xgrammar is the optional extra `structured`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from batond.daemon.errors import InvalidRequestError
from batond.daemon.requests.structure import load_xgrammar, structure_field, structure_refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.requests.params import SamplingParams

_CACHE_BYTES: Final = 256 << 20
_COMPILE_THREADS: Final = 2


class GrammarMatcher:
    """Where one query stands in its grammar.

    Args:
        matcher: An xgrammar matcher.
    """

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    @property
    def terminated(self) -> bool:
        """Whether the output is complete and closed."""
        return bool(self.matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Take the next token; False if the grammar does not allow it."""
        return not self.terminated and bool(self.matcher.accept_token(token_id))


class Grammars:
    """Compiles grammars for one tokenizer and masks whole batches by them.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        vocab_size: Width of the logits.
        eos_token_ids: The model's; without any, and without stop ids, a query ends as soon as its grammar
            is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler: Any = None
        self._batch: Any = None

    def matcher(self, sampling: SamplingParams) -> GrammarMatcher:
        """A matcher at the start of what the parameters ask for.

        Raises:
            InvalidRequestError: xgrammar is not installed, the model has no tokenizer, or the source is no
                schema, expression or grammar that xgrammar knows.
        """
        xgrammar = self._xgrammar()
        field, compiled = self._compile(sampling)
        stops = sorted(self._eos_token_ids | set(sampling.stop_token_ids))
        try:
            return GrammarMatcher(
                xgrammar.GrammarMatcher(
                    compiled, override_stop_tokens=stops or None, terminate_without_stop_token=not stops
                )
            )
        except (RuntimeError, ValueError) as error:
            raise structure_refusal(field, error) from error

    def allowed(self, matchers: Sequence[GrammarMatcher], device: torch.device) -> torch.Tensor:
        """Which tokens may come next.

        Args:
            matchers: One per row, none of them terminated.
            device: Of the result.

        Returns:
            bool, shape [len(matchers), vocabulary].
        """
        words = -(-self._vocab_size // 32)
        mask = torch.full((len(matchers), words), -1, dtype=torch.int32)
        self._batch.batch_fill_next_token_bitmask([one.matcher for one in matchers], mask)
        bits = torch.arange(32, dtype=torch.int32, device=device)
        flags = (mask.to(device)[:, :, None] >> bits) & 1
        return flags.view(len(matchers), words * 32)[:, : self._vocab_size] != 0

    def _compile(self, sampling: SamplingParams) -> tuple[str, Any]:
        """The field that asked, and its compiled form; the compiler remembers what it has seen."""
        field = structure_field(sampling)
        compile_source = {
            "json_schema": self._compiler.compile_json_schema,
            "regex": self._compiler.compile_regex,
            "grammar": self._compiler.compile_grammar,
        }[field]
        try:
            return field, compile_source(getattr(sampling, field))
        except (RuntimeError, ValueError, TypeError) as error:
            raise structure_refusal(field, error) from error

    def _xgrammar(self) -> Any:
        """The library, with a compiler made on first use: reading a vocabulary takes a while."""
        if self._tokenizer is None:
            raise InvalidRequestError("structured output needs a tokenizer", reason="NO_TOKENIZER")
        xgrammar = load_xgrammar()
        if self._compiler is None:
            from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - heavy, and only needed here

            info = xgrammar.TokenizerInfo.from_huggingface(
                PreTrainedTokenizerFast(tokenizer_object=self._tokenizer),
                vocab_size=self._vocab_size,
                stop_token_ids=sorted(self._eos_token_ids) or None,
            )
            self._compiler = xgrammar.GrammarCompiler(
                info, max_threads=_COMPILE_THREADS, cache_limit_bytes=_CACHE_BYTES
            )
            self._batch = xgrammar.BatchGrammarMatcher()
        return xgrammar
