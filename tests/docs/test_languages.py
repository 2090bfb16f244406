"""Examples in other languages fit the contract, and run against the real front on a fake engine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2

from batond.bench.fake_daemon import PROGRAM
from batond.bench.local_daemon import LocalDaemon
from batond.v1 import admin_pb2, jobs_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

TENANT = "search"
NPM_TIMEOUT_S = 120
#: What npm says where its registry can't be reached.
UNREACHABLE = ("EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "ENOTFOUND", "ETIMEDOUT")


@pytest.fixture
def examples(root: Path) -> Path:
    """Gives the folder of the examples."""
    return root / "docs" / "examples"


@pytest.fixture(scope="module")
def reached() -> Iterator[dict[str, str]]:
    """Starts a daemon that listens on a port, too; gives the variables that lead a tenant to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with TemporaryDirectory(prefix="bd-") as folder:
        listen = {"server": {"listen": [f"unix:{folder}/batond.sock", address]}}
        daemon = LocalDaemon(
            Path(folder),
            [TENANT],
            model={"path": folder},
            engine={"rows": 1},
            sections=listen,
            program=PROGRAM,
        )
        try:
            daemon.wait_ready()
            yield {**os.environ, "BATOND_SERVER": address, "BATOND_TOKEN": daemon.tokens[TENANT]}
        finally:
            daemon.stop()


def run(command: list[str], environment: dict[str, str], cwd: Path) -> str:
    """Runs an example, which must succeed; gives what it printed."""
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_calls_by_hand_fit_the_contract(examples: Path) -> None:
    """Where grpcurl is not at hand, too: every method is there and takes what is sent."""
    text = (examples / "grpcurl.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    calls = re.findall(r"^call (?:-d '([^']*)' +)?\"\$server\" ([\w.]+)/(\w+)$", text, flags=re.MULTILINE)
    assert {method for _, _, method in calls} >= {
        "Check",
        "SubmitJob",
        "GenerateStream",
        "WatchJob",
        "GetJob",
    }
    pool = descriptor_pool.Default()  # Filled by what is imported.
    assert admin_pb2.DESCRIPTOR.pool is pool
    for body, service, name in calls:
        method = pool.FindServiceByName(service).FindMethodByName(name)
        request: Any = message_factory.GetMessageClass(method.input_type)()
        json_format.Parse(body or "{}", request)
        assert isinstance(request, health_pb2.HealthCheckRequest) or bool(body) == bool(request.ByteSize())


@pytest.mark.redis
@pytest.mark.slow
def test_the_tour_with_grpcurl_runs(examples: Path, reached: dict[str, str]) -> None:
    if shutil.which("grpcurl") is None:
        pytest.skip("grpcurl is not on PATH")
    said = run(["sh", "grpcurl.sh"], reached, examples)
    assert '"status": "SERVING"' in said
    assert "batond.v1.JobService\n" in said
    # Releases of grpcurl write names of fields in different ways; the parser takes all.
    answers = re.findall(r"^\{$.*?^\}$", said, flags=re.MULTILINE | re.DOTALL)
    events = [
        json_format.Parse(text, jobs_pb2.WatchJobResponse()).event for text in answers if '"event"' in text
    ]
    ends = [event.finished.job for event in events if event.HasField("finished")]
    assert [(job.state, job.output_tokens) for job in ends] == [
        (types_pb2.JOB_STATE_SUCCEEDED, n) for n in (8, 64)
    ]
    found = json_format.Parse(answers[-1], jobs_pb2.GetJobResponse()).job
    assert found.job_id == ends[1].job_id == "tour-1"


@pytest.mark.redis
@pytest.mark.slow
def test_the_program_for_node_runs(
    examples: Path, root: Path, reached: dict[str, str], tmp_path: Path
) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are not on PATH")
    # As in the repository, since the program looks for the contract beside itself.
    place = tmp_path / "docs" / "examples" / "node"
    shutil.copytree(examples / "node", place, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(root / "proto", tmp_path / "proto")
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    installed = subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=False, timeout=NPM_TIMEOUT_S
    )
    if any(word in installed.stderr for word in UNREACHABLE):
        pytest.skip("the npm registry can't be reached")
    assert installed.returncode == 0, installed.stderr
    urgent, ended = run([node, "generate.mjs"], reached, place).strip().rsplit("\n", maxsplit=1)
    assert re.search(r"\n\[FINISH_REASON_LENGTH\]$", urgent)
    assert re.fullmatch(r"\S+: JOB_STATE_SUCCEEDED, 200 tokens, parked \d times", ended)

    refused = subprocess.run(
        [node, "generate.mjs"],
        cwd=place,
        env={**reached, "BATOND_TOKEN": "wrong"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "the token is not valid" in refused.stderr
