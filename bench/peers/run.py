"""Peers one after the other, each in a process of its own, on one task: what came of each.

One at a time, since they share the card; a process each, since its memory is only free for the next one when
the process is gone, and since some bring packages of other versions.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from batond.bench import workloads
from batond.bench.gpu.run import DTYPES
from batond.bench.gpu.sizes import SHAPES
from batond.bench.mixes.run import MIX_SEED
from batond.bench.peers.child import ADAPTERS
from batond.bench.peers.task import (
    Answer,
    Failed,
    Missing,
    Ready,
    Saturated,
    Task,
    Urgency,
    Urgent,
    Work,
)
from batond.daemon.errors import ConfigError
from batond.daemon.simulator.trace import busiest, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: All peers, in the order in which they run: batond's own engine, which the others are compared with, first.
PEERS: Final = tuple(ADAPTERS)
OWN: Final = PEERS[0]
#: Workloads by name; anything else is the path of a trace.
WORKLOADS: Final = ("mix", "short")
_LAST_LINES: Final = 3
_LINE_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        peers: Names of `PEERS`.
        shape: Name of the model's shape.
        layers: Layers of it; None is all.
        dtype: Of weights and KV.
        device: "cuda", "cuda:1", ... or "cpu".
        threads: Of torch on the CPU; 0 leaves them.
        workload: One of `WORKLOADS`, the path of a trace, or nothing.
        window_s: Of a trace, the busiest so many seconds; 0 is all.
        requests: Of the workload, evenly of a trace; 0 is all.
        shorter: All lengths, those of the urgent ones too, are divided by this.
        most_tokens: Requests of a trace that are longer are left out.
        rows: Requests that run at once, one measurement of the workload for each.
        repeats: Of each.
        urgency: None leaves it out.
        memory_share: Part of the card that a peer may take.
        host_bytes: Host memory for KV that has lost its place.
        limit_s: Of each peer's process.
        paths: Folders put before the Python path of a peer's process, by peer.
        settings: Options of a peer itself, by peer.
        seed: Of weights and token ids.
    """

    peers: tuple[str, ...] = PEERS
    shape: str = "llama-2-7b"
    layers: int | None = None
    dtype: str = "bfloat16"
    device: str = "cuda"
    threads: int = 0
    workload: str = "mix"
    window_s: float = 600.0
    requests: int = 0
    shorter: int = 1
    most_tokens: int = 4096
    rows: tuple[int, ...] = (8, 32)
    repeats: int = 1
    urgency: Urgency | None = field(default_factory=Urgency)
    memory_share: float = 0.9
    host_bytes: int = 8 << 30
    limit_s: float = 900.0
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ConfigError: An option has none.
        """
        for name, values in {"--peer": self.peers, "--path": self.paths, "--set": self.settings}.items():
            if unknown := [value for value in values if value not in PEERS]:
                raise ConfigError(f"{name} must be of {', '.join(PEERS)}, not {', '.join(unknown)}")
        if self.shape not in SHAPES:
            raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, not {self.shape!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        least = {"--rows": min(self.rows, default=0), "--repeats": self.repeats, "--shorter": self.shorter}
        if self.layers is not None:
            least["--layers"] = self.layers
        if self.urgency is not None:
            least |= {f"urgent {name}": value for name, value in msgspec.structs.asdict(self.urgency).items()}
        if low := [name for name, value in least.items() if value < 1]:
            raise ConfigError(f"{', '.join(low)} must be at least 1")
        if self.requests < 0 or self.threads < 0 or self.host_bytes < 0 or not self.window_s >= 0:
            raise ConfigError("--requests, --threads, --host-gib and --window must not be negative")
        if not (0 < self.memory_share < 1 and 0 < self.limit_s < math.inf):
            raise ConfigError("--memory-share must be between 0 and 1, --limit above 0")

    def work(self) -> tuple[Work, ...]:
        """The workload's requests.

        Raises:
            ConfigError: There is no such workload, or it is empty.
        """
        if not self.workload:
            return ()
        if self.workload in WORKLOADS:
            vocab_size = SHAPES[self.shape].vocab_size
            made = (
                workloads.mix(vocab_size, queries=self.requests or 120, seed=MIX_SEED)
                if self.workload == "mix"
                else workloads.short(vocab_size, queries=self.requests or 30)
            )
            return tuple(self._one(len(one.prompt_token_ids), one.output_tokens) for one in made)
        trace = read_trace(Path(self.workload))
        if self.window_s:
            trace = busiest(trace, self.window_s)
        fitting = [one for one in trace if one.prompt_tokens + one.output_tokens <= self.most_tokens]
        if not fitting:
            raise ConfigError(f"no request of {self.workload} has {self.most_tokens} tokens at most")
        count = min(self.requests or len(fitting), len(fitting))
        chosen = [fitting[number * len(fitting) // count] for number in range(count)]
        return tuple(self._one(one.prompt_tokens, one.output_tokens) for one in chosen)

    def task(self, peer: str, work: tuple[Work, ...]) -> Task:
        """What a peer is to do."""
        config = SHAPES[self.shape].to_dict()
        classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        config["architectures"] = [classes[type(SHAPES[self.shape])].__name__]
        config["dtype"] = self.dtype
        if self.layers is not None:
            config["num_hidden_layers"] = self.layers
        urgency = self.urgency
        if urgency is not None:
            urgency = Urgency(
                rows=urgency.rows,
                count=urgency.count,
                fill_prompt_tokens=self._short(urgency.fill_prompt_tokens),
                fill_output_tokens=self._short(urgency.fill_output_tokens),
                prompt_tokens=self._short(urgency.prompt_tokens),
                output_tokens=self._short(urgency.output_tokens),
            )
        return Task(
            peer=peer,
            model=config,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            rows=self.rows,
            work=work,
            urgency=urgency,
            repeats=self.repeats,
            memory_share=self.memory_share,
            host_bytes=self.host_bytes,
            options=dict(self.settings.get(peer, {})),
            seed=self.seed,
        )

    def _one(self, prompt_tokens: int, output_tokens: int) -> Work:
        return Work(self._short(prompt_tokens), self._short(output_tokens))

    def _short(self, tokens: int) -> int:
        return max(1, tokens // self.shorter)


DEFAULTS: Final = Options()


@dataclass(slots=True, kw_only=True)
class PeerReport:
    """One peer.

    Attributes:
        peer: Its name.
        about: Versions and how it was set up; empty if it never stood.
        missing: Why it can't be measured here; empty if it can.
        failures: What came to nothing, and why.
        saturated: The workload's runs.
        urgent: None if that was not measured.
        ready_s: From the start of its process until it stood.
        seconds: All of it.
    """

    peer: str
    about: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    failures: list[str] = field(default_factory=list)
    saturated: list[Saturated] = field(default_factory=list)
    urgent: Urgent | None = None
    ready_s: float = math.nan
    seconds: float = 0.0

    def take(self, answer: Answer) -> None:
        """Note what the peer said."""
        match answer:
            case Ready():
                self.about = answer.about
                self.ready_s = answer.seconds if math.isnan(self.ready_s) else self.ready_s
            case Saturated():
                self.saturated.append(answer)
            case Urgent():
                self.urgent = answer
            case Missing():
                self.missing = answer.why
            case Failed():
                self.failures.append(f"{answer.what}: {answer.why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything.

    Attributes:
        options: What was asked for.
        requests: Of the workload, and its tokens.
        peers: In the order in which they ran.
    """

    options: Options
    requests: int
    prompt_tokens: int
    output_tokens: int
    peers: list[PeerReport]


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Run all peers.

    Args:
        options: What to run.
        tell: Hears what is being done.

    Raises:
        ConfigError: The workload can't be had.
    """
    work = options.work()
    reports = []
    for peer in options.peers:
        tell(f"{peer}: starts")
        report = run_peer(options.task(peer, work), options.paths.get(peer, ()), options.limit_s)
        reports.append(report)
        tell(f"{peer}: {summary(report)}")
    return Report(
        options=options,
        requests=len(work),
        prompt_tokens=sum(one.prompt_tokens for one in work),
        output_tokens=sum(one.output_tokens for one in work),
        peers=reports,
    )


def summary(report: PeerReport) -> str:
    """A peer's run in a few words."""
    if report.missing:
        return f"skipped: {report.missing}"
    said = [f"{len(report.saturated)} runs of the workload"] if report.saturated else []
    said += ["urgent requests"] if report.urgent is not None else []
    said += [f"failed at {failure}" for failure in report.failures]
    return f"{', '.join(said) or 'nothing'}, in {report.seconds:.0f} s"


