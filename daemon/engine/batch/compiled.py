"""The small parts of a model, compiled for the time in which its step is captured.

Norms, activations between linears and rotary embeddings are a dozen kernels each where one would do, and a
step at small batch is little else. They are compiled part by part, not as one program: attention and cache
stay the batch's own, a class of modules is compiled once for all layers, and a handful of programs serve all
row counts. Outside of a capture the model runs as it is.

Compiled parts keep the roundings between operations, as the eager model has them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What families call the function that turns queries and keys by their positions.
_ROTARY: Final = "apply_rotary_pos_emb"
#: Shapes of one class of modules (all norms of a model, say), each for one, a fixed and any number of rows.
_MOST_PROGRAMS: Final = 64


class CompiledParts:
    """The parts of a model that are worth compiling.

    Args:
        model: The model; it is changed inside of `in_use` only.

    Attributes:
        modules: Those whose forward is compiled: norms, and linears with an activation between them.
        homes: Python modules of the family whose rotary function is compiled.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = [module for module in model.modules() if _is_norm(module) or _is_mlp(module)]
        homes = {sys.modules.get(type(module).__module__) for module in model.modules()}
        self.homes = sorted(
            (home for home in homes if home is not None and hasattr(home, _ROTARY)),
            key=lambda home: home.__name__,
        )
        self._by_class = {
            kind: compile_function(kind.forward) for kind in {type(module) for module in self.modules}
        }
        self._rotary = [compile_function(getattr(home, _ROTARY)) for home in self.homes]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Run the model with its parts compiled; each compiles when it is first run on a new shape."""
        usual = [getattr(home, _ROTARY) for home in self.homes]
        with _few_programs_by_one_process():
            try:
                for module in self.modules:
                    module.forward = functools.partial(self._by_class[type(module)], module)
                for home, function in zip(self.homes, self._rotary, strict=True):
                    setattr(home, _ROTARY, function)
                yield
            finally:
                for module in self.modules:
                    vars(module).pop("forward", None)
                for home, function in zip(self.homes, usual, strict=True):
                    setattr(home, _ROTARY, function)


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiles when it is called, with the roundings of the eager one."""
    compiled: Callable[..., Any] = torch.compile(function, options={"emulate_precision_casts": True})
    return compiled


@contextlib.contextmanager
def _few_programs_by_one_process() -> Iterator[None]:
    """Let a class of modules have a program for each shape; start no pool of compilers, which would stay."""
    from torch._dynamo import config as dynamo  # noqa: PLC0415 - heavy, and needed on cards only
    from torch._inductor import config as inductor  # noqa: PLC0415 - likewise

    with dynamo.patch(recompile_limit=_MOST_PROGRAMS), inductor.patch(compile_threads=1):
        yield


def _is_norm(module: torch.nn.Module) -> bool:
    """A module of the family's own that only scales: it has vectors, and no part of its own."""
    parameters = list(module.parameters(recurse=False))
    own = not type(module).__module__.startswith("torch.") and "forward" not in vars(module)
    return own and not list(module.children()) and bool(parameters) and all(p.ndim == 1 for p in parameters)


def _is_mlp(module: torch.nn.Module) -> bool:
    """Linears and nothing else with weights, of one input: attention takes more."""
    children = list(module.children())
    linears = [child for child in children if type(child) is torch.nn.Linear]
    others = [child for child in children if child not in linears]
    plain = not any(True for child in others for _ in (*child.children(), *child.parameters()))
    inputs = inspect.signature(type(module).forward).parameters
    return len(linears) > 1 and plain and len(inputs) == 2 and "forward" not in vars(module)  # noqa: PLR2004 - self, and one
