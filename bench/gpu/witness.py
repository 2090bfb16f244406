"""What a step really ran on the card, as the profiler saw it: no flag says it, the kernels do."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch.autograd import DeviceType  # type: ignore[attr-defined] # it is not listed there
from torch.profiler import ProfilerActivity, profile

from batond.bench.gpu.timing import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

_LAUNCH: Final = re.compile(r"cu(da)?LaunchKernel")
_GRAPH_LAUNCH: Final = "cudaGraphLaunch"
#: Copies and fills are no kernels.
_NO_KERNEL: Final = ("Memcpy", "Memset")
#: Which kernels are attention: the engine's own, and those that torch's sdpa chooses from.
_ATTENTION: Final = re.compile(r"attend_\w*kernel|flash|fmha|attention|sdpa", re.IGNORECASE)
_NAME_LENGTH: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One step in the profiler's eyes.

    Attributes:
        kernels: Kernels that ran.
        launches: Launched one by one by the host.
        graphs: Captured graphs launched.
        busy_ms: Sum of the kernels' times: the step's, if launches cost nothing.
        attention: Names of the attention kernels; empty where attention is made of general ones.
        attention_ms: Sum of their times.
    """

    kernels: int
    launches: int
    graphs: int
    busy_ms: float
    attention: tuple[str, ...]
    attention_ms: float

    def text(self) -> str:
        """In a few words."""
        attention = ", ".join(self.attention) or "general kernels"
        graphs = f"{self.graphs} graph(s) and" if self.graphs else "no graph,"
        return f"attention by {attention}; {graphs} {self.launches} launches for {self.kernels} kernels"


def watch(device: torch.device, work: Callable[[], object]) -> Seen | None:
    """Do something once under the profiler; None without a card, or where the profiler sees no kernel."""
    if device.type != "cuda":
        return None
    settle(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
        settle(device)
    return summary(seen.events() or ())


def summary(events: Iterable[Any]) -> Seen | None:
    """Sum up a profiler's events."""
    times_us: Counter[str] = Counter()
    kernels = launches = graphs = 0
    for event in events:
        if event.device_type == DeviceType.CUDA:
            if not event.name.startswith(_NO_KERNEL):
                kernels += 1
                times_us[event.name] += event.time_range.elapsed_us()
        elif _LAUNCH.match(event.name):
            launches += 1
        elif event.name == _GRAPH_LAUNCH:
            graphs += 1
    if not kernels:
        return None
    attention = [name for name in times_us if _ATTENTION.search(name)]
    return Seen(
        kernels=kernels,
        launches=launches,
        graphs=graphs,
        busy_ms=sum(times_us.values()) / 1e3,
        attention=tuple(sorted({_short(name) for name in attention})),
        attention_ms=sum(times_us[name] for name in attention) / 1e3,
    )


def _short(name: str) -> str:
    """A kernel's name without its template arguments."""
    bare = re.sub(r"<.*", "", name.removeprefix("void ")).strip()
    return bare[:_NAME_LENGTH]
