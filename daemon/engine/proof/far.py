"""Looks thousands of tokens ahead for the price of a step: what the probe queries are too short to reach.

Sparse attention, block selection and wide windows change nothing before a context is longer than their
budget. Made-up keys and values stand for such a context; one step over them, alone and left-padded beside a
longer mate, shows whether the model selects by absolute columns, and whether its selection is defined at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batond.daemon.engine.model.recipe import Recipe
from batond.daemon.engine.proof.probe import relative_error
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from batond.daemon.engine.batch.prefill import PromptBatch
    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.engine.proof.probe import Way
    from batond.offload.slice import KVSlice

FAR_TOKENS = 4200  # Beyond the selection budgets of 2048 in use.
SHORTEST_FAR_TOKENS = 32  # Nearer, the probe queries say as much.
_MOST_BYTES = 1 << 30
_FAR_CHUNK = (3, 5, 7)
_PADDING_COLUMNS = 3  # Odd: shifts the blocks of every block size but 3.
FAR_SPARE_COLUMNS = _PADDING_COLUMNS + len(
    _FAR_CHUNK
)  # What a ring needs beyond: the longer mate, and a step.
_MOST_EQUAL_SCORES = 2  # Of thousands of single-precision scores, a third equal one is no accident.
_MOST_EQUAL_SHARE_HALF = 0.02  # Half precision has few numbers; more than this is no accident either.


def far_tokens(model: CausalModel, layout: RecordLayout) -> int:
    """How far can be looked: within the context, and within a gibibyte."""
    room = model.max_context_tokens - _PADDING_COLUMNS - 2
    return min(FAR_TOKENS, room, _MOST_BYTES // max(layout.record_bytes, 1))


def far_error(model: CausalModel, layout: RecordLayout, way: Way) -> float:
    """Relative difference of a step behind many made-up tokens, alone and left-padded beside a longer mate.

    Raises:
        UnsupportedModelError: The model chooses among columns whose scores are equal. Which of them `topk`
            takes is not defined and changes with the columns' number, so padding would change tokens.
    """
    tokens = far_tokens(model, layout)
    # Drawn on the device: a host takes many seconds for a gigabyte.
    noise = torch.Generator(model.device).manual_seed(1)
    mate = layout.random(tokens + _PADDING_COLUMNS, model.device, noise)
    half, _ = _watched_step(layout.random(tokens // 2, model.device, noise), way)
    mine = layout.random(tokens, model.device, noise)
    whole, alone = _watched_step(mine, way)
    same_calls = len(half) == len(whole)
    for number, (columns, tied) in enumerate(whole):
        # What grows with the columns is no choice among experts; some choose only behind their budget.
        if tied and columns > (half[number][0] if same_calls else tokens // 2):
            raise UnsupportedModelError(
                "the model selects among columns whose scores are equal; which of them it takes is not"
                " defined and depends on padding"
            )
    pair = way.batch(2)
    pair.embed(0, mine)
    pair.embed(1, mate)
    beside = pair.step({0: [3], 1: [4]})[0]
    return relative_error(beside, alone)


def far_chunk_error(model: CausalModel, layout: RecordLayout, way: Way) -> float:
    """Relative difference of three tokens behind many made-up ones, computed in one forward and one by one.

    Shows whether a choice among columns that begins far away sees a chunk as it sees its tokens.
    """
    kv = layout.random(far_tokens(model, layout), model.device, torch.Generator(model.device).manual_seed(1))
    together, apart = way.prompt(), way.prompt()
    together.embed(0, kv)
    chunk = together.step({0: list(_FAR_CHUNK)})[0]
    apart.embed(0, kv)
    for token in _FAR_CHUNK:
        last = apart.step({0: [token]})[0]
    return relative_error(chunk, last)


def window_error(
    model: CausalModel, layout: RecordLayout, batch: PromptBatch | Batch, tokens: int, new: list[int]
) -> float:
    """Relative difference of a step behind `tokens` made-up tokens: ours, and with transformers' own cache.

    Shows whether a wide window is applied by the model's masks, which the batch passes on, or by its cache
    forgetting columns, which the batch's cache doesn't.

    Args:
        model: The model.
        layout: Of its cache.
        batch: An empty batch under test.
        tokens: More than the window.
        new: What the step computes: one token, or a chunk of a prompt.
    """
    kv = layout.random(tokens, model.device, torch.Generator(model.device).manual_seed(1))
    batch.embed(0, kv)
    ours = batch.step({0: new})[0]
    cache = model.transformers_cache(layout, kv)
    ids = torch.tensor([new], device=model.device)
    positions = torch.arange(tokens, tokens + len(new), device=model.device)[None]
    seen = torch.ones(1, tokens + len(new), dtype=torch.int64, device=model.device)
    theirs = model.forward(ids, seen, positions, cache, recipe=Recipe())[0]
    return relative_error(ours, theirs)


def _watched_step(kv: KVSlice, way: Way) -> tuple[list[tuple[int, bool]], torch.Tensor]:
    """One step behind a slice: what was selected from, and the logits."""
    batch = way.batch(1)
    batch.embed(0, kv)
    with _SelectionWatch() as watch:
        logits = batch.step({0: [3]})[0]
    return watch.choices, logits


class _SelectionWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the class untyped
    """Notes what `topk` and `sort` choose from.

    Attributes:
        choices: Of each call, how many scores it chose among, and whether more were equal than by chance.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the scores, then do what was asked."""
        name = func.overloadpacket.__name__
        if name in {"topk", "sort"} and args[0].is_floating_point() and args[0].ndim:
            place = 2 if name == "topk" else 1
            axis = args[place] if len(args) > place and isinstance(args[place], int) else -1
            scores = args[0].movedim(axis, -1)
            self.choices.append((scores.shape[-1], _equal_scores(scores)))
        return func(*args, **(kwargs or {}))


def _equal_scores(scores: torch.Tensor) -> bool:
    """Whether more of the visible scores are equal than chance explains.

    Args:
        scores: Shape [..., columns]; masked columns hold the lowest numbers of their type.
    """
    lowest = torch.finfo(scores.dtype).min / 2
    half = scores.dtype in {torch.float16, torch.bfloat16}
    for line in scores.reshape(-1, scores.shape[-1]):
        visible = line[torch.isfinite(line) & (line > lowest)]
        if visible.numel() == 0:
            continue
        most = int(torch.unique(visible, return_counts=True)[1].max())
        allowed = max(_MOST_EQUAL_SCORES, _MOST_EQUAL_SHARE_HALF * visible.numel() if half else 0)
        if most > allowed:
            return True
    return False
