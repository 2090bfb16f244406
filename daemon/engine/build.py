"""Chooses how a model is served, and proves on the model itself that the choice is exact."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.far import SHORTEST_FAR_TOKENS, far_error, far_tokens, window_error
from batond.daemon.engine.layout import RecordLayout
from batond.daemon.engine.padded import PaddedBatch
from batond.daemon.engine.probe import (
    LONGEST_WINDOW_TOKENS,
    MODEL_ERRORS,
    alone_error,
    chunk_error,
    first_line,
    references,
    replay_error,
    shared_error,
    tolerance,
)
from batond.daemon.engine.recipe import MaskForm, Recipe
from batond.daemon.engine.uncached import UncachedBatch
from batond.daemon.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers.cache_utils import Cache

    from batond.daemon.engine.batch import Batch
    from batond.daemon.engine.model import CausalModel
    from batond.daemon.engine.prefill import PromptBatch
    from batond.daemon.engine.probe import MakeBatch, Question, References

_BESIDE = "beside another query, parked and moved, logits stay within"
_IN_TURN = "taking turns, logits stay within"
_LAYOUT_SIZES = (1, 2, 2, 5)  # Rows of two forwards, then columns of both.


@dataclass(frozen=True, slots=True)
class Serving:
    """How a model is served.

    Attributes:
        batch: The empty decode batch.
        new_prefill_batch: Makes an empty batch of one row for a prompt.
        reason: Why so.
        chunkable: Prompts may be computed in parts; otherwise each takes one forward.
        replay_by_step: Emitted tokens must be recomputed one by one: in one forward they come out otherwise.
        preemption_mode: "offload", or "recompute" where a parked query keeps nothing but its tokens.
    """

    batch: Batch
    new_prefill_batch: Callable[[], PromptBatch]
    reason: str
    chunkable: bool = True
    replay_by_step: bool = False
    preemption_mode: str = "offload"


def probe_layout(model: CausalModel) -> RecordLayout:
    """Read the byte layout of the model's cache from two forwards of different size.

    Raises:
        UnsupportedModelError: The model refuses the forward, or its cache can't be described.
    """
    rows, more_rows, columns, more_columns = _LAYOUT_SIZES
    try:
        small = _probe_cache(model, rows, columns)
        large = _probe_cache(model, more_rows, more_columns)
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"a forward over {columns} tokens failed: {type(error).__name__}: {first_line(error)}"
        ) from error
    layout = RecordLayout.between(small, large, _LAYOUT_SIZES)
    model.use_template(small)
    return layout


def choose_batch(kind: str, model: CausalModel, rows: int, *, one_at_a_time: bool = False) -> Serving:
    """Find a way to serve the model exactly.

    Args:
        kind: "auto", "padded" or "ring".
        model: The model; its recipe is set.
        rows: Rows of the batch.
        one_at_a_time: Serve a model that no shared batch serves exactly in a batch of one row.

    Raises:
        ConfigError: The kind is unknown, or not there yet.
        UnsupportedModelError: The model's tokens would depend on batch mates or parks.
    """
    if kind == "ring":
        raise ConfigError('batch "ring" is not available yet: use "auto" or "padded"', batch=kind)
    if kind not in {"auto", "padded"}:
        raise ConfigError(f'batch must be "auto", "padded" or "ring", not {kind!r}', batch=kind)
    trial = _Trial(model)
    ways = [_shared(trial, rows)]
    if one_at_a_time:
        ways.append(_alone(trial))
    for serving in itertools.chain(*ways):
        return serving
    advice = "" if one_at_a_time else "; allow one_at_a_time to try it in a batch of one row"
    raise UnsupportedModelError(f"no batch serves this model exactly: {trial.why}{advice}", model=model.name)


class _Trial:
    """Tries ways to serve a model and remembers why some failed."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.reasons: list[str] = []
        self._queries = references(model)

    @property
    def why(self) -> str:
        """The reasons in one line, each once."""
        return "; ".join(dict.fromkeys(self.reasons))

    def error(self, question: Question, make: MakeBatch, what: str) -> float | None:
        """The largest difference, if rounding explains it; else None, and a reason more."""
        try:
            found = question(make, self._queries)
        except (*MODEL_ERRORS, UnsupportedModelError) as failure:
            self.reasons.append(f"{what}: {type(failure).__name__}: {first_line(failure)}")
            return None
        allowed = tolerance(self.model)
        if found <= allowed:
            return found
        self.reasons.append(f"{what}: logits differ by {found:.1e} from generate's (allowed {allowed:.0e})")
        return None

    def holds(self, question: Question, make: MakeBatch) -> bool:
        """Whether a further promise holds; no reason is kept."""
        kept = list(self.reasons)
        holds = self.error(question, make, "") is not None
        self.reasons = kept
        return holds

    def _windows_hold(self, layout: RecordLayout, make: MakeBatch, what: str) -> bool:
        """Whether windows too wide for the probe queries are applied as transformers' cache applies them."""
        window = self.model.window_tokens
        if not LONGEST_WINDOW_TOKENS < window < self.model.max_context_tokens:
            return True

        def question(make_batch: MakeBatch, _queries: References) -> float:
            return window_error(self.model, layout, make_batch, window + 8)

        return self.error(question, make, f"{what}, behind a window of {window}") is not None

    def far_holds(self, layout: RecordLayout, make: MakeBatch, what: str) -> bool:
        """Whether padding still changes nothing behind thousands of tokens."""
        if not layout.token_slots or far_tokens(self.model, layout) < SHORTEST_FAR_TOKENS:
            return True

        def question(make_batch: MakeBatch, _queries: References) -> float:
            return far_error(self.model, layout, make_batch)

        tokens = far_tokens(self.model, layout)
        return self.error(question, make, f"{what}, behind {tokens} tokens") is not None

    def recipes(self) -> Iterator[tuple[str, RecordLayout, MakeBatch]]:
        """Every recipe that runs, set on the model: its name, the cache's layout, the batch that uses it."""
        if not self.model.takes_cache:
            return
        for own_cache in (False, True):
            self.model.recipe = Recipe(own_cache=own_cache)
            try:
                layout = probe_layout(self.model)
            except UnsupportedModelError as error:
                self.reasons.append(error.message)
                continue
            forms = [MaskForm.COLUMNS, MaskForm.FLOAT]
            if self.model.has_windows:
                forms.append(MaskForm.WINDOW)
            if layout.state_slots and not layout.token_slots:
                forms = [MaskForm.NONE]
            for form in forms:
                self.model.recipe = replace(self.model.recipe, mask=form)
                make = _padded_maker(self.model, layout)
                if self._windows_hold(layout, make, f"mask {form.value}"):
                    yield f"padded, mask {form.value}", layout, make
            return  # A cache the model takes is as good as its own.


