"""Incremental text: never cut inside a character, nothing of a stop string, nothing else lost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from batond.daemon.engine.sampling.text import StopFilter, TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXTS = [
    "plain words",
    "four bytes 😀😃 and more",
    "combining e\u0301 a\u0308",
    "family 👨‍👩‍👧‍👦 joined",
    "日本語のテキスト",
    "trailing \n\n  spaces  ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_equals_full_decode(byte_tokenizer: Tokenizer, text: str) -> None:
    """Q7: one token per byte is the worst case; the pieces joined are the full decode."""
    ids = byte_tokenizer.encode(text).ids
    stream = TextStream(byte_tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text == byte_tokenizer.decode(ids)


def test_cut_character_comes_out_as_the_full_decode_shows_it(byte_tokenizer: Tokenizer) -> None:
    """Q7: a generation that ends inside a character."""
    ids = byte_tokenizer.encode("ab😀").ids[:-1]
    stream = TextStream(byte_tokenizer)
    text = "".join(stream.push(token) for token in ids) + stream.flush()
    assert text == byte_tokenizer.decode(ids)
    assert text.startswith("ab")


def split_everywhere(text: str, stop: list[str], cut: int) -> tuple[str, bool]:
    stream = StopFilter(stop)
    out = stream.push(text[:cut]) + stream.push(text[cut:])
    return out + stream.flush(), stream.stopped


@pytest.mark.parametrize("size", range(1, 21))
def test_stop_string_split_at_every_place(size: int) -> None:
    """Q6: stop strings of 1-20 characters, split at each place."""
    stop = "abcdefghijklmnopqrst"[:size]
    for cut in range(len(stop) + 6):
        assert split_everywhere(f"xyz{stop}zyx", [stop], cut) == ("xyz", True)


def test_nothing_is_held_back_for_long_or_lost() -> None:
    """Q6: text that only begins like a stop string comes out whole, at once where it can't match any more."""
    stream = StopFilter(["###"])
    assert stream.push("a#") == "a"
    assert stream.push("#") == ""
    assert stream.push("b") == "##b"
    assert stream.push("##") == ""
    assert stream.flush() == "##"
    assert not stream.stopped


def test_the_stop_string_complete_first_wins() -> None:
    assert split_everywhere("one END two STOP", ["STOP", "END"], 3) == ("one ", True)
    assert split_everywhere("xabcd", ["abcd", "bc"], 2) == ("xa", True)


def test_flush_takes_the_same_path(byte_tokenizer: Tokenizer) -> None:
    """Q6: bytes that only the flush turns into text may complete a stop string."""
    ids = byte_tokenizer.encode("ab😀").ids[:-1]
    stream = TextStream(byte_tokenizer, stop=["\ufffd"])
    text = "".join(stream.push(token) for token in ids) + stream.flush()
    assert (text, stream.stopped) == ("ab", True)


def test_random_streams_agree_with_cutting_the_whole_text() -> None:
    """Q6: random texts over a small alphabet, random stops, random pieces."""
    rng = random.Random(3)
    for _ in range(3000):
        text = "".join(rng.choices("ab#", k=rng.randrange(12)))
        stop = ["".join(rng.choices("ab#", k=rng.randrange(1, 5))) for _ in range(rng.randrange(3))]
        ends = [(place + len(one), place) for one in stop if (place := text.find(one)) >= 0]
        stream, out, rest = StopFilter(stop), "", text
        while rest:
            size = rng.randrange(1, 4)
            out, rest = out + stream.push(rest[:size]), rest[size:]
        out += stream.flush()
        assert out == (text[: min(ends)[1]] if ends else text)
        assert stream.stopped == bool(ends)
