"""Configuration files that make no sense are refused in one line, never with a traceback."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from batond.daemon.config_load import load_settings
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Plan

SECTIONS = (
    "server",
    "model",
    "engine",
    "memory",
    "queue",
    "service",
    "log",
    "tls",
    "tenants",
    "classes",
    "policy_options",
    "x",
)
KEYS = (
    "listen",
    "metrics_listen",
    "path",
    "rows",
    "policy",
    "url",
    "lease_s",
    "level",
    "cert_file",
    "name",
    "weight",
    "max_message_bytes",
    "result_ttl_s",
    "token_sha256",
    "order",
    "chunk_tokens",
    "host_pool_bytes",
    "spill_dir",
    "spill_bytes",
    "governor",
    "low_watermark",
    "reserve",
    "sample_ms",
    "x",
)
VALUES = (
    "-1",
    "0",
    "1e400",
    "nan",
    "inf",
    "9" * 30,
    "true",
    '""',
    '"\\u0000"',
    '"x"',
    "[]",
    '["", 3]',
    "{}",
    "{a = {b = 1}}",
    "1979-05-27",
    '"unix:"',
    '"host:99999999"',
    '"[::1"',
    '"redis://["',
    '"16XB"',
    '"' + "a" * 5000 + '"',
    '"../.."',
)


def hostile_file(rng: random.Random) -> bytes:
    """Sections, keys and values in any order; some files are cut or no text."""
    lines = []
    for _ in range(rng.randint(0, 5)):
        section = rng.choice(SECTIONS)
        lines.append(f"[[{section}]]" if rng.random() < 0.3 else f"[{section}]")
        lines += [f"{rng.choice(KEYS)} = {rng.choice(VALUES)}" for _ in range(rng.randint(0, 3))]
    raw = "\n".join(lines).encode()
    match rng.randrange(6):
        case 0:
            return raw[: rng.randrange(len(raw) + 1)]
        case 1:
            return raw + rng.randbytes(5)
        case _:
            return raw


def test_a_file_that_makes_no_sense_is_refused_in_words(tmp_path: Path, plan: Plan) -> None:
    """M4: an operator sees what to mend."""
    refused = longest_chars = 0
    file = tmp_path / "batond.toml"
    for number in plan.numbers(400, 20_000):
        file.write_bytes(hostile_file(random.Random(f"{plan.seed}/{number}")))
        try:
            load_settings(file)
        except ConfigError as error:
            refused += 1
            longest_chars = max(longest_chars, len(error.message))
        except Exception as error:  # noqa: BLE001 - that is what must not come
            pytest.fail(f"seed {plan.seed} number {number}: {error!r}\n{file.read_bytes()!r}")
    assert refused
    assert longest_chars < 6000, "a line that can be read, even of a file with many faults"
