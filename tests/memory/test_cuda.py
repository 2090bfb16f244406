"""A real card by NVML, and a real neighbour on it. Run by hand, without -n: `pytest -m gpu tests/memory`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from batond.daemon.memory.nvml import NvmlSource

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
    pytest.mark.skipif(
        "PYTEST_XDIST_WORKER" in os.environ, reason="measures the memory of the whole card: run it without -n"
    ),
]

GIB = 1 << 30
NEIGHBOUR = """
import sys, torch
block = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def source() -> Iterator[NvmlSource]:
    properties = torch.cuda.get_device_properties(0)
    source = NvmlSource(str(properties.uuid), int(properties.total_memory))
    yield source
    source.close()


def test_nvml_and_cuda_speak_of_the_same_memory(source: NvmlSource) -> None:
    """M9: found by its UUID, whatever `CUDA_VISIBLE_DEVICES` shows of the host."""
    torch.zeros(1, device="cuda")
    free_bytes, _ = torch.cuda.mem_get_info()
    assert abs(source.read().free_bytes - free_bytes) < GIB
    before = source.read()
    block = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    assert 1.9 * GIB < before.free_bytes - source.read().free_bytes < 2.5 * GIB
    del block
    torch.cuda.empty_cache()


def test_a_neighbours_memory_is_seen_without_its_process_id(source: NvmlSource) -> None:
    """M8, M9: it comes, and goes."""
    before = source.read()
    neighbour = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, str(4 * GIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert neighbour.stdin is not None
    assert neighbour.stdout is not None
    assert neighbour.stdout.readline() == "there\n"
    assert before.free_bytes - source.read().free_bytes > 3.9 * GIB
    neighbour.stdin.close()
    assert neighbour.wait(60) == 0
    assert before.free_bytes - source.read().free_bytes < GIB
