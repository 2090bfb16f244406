"""The peers: every adapter serves the same requests, and the run survives whatever a peer does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from batond.bench import __main__ as command
from batond.bench.peers import child, run, tables
from batond.bench.peers.batond_engine import needs_elastic
from batond.bench.peers.drive import Driver, measure_urgent, saturate
from batond.bench.peers.run import Options, PeerReport, Report, run_peer
from batond.bench.peers.task import (
    Answer,
    Failed,
    Missing,
    PeerError,
    Ready,
    Saturated,
    Task,
    Urgency,
    Urgent,
    Work,
)
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from random import Random

    from batond.bench.peers.session import Session

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WORK = (Work(5, 9), Work(12, 3), Work(3, 6), Work(9, 1), Work(4, 7))
URGENCY = Urgency(
    rows=2, fill_prompt_tokens=4, fill_output_tokens=40, prompt_tokens=6, output_tokens=2, count=2
)
RUNNABLE = ("batond", "generate", "transformers")


def task(peer: str, **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "peer": peer,
        "model": MODEL,
        "dtype": "float32",
        "device": "cpu",
        "rows": (3,),
        "work": WORK,
        "threads": 1,
        "host_bytes": 1 << 20,
    }
    return Task(**(fields | changes))


class _Noting(Driver):
    """Keeps the tokens of each request."""

    tokens: ClassVar[dict[str, list[int]]] = {}

    def __init__(self, session: Session, dice: Random, vocab_size: int) -> None:
        poll = session.poll

        def noting(until_s: float | None = None) -> list[tuple[str, list[int]]]:
            came = poll(until_s)
            for key, token_ids in came:
                self.tokens.setdefault(key, []).extend(token_ids)
            return came

        session.poll = noting  # type: ignore[method-assign]
        super().__init__(session, dice, vocab_size)


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[list[Answer], dict[str, list[int]]]]:
    """Gives what each peer that runs here said to one task, and the tokens of all its requests."""
    torch.set_num_threads(1)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batond.bench.peers.drive.Driver", _Noting)
        for name in RUNNABLE:
            said: list[Answer] = []
            _Noting.tokens = {}
            child.run(task(name, urgency=URGENCY, repeats=2), said.append, began_s=time.perf_counter())
            found[name] = (said, _Noting.tokens)
    return found


def test_the_same_requests_give_the_same_tokens_in_every_peer_that_runs_here(
    answers: dict[str, tuple[list[Answer], dict[str, list[int]]]],
) -> None:
    """One model, one workload, the same prompts: what is compared is the same work."""
    mine, theirs, other = (answers[name][1] for name in RUNNABLE)
    assert mine == theirs
    assert mine == other
    assert {key: len(tokens) for key, tokens in mine.items() if key.startswith("r1")} == {
        f"r1n{number}": work.output_tokens for number, work in enumerate(WORK)
    }


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_peer_answers_each_measurement(
    answers: dict[str, tuple[list[Answer], dict[str, list[int]]]], name: str
) -> None:
    ready, first, second, urgent, last = answers[name][0]
    assert isinstance(ready, Ready)
    assert isinstance(last, Ready)
    assert {"torch", "transformers"} <= set(ready.about)
    for run_ in (first, second):
        assert isinstance(run_, Saturated)
        assert (run_.rows, run_.requests, run_.prompt_tokens, run_.output_tokens) == (3, 5, 33, 26)
    assert isinstance(urgent, Urgent)
    assert (len(urgent.full_ms), urgent.fill_tokens, urgent.urgent_tokens) == (2, 80, 4)
    assert all(0 < first <= last for first, last in zip(urgent.full_ms, urgent.answer_ms, strict=True))


@pytest.mark.parametrize("name", ["transformers-graphs", "transformers-offload"])
def test_a_peer_that_needs_a_card_says_so(name: str) -> None:
    answers: list[Answer] = []
    child.run(task(name), answers.append, began_s=0.0)
    assert isinstance(answers[0], Missing)
    assert "card" in answers[0].why
    assert len(answers) == 1


def test_a_ring_that_does_not_fit_follows_its_rows() -> None:
    kv_bytes = 2 * 2 * 2 * 8 * 4  # Of a token: keys and values, layers, heads, numbers, bytes.
    one = task("batond", rows=(100,), work=(Work(40, 24),))
    ring_bytes = 100 * 64 * kv_bytes
    beside = needs_elastic(one, 4 * ring_bytes + (2 << 30))
    assert not beside
    assert needs_elastic(one, ring_bytes + (1 << 30))


class _Rows:
    """A peer of rows in virtual steps; urgent requests wait like all others, or take a row."""

    def __init__(self, rows: int, *, parks: bool) -> None:
        self.rows, self.parks, self.steps = rows, parks, 0
        self.waiting: list[tuple[str, int]] = []
        self.running: list[list[Any]] = []
        self.heard: list[tuple[str, int, int]] = []

    def submit(self, key: str, prompt: Sequence[int], output_tokens: int, *, urgent: bool = False) -> None:
        self.heard.append((key, len(prompt), self.steps))
        self.waiting.insert(0 if urgent and self.parks else len(self.waiting), (key, output_tokens))
        if urgent and self.parks and len(self.running) == self.rows:
            key, left = self.running.pop()
            self.waiting.insert(1, (key, left))

    def poll(self, until_s: float | None = None) -> list[tuple[str, list[int]]]:
        while self.waiting and len(self.running) < self.rows:
            self.running.append(list(self.waiting.pop(0)))
        self.steps += 1
        came = [(key, [1]) for key, _ in self.running]
        self.running = [[key, left - 1] for key, left in self.running if left > 1]
        return came

    def close(self) -> None:
        pass


def test_urgent_requests_come_evenly_while_the_others_run() -> None:
    session = _Rows(2, parks=True)
    one = task("batond", work=(), urgency=replace_count(URGENCY, 3))
    assert one.urgency is not None
    urgent = measure_urgent(session, one, one.urgency)
    came = [(key, prompt, step) for key, prompt, step in session.heard if key.startswith("urgent")]
    began = next(step for key, _, step in session.heard if key == "mixed0")
    assert [key for key, _, _ in came] == ["urgent0", "urgent1", "urgent2"]
    assert {prompt for _, prompt, _ in came} == {6}
    gaps = [step - began for _, _, step in came]
    assert all(10 * (place + 1) <= gap <= 10 * (place + 1) + 8 for place, gap in enumerate(gaps))
    assert urgent.fill_tokens == 80
    assert urgent.urgent_tokens == 6
    assert len(urgent.idle_ms) == 3


def replace_count(urgency: Urgency, count: int) -> Urgency:
    return msgspec.structs.replace(urgency, count=count)


def test_a_peer_that_emits_too_much_is_found_out() -> None:
    session = _Rows(1, parks=False)
    session.poll = lambda until_s=None: [(key, [1, 2, 3]) for key, _ in session.waiting]  # type: ignore[method-assign]
    driver = Driver(session, task("batond").dice(), 10)
    driver.submit("one", [1], 2, due_s=0.0)
    with pytest.raises(PeerError, match="1 tokens too many"):
        driver.poll()


def test_saturation_counts_the_workload_alone() -> None:
    """The warm-up is none of it."""
    session = _Rows(3, parks=False)
    (only,) = saturate(session, task("batond"), 3)
    assert (only.requests, only.output_tokens) == (5, 26)
    warm = [key for key, _, _ in session.heard if key.startswith("warm")]
    assert len(warm) == 3


@pytest.fixture
def vllm_options(vllm_folder: Path) -> Options:
    return Options(
        peers=("vllm", "vllm-priority"),
        shape="tiny",
        device="cpu",
        dtype="float32",
        workload="short",
        requests=4,
        shorter=16,
        rows=(1, 2),
        urgency=Urgency(
            rows=2, fill_prompt_tokens=32, fill_output_tokens=960, prompt_tokens=64, output_tokens=16, count=2
        ),
        limit_s=60,
        paths={"vllm": (str(vllm_folder),), "vllm-priority": (str(vllm_folder),)},
    )


def test_vllm_runs_in_a_process_with_a_path_of_its_own(vllm_options: Options) -> None:
    """Its engine's bound on running requests is lowered for each number of rows."""
    report = run.run(vllm_options, lambda _: None)
    for one in report.peers:
        assert not one.failures
        assert one.about["vllm"] == "0.25.0+fake"
        assert [saturated.rows for saturated in one.saturated] == [1, 2]
        assert one.urgent is not None
        assert (one.urgent.fill_tokens, one.urgent.urgent_tokens) == (120, 2)
    text = _shown(report)
    assert "vllm-priority" in text
    assert "nothing about speed" in text


