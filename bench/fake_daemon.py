"""The real daemon on an engine that computes nothing: `python -m batond.bench.fake_daemon --config FILE`.

Front, queue and gRPC are the real ones, in processes of their own; only the engine process (`fake_engine.py`)
and the tokenizer are not. It is ready in about a second, without torch. `model.path` may be any folder.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from batond.bench.fake_engine import VOCAB_SIZE, fake_text
from batond.daemon.config_load import load_settings
from batond.daemon.front.app import Parts, serve
from batond.daemon.telemetry.logging import configure_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

#: For `LocalDaemon`: what to start instead of `batond serve`.
PROGRAM: Final = ("-m", "batond.bench.fake_daemon")
#: Names a file that holds by how many seconds this daemon's wall clock is wrong; read whenever it looks.
CLOCK_VARIABLE: Final = "BATOND_FAKE_CLOCK"
_ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "batond.bench.fake_engine")


class FakeTokenizer:
    """A token a character."""

    longest_token_chars = 1

    def encode_text(self, text: str) -> list[int]:
        """See Tokenizer."""
        return [ord(char) % (VOCAB_SIZE - 1) + 1 for char in text]

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """See Tokenizer."""
        return self.encode_text("".join(f"{role}:{content}\n" for role, content in messages))

    def token_bytes(self, token_id: int) -> bytes:
        """See Tokenizer."""
        return fake_text([token_id]).encode()


def _turn_clock(path: Path) -> None:
    right = time.time
    time.time = lambda: right() + float(path.read_text())


def main(config: Annotated[Path, typer.Option()]) -> None:
    """Serve until SIGTERM."""
    if clock := os.environ.pop(CLOCK_VARIABLE, ""):  # No key of the configuration, though it looks like one.
        _turn_clock(Path(clock))
    settings = load_settings(config)
    configure_logging(settings.log.level, settings.log.format)
    parts = Parts(engine_command=_ENGINE_COMMAND, load_tokenizer=lambda _: FakeTokenizer())
    asyncio.run(serve(settings, lambda: load_settings(config), parts))


if __name__ == "__main__":
    typer.run(main)
