"""The engine: model, batch, planner, copies. One step at a time.

`LocalEngine` needs torch and is imported on first use, so that the front process, which only wants
`SamplingParams`, stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batond.daemon.errors import UnsupportedModelError
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from batond.daemon.engine.local import LocalEngine

__all__ = ["LocalEngine", "SamplingParams", "UnsupportedModelError"]


def __getattr__(name: str) -> Any:
    if name == "LocalEngine":
        from batond.daemon.engine.local import LocalEngine  # noqa: PLC0415 - pulls in torch

        return LocalEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
