"""Memory that runs out on cue: at chosen operations of torch, wherever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Container


def _allocates(function: Any) -> bool:
    """Whether an operation makes a tensor of its own: neither a view nor a change in place."""
    returns = function._schema.returns  # noqa: SLF001 - torch has no public name for it
    return bool(returns) and all(str(one.type) == "Tensor" and one.alias_info is None for one in returns)


class Allocations(TorchDispatchMode):
    """Counts the operations that take memory while it is entered, and fails at the chosen ones.

    Args:
        fail_at: Numbers of those that find none, from 0.

    Attributes:
        count: Operations so far.
        failed: Those that found no memory.
    """

    def __init__(self, fail_at: Container[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count = self.failed = 0
        self._fail_at = fail_at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation, or don't."""
        if _allocates(func):
            number, self.count = self.count, self.count + 1
            if number in self._fail_at:
                self.failed += 1
                raise torch.OutOfMemoryError(f"CUDA out of memory, in a test: allocation {number}")
        return func(*args, **(kwargs or {}))
