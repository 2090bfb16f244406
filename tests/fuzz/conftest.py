"""A daemon that is fuzzed, and what must hold of it afterwards."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE, fake_tokens
from batond.bench.local_daemon import LocalDaemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Plan:
    """How much is fuzzed: by the environment, so that what failed can be repeated.

    Attributes:
        soak: The full count (BATOND_SOAK=1), not that of CI.
        seed: BATOND_FUZZ_SEED.
        first: BATOND_FUZZ_FIRST: number of the first case.
        count: BATOND_FUZZ_COUNT: how many; 0 is the test's own choice.
    """

    soak: bool
    seed: int
    first: int
    count: int

    def numbers(self, reduced: int, full: int) -> range:
        """Which cases to try."""
        return range(self.first, self.first + (self.count or (full if self.soak else reduced)))


@pytest.fixture(scope="session")
def plan() -> Plan:
    """What the environment says."""
    seed, first, count = (
        int(os.environ.get(f"BATOND_FUZZ_{name}", "0")) for name in ("SEED", "FIRST", "COUNT")
    )
    return Plan(os.environ.get("BATOND_SOAK") == "1", seed, first, count)


#: gRPC's words on headers that are no text.
NO_TEXT = re.compile(
    r"[IWE]\d{4} .*\.cc:\d+\] |"
    r""""event": "Invalid encoding on """
)
#: gRPC's own refusal of metadata beyond its limit lists them, and is itself too long for a trailer.
CORES_OWN = re.compile(r"E\d{4} .*hpack_encoder.cc:\d+\] Ignoring key value pair due to size limit")
#: xgrammar warns of regular expressions on standard error; nothing keeps it from that.
XGRAMMARS_OWN = re.compile(r"\[[0-9:]+\] \S+\.cc:\d+: Warning: ")


#: What operators must be told of: a tenant that was written by hand is let in no more.
EXPECTED = frozenset({"tenant_unreadable"})


@dataclass
class Fuzzed:
    """A daemon, and how it is looked at from outside."""

    daemon: LocalDaemon
    metrics_port: int

    @property
    def target(self) -> str:
        return f"unix:{self.daemon.socket}"

    @property
    def tokens(self) -> dict[str, str]:
        """Of those that send rubbish; `good` never does."""
        return {name: token for name, token in self.daemon.tokens.items() if name != "good"}

    @property
    def redis_socket(self) -> Path:
        return self.daemon.folder / "redis" / "redis" / "redis.sock"

    @property
    def rss_bytes(self) -> int:
        return psutil.Process(self.daemon.process.pid).memory_info().rss

    async def good_job(self, number: int = 0, **sampling: Any) -> None:
        """A job of a tenant of good will is done as if nobody else were there."""
        prompt = [7, number % 900, 3]
        async with (
            self.daemon.async_client("good") as client,
            client.generate(
                token_ids=prompt, max_tokens=9, seed=5, sla_class="interactive", **sampling
            ) as stream,
        ):
            job = await stream.last_job()
        assert list(job.output_token_ids) == fake_tokens(prompt, 5, 9)

    def faults_in_log(self, *, no_text: bool = False) -> list[str]:
        """Lines of the daemon's log that no caller may cause; `no_text` were caused by gRPC itself."""
        bad = []
        for line in self.daemon.log.read_text(errors="replace").splitlines():
            if CORES_OWN.match(line) or XGRAMMARS_OWN.match(line) or (no_text and NO_TEXT.search(line)):
                continue
            try:
                entry: Any = json.loads(line)
                wrong = entry["level"] in {"error", "critical"} or "exception" in entry
                wrong = wrong and entry["event"] not in EXPECTED
            except (ValueError, TypeError, KeyError):
                wrong = True  # Tracebacks that went past the log.
            if wrong:
                bad.append(line[:3000])
        return bad

    def in_log(self, event: str) -> list[str]:
        """Lines of an event."""
        return [
            line for line in self.daemon.log.read_text(errors="replace").splitlines() if f'"{event}"' in line
        ]

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{"))
        )

    def wait_for_metric(self, name: str, value: float) -> None:
        """Wait until a metric has a value: nothing outside the daemon can be told of it."""
        deadline_s = time.monotonic() + 60
        while self.metric(name) != value:
            assert time.monotonic() < deadline_s, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.1)


@pytest.fixture
def say() -> Callable[..., None]:
    """Prints lines of a tally, for `pytest -s`."""
    return lambda *lines: print(*lines, sep="\n")  # noqa: T201 - it is what was asked for


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def fuzzed() -> Iterator[Fuzzed]:
    """A daemon of many rows and short steps, three tenants and an operator."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bd-") as name:
        daemon = LocalDaemon(
            Path(name),
            ["red", "blue", "good"],
            model={"path": name, "name": "fake", "default_max_tokens": 4},
            engine={"rows": 64, "max_query_tokens": 4096},
            sections={
                "server": {"metrics_listen": f"127.0.0.1:{port}", "max_message_bytes": 1 << 20},
                "queue": {"result_ttl_s": 20, "max_queued": 3000},
                "log": {"format": "json"},
                "service": {"drain_timeout_s": 2},
            },
            environment={STEP_VARIABLE: "0.002"},
            program=PROGRAM,
        )
        daemon.wait_ready()
        yield Fuzzed(daemon, port)
        assert daemon.stop() == 0, daemon.log.read_text(errors="replace")[-20_000:]
