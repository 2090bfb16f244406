"""The input of `batonctl bulk`: lines of JSON, each a job, read one by one however many there are. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from batond.clients import build
from batond.clients.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batond.clients.build import JobOptions

#: A line is read as a whole. Daemons take less: this is a bound on memory, whatever the file is.
MOST_LINE_BYTES: Final = 64 << 20
DIGEST_CHARS: Final = 12


@dataclass(frozen=True, slots=True)
class Raw:
    """A line that is not blank.

    Attributes:
        number: Of the line, from 1; blank ones count.
        text: As it stands; None if it is longer than MOST_LINE_BYTES.
        nbytes: Read for it, with the blank lines before.
    """

    number: int
    text: bytes | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """A line as a job, or what is wrong with it.

    Attributes:
        number: Of the line.
        nbytes: Of the input.
        job_id: The line's own, or one that the same line gets again.
        prompt: As `Client.submit` takes it.
        options: The same, with the id.
        fault: Why it can't be submitted.
    """

    number: int
    nbytes: int
    job_id: str
    prompt: str | None = None
    options: JobOptions | None = None
    fault: InvalidRequestError | None = None


def raw_lines(source: BinaryIO, most_bytes: int = MOST_LINE_BYTES) -> Iterator[Raw]:
    """Reads lines; never more of one than may be.

    Args:
        source: Of bytes, such as a file.
        most_bytes: Longest line.
    """
    number = nbytes = 0
    while text := source.readline(most_bytes + 1):
        number += 1
        nbytes += len(text)
        if len(text) > most_bytes and not text.endswith(b"\n"):
            while (more := source.readline(most_bytes)) and not more.endswith(b"\n"):
                nbytes += len(more)
            yield Raw(number, None, nbytes + len(more))
        elif text.strip():
            yield Raw(number, text.strip(), nbytes)
        else:
            continue
        nbytes = 0


def line_of(raw: Raw, run: str, defaults: JobOptions) -> Line:
    """Makes a job of a line.

    A line without a `job_id` gets one made of the run, the line's number and all that the job is, so that it
    is the same when the line is read again, and another one when anything about it changes.

    Args:
        raw: The line.
        run: Names what all lines with the same output belong to.
        defaults: What the lines leave out.
    """
    digest = hashlib.sha256(json.dumps(defaults, sort_keys=True, default=str).encode())
    digest.update(raw.text or b"")
    made = f"bulk-{run}-{raw.number}-{digest.hexdigest()[:DIGEST_CHARS]}"
    try:
        given = _given(raw.text)
        own = given.pop("job_id", None)
        if own is not None and not (isinstance(own, str) and own):
            raise InvalidRequestError("job_id must be text", fields={"job_id": "not text"})  # noqa: TRY301 -- as the others
        prompt = given.pop("prompt", None)
        options = _merged(given, defaults)
        options["job_id"] = own or made
        build.submit(prompt, options)
    except InvalidRequestError as error:
        return Line(raw.number, raw.nbytes, made, fault=error)
    except TypeError as error:  # An option that is none.
        return Line(raw.number, raw.nbytes, made, fault=InvalidRequestError(str(error)))
    return Line(raw.number, raw.nbytes, own or made, prompt, options)


def _given(text: bytes | None) -> dict[str, Any]:
    if text is None:
        raise InvalidRequestError(f"the line is longer than {MOST_LINE_BYTES} bytes")
    try:
        found = json.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # Not UTF-8, no JSON, a number of too many digits, too deep.
        raise InvalidRequestError(f"the line is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequestError('the line is no JSON object such as {"prompt": "..."}')
    return {name: value for name, value in found.items() if value is not None}


def _merged(given: dict[str, Any], defaults: JobOptions) -> JobOptions:
    """The line's options over the defaults, with the types that JSON has not."""
    labels: Mapping[str, str] = given.get("labels", {})
    if not isinstance(labels, dict):
        raise InvalidRequestError("labels must be an object", fields={"labels": "no object"})
    if shared := defaults.get("labels"):
        given["labels"] = {**shared, **labels}
    if "deadline" in given:
        given["deadline"] = _time(given["deadline"])
    if "logit_bias" in given:
        given["logit_bias"] = _by_number(given["logit_bias"])
    merged: JobOptions = {**defaults, **given}  # type: ignore[typeddict-item] # `build.spec` checks them
    return merged


def _time(text: object) -> datetime:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError as error:
        raise InvalidRequestError(f"deadline: {error}", fields={"deadline": str(error)}) from error


def _by_number(biases: object) -> dict[int, Any]:
    """Keys of JSON are text, token ids are numbers."""
    try:
        return {int(token): bias for token, bias in dict(biases).items()}  # type: ignore[call-overload] # tried
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            "logit_bias must be an object of token ids and numbers", fields={"logit_bias": str(error)}
        ) from error
