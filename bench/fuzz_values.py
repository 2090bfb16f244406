"""Single values for `fuzz_messages`: those that fit a field, and those that nobody expects in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor import FieldDescriptor

if TYPE_CHECKING:
    import random

#: Stands for bytes that are no UTF-8, which protobuf's own classes don't write. Of the same length.
MARKER: Final = b"~~bad~~"
BAD_UTF8: Final = b"\xff\xfe\xc3\x28\xed\xa0\x80"
KNOWN_IDS: Final = 300
_ROLES: Final = ("user", "system", "assistant")
_LONG: Final = 1_000_000

_TEXTS: Final = (
    "",
    " ",
    "\0",
    "a\0b",
    "\r\n",
    "\x1b[31mred\x1b]0;title\x07",
    "a/b",
    "../../etc/passwd",
    "a#1",
    "a@1",
    "{}",
    "{fake}",
    "}",
    "%",
    "%00",
    "%2F",
    "%zz",
    "*",
    "[a-z]?",
    "-1",
    "0",
    "9" * 19,
    "9" * 400,
    "1e309",
    "nan",
    "null",
    "true",
    "raw:%ff%00",
    "raw:",
    "garbage:x",
    "red/f1",
    "red/",
    "/",
    "/red/f1",
    "blue/f1",
    "MTIzIHJlZC9mMQ==",
    "bmFuIHg=",
    "aW5mIHg=",
    "====",
    "$(reboot)",
    "';return redis.call('FLUSHALL')--",
    "\u00e9" * 100,
    "e\u0301" * 60,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467" * 20,
    "\u202egnissim",
    "\ufeff",
    "\ufffd",
    "\uffff",
    "\U0010ffff",
    "\u2028",
    "a" * 63,
    "a" * 64,
    "a" * 128,
    "a" * 129,
    "a" * 257,
    "a" * 5000,
    MARKER.decode(),
    MARKER.decode() * 30,
)
#: By field: what only there is a danger.
_BOMBS: Final = {
    "json_schema": (
        "",
        "{",
        "[]",
        "3",
        "true",
        '{"a":' * 90 + "1" + "}" * 90,
        "[" * 60_000,
        '{"a":' * 10_000,
        '{"$ref":"#"}',
        '{"$ref":"file:///etc/passwd"}',
        '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}',
        '{"type":"string","minLength":1000000000}',
        '{"type":"string","maxLength":99999999999999999999}',
        '{"type":"array","minItems":1000000}',
        '{"type":"string","pattern":"((a{1,1000}){1,1000}){1,1000}"}',
        '{"type":"object","minProperties":100000}',
        '{"enum":[' + ",".join(['"x"'] * 15_000) + "]}",
        '{"allOf":[' + ",".join(['{"anyOf":[{"type":"string"},{"type":"null"}]}'] * 800) + "]}",
        '{"type":"number","minimum":1e309}',
        '{"type":"string","pattern":"a\\u0000b"}',
        '{"type":"string","pattern":"\\ud800"}',
        '{"x":"' + "a" * 70_000 + '"}',
    ),
    "regex": (
        "",
        "(",
        "\\",
        "[",
        "a{1,2000000000}",
        "a{99999999999999999999}",
        "(((a{1,1000}){1,1000}){1,1000})",
        "(a*)*" * 5000,
        "(" * 30_000 + "a" + ")" * 30_000,
        "|".join(["a*b"] * 16_000),
        "(?=a)b",
        "(?P<x>a)\\1",
        "a\0b",
        "[\\u{FFFFFFFF}]",
        "\\p{L}" * 2000,
        "a" * 65_537,
    ),
    "grammar": (
        "",
        "root",
        "root ::=",
        "root ::= root",
        'root ::= root "a" | "b"',
        "start ::= 1",
        'root ::= "a\0"',
        'root ::= "\\u{FFFFFFFFFF}"',
        "root ::= " + "(" * 30_000,
        'root ::= (("a"{1,1000}){1,1000}){1,1000}',
        'root ::= "a"{1,2000000000}',
        "root ::= r0 r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"',
        'root ::= "a"\n' * 3000,
        'root ::= "' + "a" * 65_600 + '"',
    ),
}
_ENDS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}
_INTS: Final = (
    0,
    1,
    2,
    -1,
    3,
    999,
    1000,
    1001,
    4095,
    4096,
    1 << 24,
    1 << 31,
    1 << 53,
    (1 << 53) + 1,
    253_402_300_800,
)
_FLOATS: Final = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.nan,
    math.inf,
    -math.inf,
    1.7e308,
    -1.7e308,
    5e-324,
    1e-9,
    0.5,
    2.0**53,
    1.0000001,
    100.0,
)


def good_value(rng: random.Random, name: str, message: str) -> Any:
    """A value that fits a field, or None where it is best left unset."""
    values: dict[str, tuple[Any, ...]] = {
        "job_id": ("", f"f{rng.randrange(KNOWN_IDS)}", f"f{rng.randrange(KNOWN_IDS)}"),
        "sla_class": ("", "standard", "batch", "interactive"),
        "tenant": ("", "red", "blue", "good"),
        "name": (f"added-{rng.randrange(40)}", f"red/f{rng.randrange(KNOWN_IDS)}"),
        "token_ids": ([1, 2, 3], [rng.randrange(900)], [5] * 50),
        "text": ("hello", "\u4f60\u597d"),
        "max_tokens": (1, 2, 3, 8),
        "seed": (1, rng.getrandbits(64)),
        "detached": (True, False),
        "policy": ("priority", "fcfs", "fair"),
        "page_size": (0, 1, 10),
        "from_token_index": (0, 1, 2, 5, 1000),
        "service": ("", "liveness", "readiness"),
        "list_services": ("*",),
        "weight": (1.0, 2.5),
        "max_queued": (0, 1000),
        "model": ("", "fake"),
    }
    if name not in values or (message == "SamplingParams" and name == "text"):
        return None
    return rng.choice(values[name])


def hostile_text(rng: random.Random, name: str) -> str:
    """A text that nobody expects in a field of that name."""
    if name in _BOMBS:
        return rng.choice(_BOMBS[name])
    if rng.random() < 0.01:  # noqa: PLR2004 - one in a hundred is a megabyte
        return rng.choice(("a", "\u00e9", "\0", "ab c ")) * (_LONG // 2)
    return rng.choice(_TEXTS)


def hostile_number(rng: random.Random, cpp_type: int) -> float:
    """A number at the edge of its type, of a range, or of sense."""
    if cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(_FLOATS)
    low, high = _ENDS[cpp_type]
    value = rng.choice((*_INTS, low, high, low + 1, high - 1, rng.randint(low, high)))
    return min(max(value, low), high)


def hostile_count(rng: random.Random) -> int:
    """Entries of a repeated field or a map."""
    return rng.choice((0, 1, 1, 2, 5, 16, 17, 64, 65, 200, 1025)) if rng.random() < 0.97 else 10_000  # noqa: PLR2004


def hostile_duration_s(rng: random.Random) -> int:
    """Seconds of a duration that no daemon takes."""
    return rng.choice((-1, -(1 << 63), (1 << 63) - 1, 1_000_000_001, 315_576_000_001))
