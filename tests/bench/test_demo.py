"""`make demo`: the main job on the small real model, as a newcomer runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(600)]


def test_the_demonstration_keeps_its_promise() -> None:
    """S1 and R1 on SmolLM2: one park, equal tokens, exit 0, one summary line."""
    done = subprocess.run(
        [sys.executable, "-m", "batond.bench", "demo"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = " ".join(done.stdout[done.stdout.rindex("OK: ") :].split())
    assert "1 park(s)" in summary
    assert summary.endswith("tokens equal the undisturbed solo run")
    assert "Paris" in done.stdout
