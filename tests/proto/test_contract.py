"""The contract keeps its rules, and the committed modules are what the generator makes of it."""

import enum
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batond.daemon.wire.messages import ParkCause, RowReason
from batond.v1 import admin_pb2, jobs_pb2, types_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copies proto/, so that a test may break it."""
    return Path(shutil.copytree(PROTO, tmp_path / "proto"))


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Lints a copy of proto/ with buf."""
    buf = Path(sys.executable).parent / "buf"
    return subprocess.run([buf, "lint", "."], cwd=folder, capture_output=True, text=True, check=False)


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the generator of a copy of proto/."""
    command = [sys.executable, str(folder / "generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def replace(path: Path, old: str, new: str) -> None:
    """Replaces text that must be there."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_contract_keeps_the_rules() -> None:
    result = lint(PROTO)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "rule"),
    [
        ("jobs.proto", "  // Which one.\n", "", "should have a non-empty comment"),
        ("types.proto", "JOB_STATE_UNSPECIFIED", "JOB_STATE_NONE", "_UNSPECIFIED"),
        ("types.proto", "JOB_STATE_QUEUED", "QUEUED", "JOB_STATE_"),
        ("types.proto", "string job_id = 1", "string jobId = 1", "lower_snake_case"),
        ("admin.proto", "service AdminService", "service Admin", 'suffixed with "Service"'),
        (
            "jobs.proto",
            "returns (CancelJobResponse)",
            "returns (GetJobResponse)",
            "multiple RPCs",
        ),
    ],
)
def test_lint_finds_a_broken_rule(copy: Path, file: str, old: str, new: str, rule: str) -> None:
    replace(copy / "batond/v1" / file, old, new)
    result = lint(copy)
    assert result.returncode != 0
    assert rule in result.stdout + result.stderr


def test_committed_modules_are_up_to_date() -> None:
    result = check(PROTO, "--check")
    assert result.returncode == 0, result.stderr


def test_check_finds_a_changed_contract_and_generate_mends_it(copy: Path) -> None:
    proto = copy / "batond/v1/types.proto"
    replace(
        proto, "uint32 attempts = 21;", "uint32 attempts = 21;\n  // A further one.\n  bool further = 1000;"
    )
    result = check(copy, "--check")
    assert result.returncode == 1
    assert "types_pb2.pyi" in result.stderr
    assert check(copy).returncode == 0
    assert "further" in (copy / "batond/v1/types_pb2.pyi").read_text(encoding="utf-8")
    assert check(copy, "--check").returncode == 0


def test_check_finds_left_over_and_missing_modules(copy: Path) -> None:
    modules = copy / "batond/v1"
    (modules / "jobs_pb2.py").rename(modules / "old_pb2.py")
    result = check(copy, "--check")
    assert result.returncode == 1
    assert "missing: batond/v1/jobs_pb2.py" in result.stderr
    assert "left over: batond/v1/old_pb2.py" in result.stderr


def test_a_proto_that_does_not_compile_is_an_error(copy: Path) -> None:
    replace(copy / "batond/v1/jobs.proto", "message GetJobRequest", "massage GetJobRequest")
    result = check(copy)
    assert result.returncode == 1
    assert "protoc failed" in result.stderr


def test_unset_is_told_from_zero() -> None:
    """Q1: max_tokens 0 reaches the server as 0, and so do values beyond every range."""
    params = types_pb2.SamplingParams(max_tokens=0, temperature=float("nan"), top_p=0.0)
    sent = types_pb2.SamplingParams.FromString(params.SerializeToString())
    assert sent.HasField("max_tokens")
    assert sent.HasField("top_p")
    assert not sent.HasField("top_k")
    assert not sent.HasField("seed")
    for value in (-1, 1 << 31):
        assert types_pb2.SamplingParams(max_tokens=value).max_tokens == value


def test_services_have_the_promised_calls() -> None:
    jobs = jobs_pb2.DESCRIPTOR.services_by_name["JobService"]
    admin = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    assert {method.name for method in jobs.methods} >= {
        "SubmitJob",
        "GenerateStream",
        "WatchJob",
        "GetJob",
        "ListJobs",
        "CancelJob",
    }
    assert {method.name for method in admin.methods} >= {
        "GetServerInfo",
        "WatchBatch",
        "ParkJob",
        "ResumeJob",
        "Drain",
    }


@pytest.mark.parametrize(("message", "kind"), [("Started", RowReason), ("Preempted", ParkCause)])
def test_reasons_are_a_closed_list(message: str, kind: type[enum.StrEnum]) -> None:
    """The contract's comment names all reasons that front and planner know, and no other."""
    text = (ROOT / "proto" / "batond" / "v1" / "types.proto").read_text(encoding="utf-8")
    body = text.partition(f"message {message} {{")[2].partition("\n}")[0]
    comment = re.search(r"((?: *//[^\n]*\n)+) *string reason = ", body)
    assert comment
    assert set(re.findall(r'"(\w+)"', comment[1])) == {one.value for one in kind}
