"""Dead letters as they are shown: readable and bounded, whatever lies in Redis. The reader fetches them."""

from __future__ import annotations

import base64
import re
from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec

from batond.daemon.errors import InvalidRequestError
from batond.daemon.queue.keys import split_ref
from batond.daemon.queue.records import DeadLetter, GarbageError, JobState, decode_record

#: With all that is cut below, so many letters stay under gRPC's 4 MiB an answer.
MAX_PAGE: Final = 200
MOST_CHARS: Final = 4096  # Of a message, and of a history: what scripts keep.
MOST_NAME_CHARS: Final = 8192  # The longest reference of a job is shorter.
MOST_CLASS_CHARS: Final = 256
LATEST_MS: Final = 253_402_300_799_000  # End of the year 9999: what dates hold.
RAW: Final = "raw:"
GARBAGE: Final = "garbage:"
#: As Redis writes numbers.
_SCORE: Final = re.compile(rb"-?(inf|[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?)")
NO_JOB: Final = "there is no such job"


class _Evidence(msgspec.Struct, kw_only=True):
    """What `letter` in common.lua keeps."""

    reason: str = "GARBAGE"
    message: str = "no evidence was kept"
    died_ms: float = 0
    history: str = ""


def encode_name(member: bytes) -> str:
    """Names a letter: as it is if that is plain text, else percent-encoded. `decode_name` gives it back."""
    plain = bool(member) and all(32 <= byte < 127 for byte in member)  # noqa: PLR2004 - what ASCII prints
    if plain and not member.startswith(RAW.encode()):
        return member.decode()
    return RAW + quote_from_bytes(member, safe="")


def decode_name(name: str) -> bytes:
    """Gives the entry of the list that a name stands for; there may be none."""
    return unquote_to_bytes(name.removeprefix(RAW)) if name.startswith(RAW) else name.encode()


def encode_cursor(member: bytes, score: bytes) -> str:
    """Says after which letter a page begins."""
    return base64.urlsafe_b64encode(score + b" " + member).decode()


def decode_cursor(cursor: str) -> tuple[str, bytes]:
    """Gives score and member back; both are empty for an empty cursor.

    Raises:
        InvalidRequestError: The cursor is none of ours.
    """
    if not cursor:
        return "", b""
    try:
        raw = base64.b64decode(cursor, altchars=b"-_", validate=True)
    except ValueError:  # Of characters, or of the length.
        raw = b""
    score, _, member = raw.partition(b" ")
    if not _SCORE.fullmatch(score):
        raise InvalidRequestError(
            "this cursor was not given by a list call", field="cursor", value=cursor[:MOST_CHARS]
        )
    return score.decode(), member


def decode_letter(
    member: bytes, score: bytes, evidence: bytes | None, flat: list[bytes], *, has_spec: bool
) -> DeadLetter:
    """Reads a letter as far as it can be read.

    Args:
        member: The entry in the list.
        score: Its place there: when it died.
        evidence: JSON kept for it, if any.
        flat: Its job's record as in `decode_record`; empty if there is none.
        has_spec: Whether the job's spec is there.
    """
    name = encode_name(member)
    try:
        found = msgspec.json.decode(evidence or b"", type=_Evidence)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = _Evidence()
    died_ms = next((ms for ms in (found.died_ms, float(score)) if 0 < ms <= LATEST_MS), 0)
    fields = dict(zip(flat[::2], flat[1::2], strict=False))
    attempts = fields.get(b"attempts", b"")
    tenant, job_id = split_ref(name) if "/" in name and not name.startswith((GARBAGE, RAW)) else ("", "")
    return DeadLetter(
        name=name[:MOST_NAME_CHARS],
        reason=printable(found.reason)[:MOST_CLASS_CHARS],
        message=printable(found.message)[:MOST_CHARS],
        died_ms=int(died_ms),
        history=printable(found.history)[-MOST_CHARS:],
        tenant=printable(tenant),
        job_id=printable(job_id),
        sla_class=printable(fields.get(b"sla_class", b"").decode(errors="replace"))[:MOST_CLASS_CHARS],
        attempts=int(attempts) if attempts.isdigit() and len(attempts) < 10 else 0,  # noqa: PLR2004 - fits 32 bits
        obstacle=_obstacle(name, flat, has_spec=has_spec),
    )


def printable(text: str) -> str:
    """Replaces what a terminal might obey; lines stay."""
    return "".join(char if char == "\n" or char.isprintable() else "\ufffd" for char in text)


def _obstacle(name: str, flat: list[bytes], *, has_spec: bool) -> str:
    """Says why a letter can't be retried, by what a listing knows; empty if it can."""
    if name.startswith((GARBAGE, RAW)):
        return "it is no job"
    if not flat:
        return NO_JOB
    try:
        record = decode_record(flat)
    except GarbageError as error:
        return printable(str(error))[:MOST_CHARS]
    if record.state is not JobState.DEAD:
        return f"its job is {record.state}"
    return "" if has_spec else "its spec is missing"
