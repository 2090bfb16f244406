"""The whole run on the CPU with a tiny model: that it measures what it says; its figures are not asserted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from batond.bench import __main__ as command
from batond.bench.gpu import parking
from batond.bench.gpu.run import DEFAULTS, Options, plain
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_the_whole_run_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    output = tmp_path / "gpu.json"
    words = ["gpu", "--device", "cpu", "--shape", "tiny", "--dtype", "float32", "--quick"]
    words += ["--batch", "1,2", "--context", "32,9000", "--output", str(output)]
    done = CliRunner().invoke(command.app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    assert all(found["ceilings"][name]["median"] > 0 for name in ("copy_gb_s", "matmul_tflop_s"))
    (shape,) = found["shapes"]
    assert [(step["rows"], step["step_ms"]["rounds"]) for step in shape["steps"]] == [(1, 8), (2, 8)]
    for step in shape["steps"]:
        assert abs(step["context"] - 32) < 1, "the timed steps stand around the context that was asked for"
        assert step["of_floor"] == pytest.approx(step["floor_ms"] / step["step_ms"]["median"])
        assert step["seen"] is None
    assert [one["what"] for one in shape["left_out"]] == ["1 x 9000", "2 x 9000"]
    assert [one["tokens"] for one in shape["prompts"]] == [128, 1024]
    assert shape["parking"]["nbytes"] == 1024 * shape["sizes"]["kv_token_bytes"]
    urgent = shape["urgent"]
    assert (urgent["rows"], urgent["idle"]["parks"], urgent["full"]["parks"]) == (2, 0, 8)
    assert urgent["full"]["first_ms"]["median"] <= urgent["full"]["second_ms"]["median"]
    assert urgent["idle"]["same_step"] == urgent["idle"]["first_ms"]["rounds"], "a row is there in its step"
    for title in (
        "Ceilings",
        "Decode step",
        "Prompt in one chunk",
        "Parking 1024 tokens",
        "Whole engine of 2",
    ):
        assert title in done.output
    assert "left out: 1 x 9000: the model has 8192 positions" in done.output
    assert "nothing about speed" in done.output


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parking, "measure", interrupt)
    output = tmp_path / "gpu.json"
    words = [
        "gpu",
        "--device",
        "cpu",
        "--shape",
        "tiny,tiny",
        "--dtype",
        "float32",
        "--quick",
        "--batch",
        "2",
    ]
    done = CliRunner().invoke(command.app, [*words, "--output", str(output)])
    assert done.exit_code == 0, done.output
    (shape,) = json.loads(output.read_text())["shapes"]
    assert [one["tokens"] for one in shape["prompts"]] == [128, 1024]
    assert (shape["steps"], shape["parking"]) == ([], None)
    assert "left out: the rest: interrupted" in done.output


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench", "gpu", "--shape", "tiny"])
    with pytest.raises(SystemExit, match=r"torch sees no CUDA card: .* --device cpu"):
        command.main()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--shape", "llama-9"], "--shape must be of llama-2-7b, llama-3-8b, tiny, not llama-9"),
        (["--dtype", "int4"], "--dtype must be one of bfloat16, float16, float32"),
        (["--batch", "0"], "batches must be numbers of at least 1"),
        (["--device", "toaster"], "'toaster' is no device"),
        (["--device", "meta"], "'meta': only CUDA cards are measured"),
    ],
)
def test_what_has_no_meaning_is_refused(words: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "gpu", *words])
    with pytest.raises(SystemExit, match=why):
        command.main()


def test_quick_leaves_what_was_asked_for() -> None:
    quick = DEFAULTS.quick()
    assert (quick.shapes, quick.batches, quick.contexts) == (("llama-3-8b",), (1, 32), (512,))
    assert quick.rounds < DEFAULTS.rounds
    asked = Options(shapes=("tiny",), batches=(3,), contexts=(7,), dtype="float16", device="cpu").quick()
    assert (asked.shapes, asked.batches, asked.contexts) == (("tiny",), (3,), (7,))
    assert (asked.dtype, asked.device) == ("float16", "cpu")


def test_refused_options_name_the_field() -> None:
    with pytest.raises(ConfigError, match="not nothing"):
        Options(shapes=())
    with pytest.raises(ConfigError, match="contexts"):
        Options(contexts=())


def test_json_holds_what_is_worked_out_too() -> None:
    @dataclass
    class Half:
        whole: float

        @property
        def half(self) -> float:
            return self.whole / 2

    assert plain({"a": [Half(3.0)], "b": (1, None)}) == {"a": [{"whole": 3.0, "half": 1.5}], "b": [1, None]}
