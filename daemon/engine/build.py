"""Chooses the batch for a model and proves on the model itself that the choice is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.layout import RecordLayout
from batond.daemon.engine.padded import PaddedBatch
from batond.daemon.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from batond.daemon.engine.batch import Batch
    from batond.daemon.engine.model import CausalModel

_PROBE_LENGTHS = (5, 9)  # The query under test, and a longer batch mate: both embedding cases occur.
_PROBE_STEPS = 4
_RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def probe_layout(model: CausalModel) -> RecordLayout:
    """Read the byte layout of the model's cache from a forward over two tokens.

    Raises:
        UnsupportedModelError: The model refuses the forward, or its cache can't be described.
    """
    cache = model.new_cache()
    ids = torch.tensor([[1 % model.vocab_size, 2 % model.vocab_size]], device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    try:
        model.forward(ids, torch.ones_like(ids), positions, cache)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
        KeyError,
        NotImplementedError,
    ) as error:
        raise UnsupportedModelError(
            f"a forward over two tokens failed: {type(error).__name__}: {error}"
        ) from error
    return RecordLayout.of(cache)


def choose_batch(kind: str, model: CausalModel, rows: int, layout: RecordLayout) -> tuple[Batch, str]:
    """Make the batch that serves the model.

    Args:
        kind: "auto", "padded" or "ring".
        model: The model.
        rows: Rows of the batch.
        layout: Its cache's layout.

    Returns:
        An empty batch, and why it was chosen.

    Raises:
        ConfigError: The kind is unknown, or not there yet.
        UnsupportedModelError: The model's tokens would depend on batch mates or parks.
    """
    if kind == "ring":
        raise ConfigError('batch "ring" is not available yet: use "auto" or "padded"', batch=kind)
    if kind not in {"auto", "padded"}:
        raise ConfigError(f'batch must be "auto", "padded" or "ring", not {kind!r}', batch=kind)
    error = _padded_error(model, layout)
    tolerance = _RELATIVE_TOLERANCE.get(model.dtype, 1e-1)
    if not error <= tolerance:  # NaN must not pass.
        raise UnsupportedModelError(
            f"a probe query's logits changed by {error:.1e} (relative; allowed {tolerance:.0e}) when it was"
            " embedded beside another query, parked and embedded in another row",
            model=model.name,
        )
    reason = f"probe: embedded and parked logits equal the undisturbed run's within {error:.1e}"
    return PaddedBatch(model, rows, layout), reason


def _padded_error(model: CausalModel, layout: RecordLayout) -> float:
    """Largest relative difference between a disturbed and an undisturbed run of one query."""
    mine, mate = (
        _probe_tokens(model, length, step) for length, step in zip(_PROBE_LENGTHS, (7, 11), strict=True)
    )
    tail = _probe_tokens(model, _PROBE_STEPS, 13)
    try:
        alone = _run_alone(model, layout, mine, tail)
        disturbed = _run_disturbed(model, layout, mine, mate, tail)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
        KeyError,
        NotImplementedError,
    ) as error:
        raise UnsupportedModelError(f"the probe failed: {type(error).__name__}: {error}") from error
    return float((disturbed - alone).norm() / alone.norm())


def _run_alone(model: CausalModel, layout: RecordLayout, mine: list[int], tail: list[int]) -> torch.Tensor:
    """Logits of one query that never shares a batch, shape [steps, vocabulary]."""
    solo = PaddedBatch(model, 1, layout)
    solo.step({0: mine})
    return torch.stack([solo.step({0: [token]})[0] for token in tail])


def _run_disturbed(
    model: CausalModel, layout: RecordLayout, mine: list[int], mate: list[int], tail: list[int]
) -> torch.Tensor:
    """The same query, prefilled in two chunks, embedded beside a mate, parked and embedded in another row."""
    first, second, batch = (
        PaddedBatch(model, 1, layout),
        PaddedBatch(model, 1, layout),
        PaddedBatch(model, 3, layout),
    )
    half = len(mine) // 2
    first.step({0: mine[:half]})
    first.step({0: mine[half:]})
    second.step({0: mate})
    batch.embed(0, first.extract(0))
    logits = [batch.step({0: [tail[0]]})[0]]
    batch.embed(1, second.extract(0))
    logits.append(batch.step({0: [tail[1]], 1: [tail[0]]})[0])
    parked = batch.extract(0)
    batch.free(0)
    batch.step({1: [tail[2]]})
    batch.embed(2, parked)
    logits.append(batch.step({1: [tail[3]], 2: [tail[2]]})[2])
    batch.free(1)
    logits.append(batch.step({2: [tail[3]]})[2])
    return torch.stack(logits)


def _probe_tokens(model: CausalModel, count: int, stride: int) -> list[int]:
    return [(3 + stride * place) % model.vocab_size for place in range(count)]