def _shared(trial: _Trial, rows: int) -> Iterator[Serving]:
    """Ways in which queries share forwards, best first."""
    for name, layout, make in trial.recipes():
        error = trial.error(shared_error, make, name)
        if error is not None and trial.far_holds(layout, make, name):
            yield _padded(trial, make, rows, f"{name}: {_BESIDE} {error:.1e} of generate's")
    if not trial.model.takes_cache:
        trial.model.recipe = Recipe()
        make = _uncached_maker(trial.model, shared=True)
        error = trial.error(shared_error, make, "without a cache")
        if error is not None:
            yield _uncached(make, rows, f"the model takes no cache: {_BESIDE} {error:.1e} of generate's")


def _alone(trial: _Trial) -> Iterator[Serving]:
    """Ways in which each query has the model for itself."""
    why = f"no shared batch is exact ({trial.why})"
    for name, _, make in trial.recipes():
        error = trial.error(alone_error, make, f"alone, {name}")
        if error is not None:
            yield _padded(trial, make, 1, f"one at a time, {why}: {_IN_TURN} {error:.1e} of generate's")
    make = _uncached_maker(trial.model, shared=False)
    error = trial.error(alone_error, make, "alone without a cache")
    if error is not None:
        reason = f"one at a time and without a cache, {why}: {_IN_TURN} {error:.1e} of generate's"
        yield _uncached(make, 1, reason)


def _padded(trial: _Trial, make: MakeBatch, rows: int, reason: str) -> Serving:
    # A model that no shared batch serves is computed in just the steps that `generate` takes.
    alone = rows == 1 and bool(trial.reasons)
    chunkable = not alone and trial.holds(chunk_error, make)
    if trial.model.limit_reason:
        reason += f"; queries end at {trial.model.max_context_tokens} tokens: {trial.model.limit_reason}"
    if not chunkable:
        reason += "; prompts in one forward: chunks would change the result"
    return Serving(
        make(rows),
        lambda: make(1),
        reason,
        chunkable=chunkable,
        replay_by_step=alone or not trial.holds(replay_error, make),
    )


def _uncached(make: MakeBatch, rows: int, reason: str) -> Serving:
    return Serving(make(rows), lambda: make(1), reason, preemption_mode="recompute")


def _padded_maker(model: CausalModel, layout: RecordLayout) -> MakeBatch:
    return lambda rows: PaddedBatch(model, rows, layout)


def _uncached_maker(model: CausalModel, *, shared: bool) -> MakeBatch:
    return lambda rows: UncachedBatch(model, rows, shared=shared)


def _probe_cache(model: CausalModel, rows: int, columns: int) -> Cache:
    ids = 1 + torch.arange(rows * columns, device=model.device).view(rows, columns) % (model.vocab_size - 1)
    positions = torch.arange(columns, device=model.device).expand(rows, columns)
    cache = None if model.recipe.own_cache else model.new_cache()
    output = model.run(ids, torch.ones_like(ids), positions, cache)
    return cache if cache is not None else model.cache_of(output)
