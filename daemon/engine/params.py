"""What a tenant may ask of the sampler. Checked once, at the edge; free of torch."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from batond.daemon.errors import InvalidRequestError

MAX_TOKENS_LIMIT: Final = 1 << 24  # Beyond every model's context; keeps sums far away from overflow.
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_TEMPERATURE: Final = 100.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen and when a generation ends.

    Attributes:
        max_tokens: Most tokens to emit, at least 1.
        temperature: 0 is greedy; above 0 the logits are divided by it.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches p, in (0, 1].
        ignore_eos: Don't end at the model's end-of-sequence ids.
        stop_token_ids: Further ids that end the generation (the id itself is emitted, its text is not).
        stop: Strings that end the generation; neither they nor what follows is ever emitted as text.

    Raises:
        InvalidRequestError: A value is outside its range, or not of its type.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse every value that has no meaning, naming the field and its range."""
        # The wire decodes lists; callers in process may pass them too.
        for name in ("stop_token_ids", "stop"):
            value = getattr(self, name)
            if isinstance(value, list):
                msgspec.structs.force_setattr(self, name, tuple(value))
        _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _check_int("top_k", self.top_k, 0, 1 << 31)
        _check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0 and at most 1", field="top_p", value=self.top_p)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError("ignore_eos must be true or false", field="ignore_eos")
        _check_stops(self.stop_token_ids, self.stop)


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(
            f"{field} must be a whole number from {low} to {high}, not {value!r}", field=field, value=value
        )


def _check_float(field: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
        raise InvalidRequestError(
            f"{field} must be a number from {low} to {high}, not {value!r}", field=field, value=value
        )


def _check_stops(ids: tuple[object, ...], strings: object) -> None:
    if not isinstance(strings, tuple):
        raise InvalidRequestError("stop must be a list of strings", field="stop")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids", field="stop_token_ids")
    for token_id in ids:
        _check_int("stop_token_ids", token_id, 0, (1 << 31) - 1)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings", field="stop")
    for text in strings:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters",
                field="stop",
                value=text,
            )
