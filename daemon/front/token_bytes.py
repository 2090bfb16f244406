"""What a token stands for by itself, for who is told of single tokens and their log-probabilities."""

from __future__ import annotations

import json
import re
from typing import Any, Final

_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
#: Decoders treat the first token of a text in their own way: this one goes before and is taken off again.
_ANCHOR: Final = "a"


class TokenBytes:
    """Bytes by token.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._decoder = tokenizer, tokenizer.decoder
        kinds = _kinds(json.loads(self._decoder.__getstate__())) if self._decoder is not None else set()
        self._bytes = _byte_level() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        self._added: dict[int, bytes] = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; none if there is no such token."""
        if token_id in self._added:
            return self._added[token_id]
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._bytes and all(char in self._bytes for char in piece):
            return bytes(self._bytes[char] for char in piece)
        if self._falls_back and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self._decoder is None:
            return piece.encode()
        text: str = self._decoder.decode([_ANCHOR, piece])
        return text.removeprefix(_ANCHOR).encode()


def _kinds(state: Any) -> set[str]:
    """The types of a decoder and its parts."""
    return {str(state.get("type"))}.union(*(_kinds(part) for part in state.get("decoders", ())))


def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    GPT-2's own table (Radford et al. 2019, `bytes_to_unicode`): printable bytes are themselves, the others
    follow after 255 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
