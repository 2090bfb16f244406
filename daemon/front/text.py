"""Text to tokens, in the front. Tokens to text is the engine's, which owns stop strings.

transformers' AutoTokenizer knows how each model wants its tokenizer set up and its chat template rendered,
and reads GGUF files too. It imports torch where torch is installed: seconds and 240 MB for which the front
has no use. So it does without where it can, which is with folders; GGUF files are read with torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from batond.daemon.errors import ConfigError, InvalidRequestError
from batond.daemon.front.token_bytes import TokenBytes
from batond.daemon.weights import pretrained_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_NO_ADVICE: Final = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


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

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for: text, part of a character, a special token's name; or nothing."""


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
        self._pieces = TokenBytes(self._backend)
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

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer."""
        return self._pieces.of(token_id)

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
    try:
        tokenizer = _from_pretrained(place)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(f"can't load the tokenizer of {place}: {error}", path=place) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ConfigError(f"{place}: only fast tokenizers can be served, not {type(tokenizer).__name__}")
    return ModelTokenizer(tokenizer)


def _from_pretrained(place: Path) -> Any:
    if place.is_dir() and not {"torch", "transformers"} & sys.modules.keys():
        try:
            with _without_torch():
                return _auto(place)
        except Exception:  # noqa: BLE001 - whatever a tokenizer misses, with torch it has its second chance
            for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
                del sys.modules[name]
    return _auto(place)


def _auto(place: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and tests need none of it

    return AutoTokenizer.from_pretrained(**pretrained_source(place))


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Hide torch from what is imported meanwhile: None is Python's own word for a module not to be found."""
    cast("dict[str, Any]", sys.modules)["torch"] = None
    advice = os.environ.get(_NO_ADVICE)
    os.environ[_NO_ADVICE] = "1"  # transformers would say that it found none.
    try:
        yield
    finally:
        del sys.modules["torch"]
        del os.environ[_NO_ADVICE]
        if advice is not None:
            os.environ[_NO_ADVICE] = advice
