"""Bytes for a socket that no gRPC client sends; the same for the same seed and number."""

from __future__ import annotations

import gzip
import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(10)
_END_STREAM, _END_HEADERS = 1, 4
_HELLO: Final = PREFACE + bytes.fromhex("000000040000000000")  # With empty settings.
_PATH: Final = "/batond.v1.JobService/SubmitJob"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def header(name: str, value: str | bytes) -> bytes:
    """A header as HPACK has it, literal and without an index (RFC 7541, section 6.2.2)."""
    raw = value.encode() if isinstance(value, str) else value
    return b"\0" + _size(len(name)) + name.encode() + _size(len(raw)) + raw


def _size(number: int) -> bytes:
    """An integer of HPACK with a prefix of 7 bits."""
    if number < 127:  # noqa: PLR2004 - the prefix is full there
        return bytes((number,))
    number -= 127
    digits = b"\x7f"
    while number > 127:  # noqa: PLR2004 - a digit holds so much
        digits += bytes((number % 128 + 128,))
        number //= 128
    return digits + bytes((number,))


def request(token: str, body: bytes, **changed: str | bytes) -> bytes:
    """A call, with some headers changed; names have _ for -, and `h_` for a colon."""
    headers: dict[str, str | bytes] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": _PATH,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
        "authorization": f"Bearer {token}",
    }
    for name, value in changed.items():
        headers[name.replace("h_", ":").replace("_", "-")] = value
    block = b"".join(header(name, value) for name, value in headers.items() if value)
    return _HELLO + frame(_HEADERS, _END_HEADERS, 1, block) + frame(_DATA, _END_STREAM, 1, body)


def message(raw: bytes, *, size: int | None = None, compressed: int = 0) -> bytes:
    """A message as gRPC sends it; with a size of its own, it lies."""
    return bytes((compressed,)) + (len(raw) if size is None else size).to_bytes(4) + raw


def hostile_stream(seed: int, number: int, token: str) -> tuple[str, bytes]:
    """What to send, and what it is called."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - to be repeated
    good, pick = message(b""), rng.choice

    def call(body: bytes, **changed: str | bytes) -> bytes:
        return request(token, body, **changed)

    kinds: dict[str, Callable[[], bytes]] = {
        "nothing": lambda: b"",
        "random": lambda: rng.randbytes(pick((1, 24, 9000))),
        "http/1": lambda: b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        "tls": lambda: bytes.fromhex("16030100c8010000c40303") + rng.randbytes(200),
        "ssh": lambda: b"SSH-2.0-OpenSSH_9.6\r\n",
        "half a preface": lambda: PREFACE[: rng.randrange(len(PREFACE))],
        "random frames": lambda: _HELLO + b"".join(_random_frame(rng) for _ in range(rng.randint(1, 40))),
        "a cut call": lambda: _cut(rng, request(token, good)),
        "a flipped call": lambda: _flip(rng, request(token, good)),
        "pings": lambda: _HELLO + frame(_PING, 0, 0, b"12345678") * 500,
        "settings": lambda: _HELLO + frame(_SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff" * 50) * 20,
        "resets": lambda: _HELLO + b"".join(_opened_and_reset(token, 2 * i + 1) for i in range(200)),
        "endless headers": lambda: _HELLO + frame(_HEADERS, 0, 1, header("a", "b")) + _continued(rng),
        "windows": lambda: _HELLO + frame(_WINDOW, 0, 0, b"\x7f\xff\xff\xff") * 3,
        "no path": lambda: call(good, h_path=""),
        "a bad path": lambda: request(token, good, h_path=pick((b"\xff\xfe", b"//", b"/" + b"a" * 9000))),
        "a bad method": lambda: call(good, h_method=pick(("GET", "BREW", "\0"))),
        "a bad content type": lambda: request(
            token, good, content_type=pick(("text/html", "application/json"))
        ),
        "a bad timeout": lambda: request(token, good, grpc_timeout=pick(("x", "-1S", "99999999999H", "0n"))),
        "a bad encoding": lambda: request(
            token, message(b"\1", compressed=1), grpc_encoding=pick(("gzip", "x"))
        ),
        "a bomb": lambda: request(token, message(_bomb(), compressed=1), grpc_encoding="gzip"),
        "a bad flag": lambda: call(message(b"", compressed=77)),
        "a size that lies": lambda: call(message(b"ab", size=pick((0, 1, 3, (1 << 32) - 1)))),
        "no message": lambda: call(b""),
        "two messages": lambda: call(good + good),
        "a token of bytes": lambda: request("", good, authorization=b"Bearer \xff\xfe\x00"),
        "a huge header": lambda: call(good, x=b"y" * pick((8000, 16_000))),
    }
    name = rng.choice(list(kinds))
    return name, kinds[name]()


def _bomb() -> bytes:
    """Small, and 20 MiB when it is unpacked."""
    return gzip.compress(bytes(20 << 20))


def _random_frame(rng: random.Random) -> bytes:
    payload = rng.randbytes(rng.choice((0, 1, 4, 8, 200)))
    return frame(rng.randrange(14), rng.randrange(256), rng.choice((0, 1, 2, 3, (1 << 31) - 1)), payload)


def _opened_and_reset(token: str, stream: int) -> bytes:
    call = request(token, b"")[len(_HELLO) :]
    block = call[9 : 9 + int.from_bytes(call[:3])]
    return frame(_HEADERS, _END_HEADERS, stream, block) + frame(_RESET, 0, stream, b"\0\0\0\x08")


def _continued(rng: random.Random) -> bytes:
    return frame(_CONTINUATION, 0, 1, header("x", "y" * 200)) * rng.choice((10, 300))


def _cut(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw))]


def _flip(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randint(1, 6)):
        data[rng.randrange(len(PREFACE), len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


__all__ = ["frame", "header", "hostile_stream", "message", "request"]