@pytest.mark.parametrize(
    ("setting", "said"),
    [("hang", "stopped after 1 s"), ("broken", "no kernel for this card"), ("die", "ended with 7")],
)
def test_a_peer_that_hangs_breaks_or_dies_is_a_line_of_the_report(
    vllm_options: Options, setting: str, said: str
) -> None:
    options = replace(vllm_options, settings={"vllm": {setting: True}})
    limit_s = 1 if setting == "hang" else 60
    report = run_peer(options.task("vllm", options.work()), options.paths["vllm"], limit_s)
    assert any(said in failure for failure in report.failures)
    assert not report.saturated


def test_a_peer_that_is_not_installed_is_skipped_by_name() -> None:
    result = CliRunner().invoke(
        command.app,
        [
            "peers",
            "--peer",
            "vllm",
            "--device",
            "cpu",
            "--shape",
            "tiny",
            "--workload",
            "short",
            "--rows",
            "1",
        ],
    )
    assert result.exit_code == 0
    assert "vllm: skipped, vllm can't be imported" in result.stdout


def test_the_command_hands_on_what_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Options] = []

    def fake(options: Options, tell: Any) -> Report:
        seen.append(options)
        failed = PeerReport(peer="vllm", failures=["urgent: no room"])
        return Report(options=options, requests=0, prompt_tokens=0, output_tokens=0, peers=[failed])

    monkeypatch.setattr("batond.bench.peers.run.run", fake)
    output = tmp_path / "figures.json"
    arguments = (
        "peers --what urgent --urgents 7 --urgent-rows 3 --fill-output 50 --layers 2 --path vllm=/a --path"
        " vllm=/b --set vllm.max_num_batched_tokens=512 --host-gib 0.5"
    )
    result = CliRunner().invoke(command.app, [*arguments.split(), "--output", str(output)])
    assert result.exit_code == 1
    assert "vllm: failed, urgent: no room" in result.stdout
    (options,) = seen
    assert options.workload == ""
    assert options.urgency is not None
    assert (options.urgency.count, options.urgency.rows, options.urgency.fill_output_tokens) == (7, 3, 50)
    assert options.paths == {"vllm": ("/a", "/b")}
    assert options.settings == {"vllm": {"max_num_batched_tokens": 512}}
    assert options.host_bytes == 1 << 29
    assert json.loads(output.read_text())["peers"][0]["failures"] == ["urgent: no room"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"peers": ("vlm",)},
        {"shape": "huge"},
        {"rows": (0,)},
        {"urgency": Urgency(count=0)},
        {"memory_share": 1.5},
        {"paths": {"vlm": ("/a",)}},
        {"repeats": 0},
        {"limit_s": float("inf")},
    ],
)
def test_options_without_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Options(**wrong)


