"""What the profiler tells, summed up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType

from batond.bench.gpu.witness import summary, watch


def event(name: str, device: Any = DeviceType.CPU, took_us: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: took_us)
    )


def kernel(name: str, took_us: float) -> SimpleNamespace:
    return event(name, DeviceType.CUDA, took_us)


def test_a_captured_step_with_the_engines_kernel() -> None:
    seen = summary(
        [
            event("cudaGraphLaunch"),
            event("cudaLaunchKernel"),
            event("aten::mm"),
            kernel("attend_kernel", 1000.0),
            kernel("attend_kernel", 500.0),
            kernel("gemm", 2500.0),
            kernel("Memcpy HtoD (Pinned -> Device)", 9999.0),
        ]
    )
    assert seen is not None
    assert (seen.kernels, seen.launches, seen.graphs) == (3, 1, 1)
    assert (seen.busy_ms, seen.attention_ms) == (4.0, 1.5)
    assert seen.text() == "attention by attend_kernel; 1 graph(s) and 1 launches for 3 kernels"


def test_an_eager_step_with_torchs_attention() -> None:
    name = "void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64>>(Params)"
    seen = summary([event("cudaLaunchKernelExC"), event("cuLaunchKernel"), kernel(name, 10.0)])
    assert seen is not None
    assert (seen.launches, seen.graphs) == (2, 0)
    assert seen.text() == (
        "attention by pytorch_flash::flash_fwd_splitkv_kernel; no graph, 2 launches for 1 kernels"
    )


def test_attention_of_general_kernels_is_not_named() -> None:
    seen = summary([event("cudaLaunchKernel"), kernel("gemm", 5.0), kernel("softmax_warp_forward", 5.0)])
    assert seen is not None
    assert seen.attention == ()
    assert seen.text().startswith("attention by general kernels")


def test_nothing_is_watched_without_a_card() -> None:
    done: list[int] = []
    assert watch(torch.device("cpu"), lambda: done.append(1)) is None
    assert summary([event("cudaLaunchKernel")]) is None
    assert done == []
