"""Linears of a captured step: a kernel made for few rows, and one launch for those that share their input.

A decode step at few rows is the reading of all weights. A library's products reach 25 to 88 % of the copy
bandwidth there (docs/performance.md), the less the smaller a weight is: each begins and ends by itself. So
queries, keys and values, gate and up are one launch here.

Which linears share their input is known from the run before: a step is run a few times before it is captured.
Models are unmodified: their `torch.nn.Linear` modules are of another class while a step is captured.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from batond.daemon.engine.batch.card_facts import arrived, card_of
from batond.daemon.engine.batch.card_window import launched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: More rows are a library's work: products are bound by arithmetic there.
MOST_ROWS: Final = 64
#: Weights of one launch.
MOST_TOGETHER: Final = 3
#: Rows of a tensor core's tile: fewer rows are padded to so many.
_LEAST_TILE: Final = 16
#: A sum is split until there are so many programs: three quarters of an H200's multiprocessors.
_ENOUGH_PROGRAMS: Final = 100
_MOST_SPLITS: Final = 8
#: Of half precision.
_NUMBER_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class LinearTiling:
    """How a product is cut.

    Attributes:
        tile: Rows of the input, padded.
        block_out: Outputs of a program.
        block_in: Inputs read at once.
        stages: Loads in flight.
        splits: Programs that share a sum.
        transposed: Tensor cores have their wide side in the weight.
    """

    tile: int
    block_out: int
    block_in: int
    stages: int
    splits: int
    transposed: bool


def choose_linear(rows: int, n_out: int, n_in: int, shared_bytes: int) -> LinearTiling | None:
    """The best of a sweep on an H200, see docs/performance.md; None where a library's product is better.

    Args:
        rows: Of the input.
        n_out: Rows of the weight.
        n_in: Columns of the weight.
        shared_bytes: Memory that a program may have of a multiprocessor: it bounds the loads in flight.
    """
    tile = max(_LEAST_TILE, 1 << (rows - 1).bit_length())
    if rows > MOST_ROWS:
        return None
    if tile < MOST_ROWS:
        cut = LinearTiling(tile, block_out=64, block_in=128, stages=4, splits=1, transposed=True)
    elif n_out <= 64 * _ENOUGH_PROGRAMS:
        cut = LinearTiling(tile, block_out=32, block_in=128, stages=6, splits=1, transposed=False)
    else:
        cut = LinearTiling(tile, block_out=128, block_in=64, stages=4, splits=1, transposed=False)
    if n_in % cut.block_in or n_out % _LEAST_TILE:
        return None
    splits, blocks = 1, -(-n_out // cut.block_out)
    while splits < _MOST_SPLITS and blocks * splits < _ENOUGH_PROGRAMS:
        splits *= 2
    load_bytes = (tile + cut.block_out) * cut.block_in * _NUMBER_BYTES
    stages = max(2, min(cut.stages, shared_bytes // load_bytes))
    return LinearTiling(tile, cut.block_out, cut.block_in, stages, splits, cut.transposed)


def streamed_linears(
    inputs: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    tiling: LinearTiling,
) -> list[torch.Tensor]:
    """Up to three linears of the same few rows, by the card's own kernel.

    Args:
        inputs: Shape [rows, inputs], contiguous; bfloat16 or float16.
        weights: Each of shape [outputs, inputs], contiguous, of the same dtype.
        biases: One each, of shape [outputs]; or none at all.
        tiling: How to cut the work.

    Returns:
        Each of shape [rows, outputs]; sums are float32.

    Raises:
        UnsupportedModelError: Triton can't compile it for this card.
    """
    kernels = _kernels()
    rows = inputs.shape[0]
    counts = [weight.shape[0] for weight in weights]
    out = inputs.new_empty(rows * sum(counts))
    blocks = sum(-(-count // tiling.block_out) for count in counts)
    parts = out
    if tiling.splits > 1:
        parts = torch.empty(tiling.splits * out.numel(), dtype=torch.float32, device=out.device)
    launch = functools.partial(
        kernels.linear_kernel[blocks, tiling.splits],
        inputs,
        weights[0],
        biases[0] if biases else out,
        out,
        parts,
        arrived(out.device, blocks),
        rows,
        inputs.shape[1],
        *counts,
        *[0] * (MOST_TOGETHER - len(counts)),
        *_distances(weights),
        *_distances(biases),
        TILE=tiling.tile,
        BLOCK_OUT=tiling.block_out,
        BLOCK_IN=tiling.block_in,
        SPLIT=tiling.splits > 1,
        TRANSPOSED=tiling.transposed,
        BIAS=bool(biases),
        num_warps=4,
        num_stages=tiling.stages,
    )
    launched(launch)
    sizes = [rows * count for count in counts]
    return [part.view(rows, count) for part, count in zip(torch.split(out, sizes), counts, strict=True)]


def _distances(tensors: Sequence[torch.Tensor]) -> list[int]:
    """From the first to the second and third, in numbers."""
    found = [0] * (MOST_TOGETHER - 1)
    for index, tensor in enumerate(tensors[1:]):
        found[index] = (tensor.data_ptr() - tensors[0].data_ptr()) // tensor.element_size()
    return found


@dataclass(slots=True)
class _Call:
    """One linear of a run.

    Attributes:
        weight: Shape [outputs, inputs].
        bias: Shape [outputs], or None.
        joins: It has the same input as the call before.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    joins: bool

    @property
    def key(self) -> tuple[object, ...]:
        """Tells it from other linears, those of a part of its weight or with another bias included."""
        return self.weight.data_ptr(), self.weight.shape, self.bias is not None and self.bias.data_ptr()

    def fits(self, other: _Call) -> bool:
        """Whether one launch can compute both."""
        same = self.weight.dtype == other.weight.dtype and self.weight.shape[1] == other.weight.shape[1]
        return same and (self.bias is None) == (other.bias is None)


