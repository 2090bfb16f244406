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
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_LOGPROBS: Final = 20
MAX_PROMPT_LOGPROBS: Final = 1 << 19  # Numbers of one prompt: they travel to the front in one frame.
MAX_N: Final = 128
MAX_CLIENT_ID_CHARS: Final = 128  # Of the ids that clients give to jobs and sessions.
MAX_GRAMMAR_CHARS: Final = 1 << 16
MAX_SCHEMA_DEPTH: Final = (
    100  # The compiler's time grows with the cube: 1,000 nested levels hold it for minutes.
)
#: Of one object of a schema: compiling goes with the square, and 800 hold the engine for a minute.
MAX_OPTIONAL_PROPERTIES: Final = 100
_SEED_BITS: Final = 63  # What every number format on the way keeps exactly.


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when a generation ends.

    Lies in Redis as part of a job: what a newer release adds is passed over, so that its daemons and older
    ones can share a queue.

    The order of work on the logits: bias, repetition penalty, presence and frequency penalty, bans of
    `min_tokens`, grammar, temperature, top_k, top_p, min_p. Log-probabilities are of the model's own
    distribution, before any of this.

    Attributes:
        max_tokens: Most tokens to emit, at least 1.
        temperature: 0 is greedy; above 0 the logits are divided by it.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches p, in (0, 1].
        min_p: Drop tokens whose probability is below this share of the likeliest one's; 0 keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of every token of prompt and
            output (Keskar et al. 2019, "CTRL"; as in transformers); 1 is off, above 1 discourages.
        presence_penalty: Subtracted from the logits of every token of the output (as in OpenAI's API).
        frequency_penalty: Subtracted once for each time the token stands in the output (as in OpenAI's API).
        logit_bias: Added to the logits, by token id; at most 1024 ids, each bias from -100 to 100.
        min_tokens: End-of-sequence and stop ids are not chosen, and stop strings are not looked for, among
            the first so many tokens. It yields to a grammar that is complete.
        ignore_eos: Don't end at the model's end-of-sequence ids.
        stop_token_ids: Further ids that end the generation (the id itself is emitted, its text is not).
        stop: Strings that end the generation; neither they nor what follows is ever emitted as text.
        n: Generations wanted. A job's affair: it runs as n queries, see `split_sequences`.
        logprobs: Report each emitted token's log-probability, and so many of the likeliest tokens'; None
            reports nothing.
        prompt_logprobs: The same for every prompt token but the first.
        json_schema: The output must be JSON that follows this schema (JSON text of an object or a boolean).
        regex: The output must match this regular expression.
        grammar: The output must match this grammar (EBNF in the GBNF dialect, start rule `root`). At most one
            of the last three; stop ids are then chosen only where the grammar is complete, which also ends
            the generation under `ignore_eos` if nothing else may follow.

    Raises:
        InvalidRequestError: A value is outside its range, or not of its type.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

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
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_int("n", self.n, 1, MAX_N)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError("ignore_eos must be true or false", field="ignore_eos")
        _check_stops(self.stop_token_ids, self.stop)
        _check_biases(self.logit_bias)
        msgspec.structs.force_setattr(self, "logit_bias", dict(self.logit_bias))
        _check_grammars(json_schema=self.json_schema, regex=self.regex, grammar=self.grammar)

    @property
    def structured(self) -> bool:
        """Whether a schema, a regular expression or a grammar constrains the output."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def penalized(self) -> bool:
        """Whether the tokens so far change the logits."""
        off = self.repetition_penalty == 1.0 and self.presence_penalty == self.frequency_penalty == 0.0
        return not off


def sequence_seed(seed: int, index: int) -> int:
    """The seed of one of a job's n generations; the first has the job's own.

    Args:
        seed: The job's.
        index: From 0.

    Returns:
        A number below 2^63 (by the SplitMix64 finalizer; Steele et al. 2014, "Fast splittable pseudorandom
        number generators"), so that each generation can be run again by itself.
    """
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    mixed = (seed + index * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> (64 - _SEED_BITS)


def split_sequences(sampling: SamplingParams, seed: int) -> list[tuple[SamplingParams, int]]:
    """The n single generations of a job: parameters with n = 1, and seed, of each.

    The prompt's log-probabilities are the same for all and come with the first alone.
    """
    first = msgspec.structs.replace(sampling, n=1)
    other = msgspec.structs.replace(first, prompt_logprobs=None)
    return [(other if index else first, sequence_seed(seed, index)) for index in range(sampling.n)]


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


def _check_biases(biases: object) -> None:
    if not isinstance(biases, dict):
        raise InvalidRequestError("logit_bias must map token ids to numbers", field="logit_bias")
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"at most {MAX_LOGIT_BIASES} entries in logit_bias", field="logit_bias")
    for token_id, bias in biases.items():
        _check_int("logit_bias", token_id, 0, (1 << 31) - 1)
        _check_float("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_grammars(**sources: object) -> None:
    given = [name for name, source in sources.items() if source is not None]
    if len(given) > 1:
        raise InvalidRequestError(f"only one of {' and '.join(given)} can be set", field=given[0])
    for name in given:
        source = sources[name]
        if not isinstance(source, str) or not 1 <= len(source) <= MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"{name} must be a string of 1 to {MAX_GRAMMAR_CHARS} characters", field=name
            )
        if name == "json_schema":
            _check_schema(source)


def _check_schema(source: str) -> None:
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema is not JSON: {error}", field="json_schema") from error
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError("json_schema must be a JSON object or a boolean", field="json_schema")
    level: list[object] = [schema]
    depth = work = 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequestError(
                f"json_schema nests deeper than {MAX_SCHEMA_DEPTH} levels", field="json_schema"
            )
        for outer in level:
            _check_ref(outer)
            work += _optional_properties(outer) ** 2
        if work > MAX_OPTIONAL_PROPERTIES**2:
            raise InvalidRequestError(
                f"json_schema has too many optional properties: at most {MAX_OPTIONAL_PROPERTIES} in one"
                " object, fewer if several objects have many",
                field="json_schema",
            )
        level = [inner for outer in level for inner in _nested(outer)]


def _check_ref(value: object) -> None:
    # xgrammar takes any value for one that is elsewhere, and writes where to standard error: into our log.
    ref = value.get("$ref") if isinstance(value, dict) else None
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        raise InvalidRequestError("a $ref of json_schema must be # or begin with #/", field="json_schema")


def _optional_properties(value: object) -> int:
    properties = value.get("properties") if isinstance(value, dict) else None
    if not isinstance(properties, dict):
        return 0
    required = value.get("required") if isinstance(value, dict) else None
    known = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(properties.keys() - known)


def _nested(value: object) -> list[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inner if isinstance(one, (dict, list))]
