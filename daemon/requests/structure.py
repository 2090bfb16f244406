"""Sources of structured output, checked without a tokenizer: what no engine can compile is refused at once.

xgrammar is the optional extra `structured`; importing it takes seconds, so it is done on first use.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from batond.daemon.errors import InvalidRequestError

if TYPE_CHECKING:
    from batond.daemon.requests.params import SamplingParams

FIELDS: Final = ("json_schema", "regex", "grammar")
#: Compiling is the engine's, between two steps. These bound it to seconds; measured with 49,000 tokens.
MAX_PARSED_CHARS: Final = 300_000
MAX_RULES: Final = 256
_LOG_PREFIX: Final = re.compile(
    r"^\[[\d:]+\] \S+:\d+: "
)  # xgrammar puts time and source line before its words.


def load_xgrammar() -> Any:
    """The library.

    Raises:
        InvalidRequestError: It is not installed.
    """
    try:
        import xgrammar  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise InvalidRequestError(
            "structured output is not available here: install batond[structured]",
            reason="NO_STRUCTURED_OUTPUT",
        ) from error
    return xgrammar


def structure_field(sampling: SamplingParams) -> str:
    """The field that constrains the output; empty if none does."""
    return next((name for name in FIELDS if getattr(sampling, name) is not None), "")


def check_structure(sampling: SamplingParams) -> None:
    """Parse the source of a constraint, if there is one. Takes milliseconds; call it on a thread.

    What only a vocabulary can tell is left to the engine.

    Raises:
        InvalidRequestError: It is no schema, expression or grammar that xgrammar knows, would take the engine
            too long to compile, or xgrammar is not installed.
    """
    field = structure_field(sampling)
    if not field:
        return
    grammar = load_xgrammar().Grammar
    parse = {
        "json_schema": grammar.from_json_schema,
        "regex": grammar.from_regex,
        "grammar": grammar.from_ebnf,
    }[field]
    try:
        parsed = str(parse(getattr(sampling, field)))
    except (RuntimeError, ValueError, TypeError) as error:
        raise structure_refusal(field, error) from error
    if len(parsed) > MAX_PARSED_CHARS or (field == "grammar" and parsed.count("::=") > MAX_RULES):
        raise InvalidRequestError(
            f"{field} is too complex: it has more than {MAX_RULES} rules, or too many alternatives",
            field=field,
        )


def structure_refusal(field: str, error: Exception) -> InvalidRequestError:
    """What to tell a tenant about xgrammar's refusal."""
    message = _LOG_PREFIX.sub("", str(error)).strip()[:500]
    return InvalidRequestError(f"{field} can't be compiled: {message}", field=field)