class StreamedLinears:
    """The linears of a model, while its step is captured.

    Args:
        model: Its `torch.nn.Linear` modules are of another class inside of `in_use`.
        device: Where it lies.

    Attributes:
        modules: The linears that take part.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.modules = [module for module in model.modules() if _takes_part(module, device)]
        self._known: list[_Call] = []  # Of the run before.
        self._calls: list[_Call] = []  # Of this run, so far.
        self._input: torch.Tensor | None = None  # Of the last call; kept, lest another takes its memory.
        self._version = 0  # Of what was in it then.
        self._ready: dict[tuple[object, ...], torch.Tensor] = {}  # Computed with an earlier one, by its key.

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Run the model's linears here."""
        outer, _running.linears = _running.linears, self
        try:
            for module in self.modules:
                module.__class__ = StreamedLinear
            yield
        finally:
            for module in self.modules:
                module.__class__ = torch.nn.Linear
            _running.linears = outer

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Around one run of the step."""
        self._calls = []
        try:
            yield
        finally:
            self._known, self._calls = self._calls, []
            self._input, self._ready = None, {}

    def compute(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One linear: shape [..., inputs] to [..., outputs]."""
        version = 0 if inputs.is_inference() else inputs._version  # noqa: SLF001 - torch's only name for it
        joins = self._input is not None and _same(inputs, self._input) and version == self._version
        call = _Call(weight, bias, joins)
        self._input, self._version = inputs, version
        self._calls.append(call)
        if not joins:
            self._ready = {}
        out = self._ready.pop(call.key, None)
        if out is None:
            out = self._compute(inputs, call)
        return out.view(*inputs.shape[:-1], weight.shape[0])

    def _compute(self, inputs: torch.Tensor, call: _Call) -> torch.Tensor:
        """This linear, and with it those that will have the same input; shape [rows, outputs]."""
        rows, width = inputs.numel() // inputs.shape[-1], inputs.shape[-1]
        calls = [call, *self._coming_with(call)]
        outputs = sum(one.weight.shape[0] for one in calls)
        tiling = choose_linear(rows, outputs, width, card_of(inputs.device).shared_bytes)
        if tiling is None:
            return functional.linear(inputs, call.weight, call.bias).view(rows, -1)
        flat = inputs.reshape(rows, width).contiguous()
        biases = [one.bias for one in calls if one.bias is not None]
        outs = streamed_linears(flat, [one.weight for one in calls], biases, tiling)
        self._ready = {one.key: out for one, out in zip(calls[1:], outs[1:], strict=True)}
        return outs[0]

    def _is_as_known(self) -> bool:
        """Whether the run goes the way of the one before."""
        place = len(self._calls) - 1
        known = self._known[place : place + 1]
        return bool(known) and known[0].key == self._calls[-1].key

    def _coming_with(self, call: _Call) -> list[_Call]:
        """Those behind it that had its input in the run before."""
        found: list[_Call] = []
        if self._is_as_known():
            for known in self._known[len(self._calls) :]:
                if not known.joins or len(found) == MOST_TOGETHER - 1 or not call.fits(known):
                    break
                found.append(known)
        return found


class _Running(threading.local):
    """Whose linears run in this thread."""

    linears: StreamedLinears | None = None


_running: Final = _Running()


@torch.library.custom_op("batond::linear", mutates_args=())
def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Opaque to the compiler, which fuses what is around it."""
    linears = _running.linears
    if linears is None:  # Another thread runs a model whose step is being captured.
        return functional.linear(inputs, weight, bias)
    return linears.compute(inputs, weight, bias)


@_linear.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG001 - the op's signature
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])


class StreamedLinear(torch.nn.Linear):
    """What a linear is while a step is captured: its class tells a compiler that it is another one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Shape [..., inputs] to [..., outputs]."""
        out: torch.Tensor = _linear(input, self.weight, self.bias)
        return out


def _same(inputs: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether two tensors are the same numbers in the same place."""
    return (
        inputs.data_ptr() == others.data_ptr()
        and inputs.shape == others.shape
        and inputs.stride() == others.stride()
    )


def _takes_part(module: torch.nn.Module, device: torch.device) -> bool:
    """A plain linear in half precision, whole on the device, whose forward nobody has replaced."""
    if type(module) is not torch.nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    return (
        weight.dtype in {torch.bfloat16, torch.float16}
        and weight.device == device
        and weight.is_contiguous()
        and not any((module._forward_hooks, module._forward_pre_hooks))  # noqa: SLF001 - torch has no other way to ask
    )


def _kernels() -> Any:
    from batond.daemon.engine.batch import linear_kernels  # noqa: PLC0415 - there is no Triton without a card

    return linear_kernels
