"""Policies and planner are pure: they load without torch, on the light install."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "redis", "grpc", "pydantic")


@pytest.mark.parametrize(
    "modules",
    [
        "batond.policies.registry, batond.policies.classes",
        "batond.policies.fcfs, batond.policies.priority, batond.policies.deadline",
        "batond.policies.fair, batond.policies.mlfq, batond.policies.shortest",
        "batond.daemon.scheduler.planner, batond.daemon.scheduler.plan",
    ],
)
def test_import_needs_no_heavy_library(modules: str) -> None:
    code = f"import sys; import {modules}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
