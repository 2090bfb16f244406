"""Text to tokens, in the front. Tokens to text is the engine's, which owns stop strings.

transformers' AutoTokenizer knows how each model wants its tokenizer set up and its chat template rendered,
and reads GGUF files too. It imports torch where torch is installed, which costs the front memory but no work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from batond.daemon.errors import ConfigError, InvalidRequestError
from batond.daemon.weights import pretrained_source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Tokenizer(Protocol):
    """What the front needs. Called from several threads at once."""

    @property
    def longest_token_chars(self) -> int:
        """Characters of the vocabulary's longest token: a longer text than so many a token never fits."""

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with whatever the model's tokenizer puts around one by default."""

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of a conversation of (role, content), ready for the assistant's answer.

        Raises:
            InvalidRequestError: The model has no chat template, or its template refuses this conversation.
        """


class ModelTokenizer:
    """A model's own tokenizer.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Encoding changes the Python wrapper's state ("Already borrowed"), but not the Rust object's.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._longest_token_chars = max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @property
    def longest_token_chars(self) -> int:
        """See Tokenizer."""
        return self._longest_token_chars

    def encode_text(self, text: str) -> list[int]:
        """See Tokenizer."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """See Tokenizer."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "this model has no chat template: send the prompt as text or tokens",
                reason="NO_CHAT_TEMPLATE",
                field="spec.chat",
            )
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # A template is a program of the model's; whatever it raises, it refuses.
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {error}",
                reason="CHAT_REFUSED",
                field="spec.chat.messages",
            ) from error
        return self._encode(rendered, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Of the library's calls only the batched ones let other threads run while they work.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def load_tokenizer(place: Path) -> ModelTokenizer:
    """Load the tokenizer that lies beside, or in, a model's weights. Takes seconds.

    Raises:
        ConfigError: There is none, or none of the fast kind.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and tests need none of it

    try:
        tokenizer = AutoTokenizer.from_pretrained(**pretrained_source(place))
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(f"can't load the tokenizer of {place}: {error}", path=place) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ConfigError(f"{place}: only fast tokenizers can be served, not {type(tokenizer).__name__}")
    return ModelTokenizer(tokenizer)