def run_peer(task: Task, paths: Sequence[str], limit_s: float) -> PeerReport:
    """Run one peer's process to its end, or stop it at the limit; what it said until then counts.

    Args:
        task: What it is to do.
        paths: Put before its Python path.
        limit_s: Of its life.
    """
    report = PeerReport(peer=task.peer)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="batond-peer-") as name:
        folder = Path(name)
        (folder / "task.json").write_bytes(msgspec.json.encode(task))
        answers, log = folder / "answers.jsonl", folder / "log"
        answers.touch()
        ended = _run_process(folder / "task.json", answers, log, paths, limit_s)
        decoder = msgspec.json.Decoder(Answer)
        for line in answers.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # The last may have been cut by a stop.
                report.take(decoder.decode(line))
        if ended:
            report.failures.append(f"process: {ended}{_last_words(log)}")
    report.seconds = time.monotonic() - began_s
    return report


def _run_process(task: Path, answers: Path, log: Path, paths: Sequence[str], limit_s: float) -> str:
    """Run the process; gives what was wrong with its end, if anything."""
    path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    command = [sys.executable, "-m", "batond.bench.peers.child", str(task), str(answers)]
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - this interpreter on a module of ours
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:.0f} s"
        finally:
            _stop(process)
    return f"ended with {code}" if code else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started, whatever it is doing; what is gone already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = " | ".join(line.strip()[:_LINE_CHARS] for line in lines[-_LAST_LINES:])
    return f" ({said})" if said else ""