def test_a_trace_gives_its_busiest_requests_that_fit(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["arrival_s,prompt_tokens,output_tokens", "0,5,5"]
    rows += [f"{100 + number},{number + 1},10" for number in range(8)]
    trace.write_text("\n".join([*rows, "104.5,5000,5", ""]), encoding="utf-8")
    options = Options(workload=str(trace), window_s=10, requests=4)
    assert options.work() == (Work(1, 10), Work(3, 10), Work(5, 10), Work(7, 10))
    assert len(replace(options, requests=0, window_s=0).work()) == 9
    with pytest.raises(ConfigError, match="8 tokens at most"):
        replace(options, most_tokens=8).work()


def test_the_tables_compare_with_the_own_engine() -> None:
    options = Options(rows=(8,), device="cuda")
    own = PeerReport(peer="batond", saturated=[saturated(2.0)], urgent=urgent([20.0, 30.0], 10.0, 10.5))
    other = PeerReport(peer="vllm", saturated=[saturated(3.0), saturated(5.0)], missing="")
    other.urgent = urgent([4000.0, 6000.0], 8.0, 16.0)
    gone = PeerReport(peer="transformers", missing="no such thing")
    report = Report(options=options, requests=4, prompt_tokens=9, output_tokens=800, peers=[own, other, gone])
    text = _shown(report)
    vllm_rows = [line.split() for line in text.splitlines() if "│ vllm" in line]
    assert vllm_rows[0][1::2] == ["vllm", "8", "4.00", "3.00", "200", "2.00"]
    assert vllm_rows[1][1::2] == [
        "vllm", "1.0", "4,000.0", "6,000.0", "4,001.0", "6,001.0", "100", "50", "0.505", "200.0",
    ]  # fmt: skip
    assert "transformers: skipped, no such thing" in text
    assert "nothing about speed" not in text


def saturated(seconds: float) -> Saturated:
    return Saturated(rows=8, seconds=seconds, requests=4, prompt_tokens=9, output_tokens=800)


def urgent(full_ms: list[float], alone_s: float, mixed_s: float) -> Urgent:
    return Urgent(
        idle_ms=[1.0],
        full_ms=full_ms,
        answer_ms=[one + 1 for one in full_ms],
        alone_s=alone_s,
        mixed_s=mixed_s,
        fill_tokens=800,
        urgent_tokens=8,
    )


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 2), (99, 4), (100, 4)])
def test_a_percentile_is_one_of_the_values(percent: float, value: float) -> None:
    assert tables.percentile([4, 2, 1, 3], percent) == value


def test_an_answer_that_was_cut_off_is_left_out(
    monkeypatch: pytest.MonkeyPatch, vllm_options: Options
) -> None:
    def cut(task_: Path, answers: Path, *_: Any) -> str:
        answers.write_bytes(msgspec.json.encode(Failed("start", "x")) + b'\n{"type": "sat')
        return "stopped after 9 s"

    monkeypatch.setattr("batond.bench.peers.run._run_process", cut)
    monkeypatch.setattr("batond.bench.peers.run._last_words", lambda _: "")
    report = run_peer(vllm_options.task("vllm", ()), (), 9)
    assert report.failures == ["start: x", "process: stopped after 9 s"]


def _shown(report: Report) -> str:
    console = Console(width=150, record=True)
    tables.show(console, report)
    return console.export_text()
