"""A short trace of two tenants, and a daemon whose engine computes nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE
from batond.bench.local_daemon import LocalDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = "arrival_s,prompt_tokens,output_tokens,tenant"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four requests in 40 seconds, then thirty in three."""
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [f"{number * 10},160,32,conv" for number in range(4)]
    rows += [
        f"{50 + number * 0.1:.1f},{160 + 16 * (number % 5)},{32 + 16 * (number % 3)},"
        f"{'code' if number % 3 == 0 else 'conv'}"
        for number in range(30)
    ]
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    """Two rows, a millisecond a step, prompt and output of at most 280 tokens, tenants code and conv."""
    with tempfile.TemporaryDirectory(prefix="bd-") as name:
        one = LocalDaemon(
            Path(name),
            ["code", "conv"],
            model={"path": name, "name": "fake"},
            engine={"rows": 2, "max_query_tokens": 280},
            environment={STEP_VARIABLE: "0.001"},
            program=PROGRAM,
        )
        try:
            one.wait_ready()
            yield one
        finally:
            one.stop()
