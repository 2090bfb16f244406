"""What a token stands for by itself, for each kind of vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from batond.daemon.front.token_bytes import TokenBytes


def tokenizer(pieces: list[str], decoder: Any) -> Tokenizer:
    made = Tokenizer(models.WordLevel({piece: at for at, piece in enumerate(pieces)}, unk_token=pieces[0]))
    made.decoder = decoder
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize(
    ("pieces", "decoder", "expected"),
    [
        # Ġ is byte 32, ð Ł are the first two bytes of an emoji.
        (["Ġthe", "ðŁ", "ĺĢ", "é"], decoders.ByteLevel(), [b" the", b"\xf0\x9f", b"\x98\x80", b"\xe9"]),
        (["▁the", "<0xF0>", "x", "é"], LLAMA, [b" the", b"\xf0", b"x", "é".encode()]),
        (["▁the", "the"], decoders.Metaspace(), [b" the", b"the"]),
        (["the", "##re"], decoders.WordPiece(), [b" the", b"re"]),
        (["the", "é"], None, [b"the", "é".encode()]),
    ],
)
def test_each_token_by_itself(pieces: list[str], decoder: Any, expected: list[bytes]) -> None:
    found = TokenBytes(tokenizer(pieces, decoder))
    assert [found.of(at) for at in range(len(pieces))] == expected
    assert found.of(len(pieces)) == b"<|end|>"
    assert found.of(len(pieces) + 1) == b""


def test_the_bytes_of_all_tokens_are_the_text() -> None:
    """Q7: parts of characters are never shown as something else."""
    made = Tokenizer.from_str(tokenizer(["ðŁ", "ĺĢ", "Ġgo"], decoders.ByteLevel()).to_str())
    found = TokenBytes(made)
    assert b"".join(found.of(at) for at in range(3)).decode() == made.decode([0, 1, 2]) == "😀 go"
