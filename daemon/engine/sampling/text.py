"""From tokens to text, a token at a time: UTF-8 and stop-string boundaries are never cut.

Free of torch. The text emitted so far, the held-back tail and the decoder's state belong to one query and
travel with it; after a crash the record is rebuilt by feeding the committed tokens again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Sequence


class TextStream:
    """Incremental detokenizing of one query.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        stop: Strings that end the text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._decoded = ""
        self._decoded_tokens = 0  # Those behind them have given no text yet.
        self._filter = StopFilter(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._filter.stopped

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take the next token and return the text that is certain now.

        Without `may_stop` (the first `min_tokens` tokens) no stop string is looked for in this token's text.
        """
        self._token_ids.append(token_id)
        piece = self._decoder.step(self._tokenizer, token_id) or ""
        if piece:
            self._decoded += piece
            self._decoded_tokens = len(self._token_ids)
        return self._filter.push(piece) if may_stop else piece

    def flush(self) -> str:
        """Return what is still held back: the last token of the query was pushed.

        Bytes that never became a character come out as the full decode shows them (U+FFFD). Decoders with
        byte fallback take back whole characters before such bytes; what was given out stays.
        """
        whole: str = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        if whole.startswith(self._decoded):
            tail = whole[len(self._decoded) :]
        else:
            tail = self._tokenizer.decode(self._token_ids[self._decoded_tokens :], skip_special_tokens=True)
        return self._filter.push(tail) + self._filter.flush()


class StopFilter:
    """Passes text through until a stop string appears; holds back what may become one.

    Args:
        stop: Non-empty strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take more text and return what can't be part of a stop string any more."""
        if self.stopped or not text:
            return ""
        if not self._stop:
            return text
        whole = self._held + text
        cut = self._first_stop(whole)
        if cut is not None:
            self.stopped, self._held = True, ""
            return whole[:cut]
        keep = self._tail_that_may_stop(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """Return the tail: no more text will come."""
        tail, self._held = self._held, ""
        return tail

    def _first_stop(self, text: str) -> int | None:
        """Where the text is cut: at the stop string complete first, however the text came in pieces."""
        found = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _tail_that_may_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
