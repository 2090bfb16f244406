"""Chooses how a model is served, and proves on the model itself that the choice is exact."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.arena import plan_arena
from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.batch.uncached import UncachedBatch
from batond.daemon.engine.model.layout import RecordLayout
from batond.daemon.engine.model.recipe import MaskForm, Recipe
from batond.daemon.engine.proof.far import (
    FAR_SPARE_COLUMNS,
    SHORTEST_FAR_TOKENS,
    far_chunk_error,
    far_error,
    far_tokens,
    window_error,
)
from batond.daemon.engine.proof.probe import (
    LONGEST_WINDOW_TOKENS,
    MODEL_ERRORS,
    SHARED_ROWS,
    Way,
    alone_error,
    alone_references,
    chunk_error,
    first_line,
    memory_named,
    references,
    replay_error,
    shared_error,
    tolerance,
)
from batond.daemon.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers.cache_utils import Cache

    from batond.daemon.engine.batch.prefill import PromptBatch
    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.proof.probe import Question, References

_BESIDE = "beside another query, parked and moved, logits stay within"
_IN_TURN = "taking turns, logits stay within"
_FAR_CHUNK = 16  # Columns that the looks behind a window need beyond it.
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
        capacity: Columns of the ring, which bound a query's tokens; None without a ring.
    """

    batch: Batch
    new_prefill_batch: Callable[[], PromptBatch]
    reason: str
    chunkable: bool = True
    replay_by_step: bool = False
    preemption_mode: str = "offload"
    capacity: int | None = None


def probe_layout(model: CausalModel) -> RecordLayout:
    """Read the byte layout of the model's cache from two forwards of different size.

    Raises:
        UnsupportedModelError: The model refuses the forward, or its cache can't be described.
    """
    rows, more_rows, columns, more_columns = _LAYOUT_SIZES
    try:
        with memory_named():
            small = _probe_cache(model, rows, columns)
            large = _probe_cache(model, more_rows, more_columns)
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"a forward over {columns} tokens failed: {type(error).__name__}: {first_line(error)}"
        ) from error
    layout = RecordLayout.between(small, large, _LAYOUT_SIZES)
    model.use_template(small)
    return layout


def choose_batch(
    kind: str,
    model: CausalModel,
    rows: int,
    *,
    max_query_tokens: int | None = None,
    one_at_a_time: bool = False,
    deterministic: bool = False,
) -> Serving:
    """Find a way to serve the model exactly.

    Args:
        kind: "auto", "padded" or "ring".
        model: The model; its recipe is set.
        rows: Rows of the batch.
        max_query_tokens: Most tokens of a query, which are the columns of a ring; None is as many as the
            model's context has and as fit into memory.
        one_at_a_time: Serve a model that no shared batch serves exactly in a batch of one row.
        deterministic: No bit of a query may depend on its mates.

    Raises:
        ConfigError: The kind is unknown, or the ring doesn't fit into memory.
        UnsupportedModelError: The model's tokens would depend on batch mates or parks.
    """
    if kind not in {"auto", "padded", "ring"}:
        raise ConfigError(f'batch must be "auto", "padded" or "ring", not {kind!r}', batch=kind)
    trial = _Trial(model, deterministic=deterministic, rows=rows)
    ways = [_shared(trial, kind, rows, max_query_tokens)]
    if one_at_a_time and kind != "ring" and not deterministic:
        ways.append(_alone(trial))
    for serving in itertools.chain(*ways):
        return serving
    raise UnsupportedModelError(_refusal(trial, kind, one_at_a_time=one_at_a_time), model=model.name)


def _refusal(trial: _Trial, kind: str, *, one_at_a_time: bool) -> str:
    """Why no way was found, and what to try."""
    if trial.deterministic:
        why = trial.ring_reason or trial.why
        return f"the model can't be served deterministically: {why}; without, it may be served exactly"
    if kind == "ring":
        why = trial.ring_reason or trial.why
        return f'no ring serves this model exactly: {why}; "auto" serves it another way if one is exact'
    advice = "" if one_at_a_time else "; allow one_at_a_time to try it in a batch of one row"
    return f"no batch serves this model exactly: {trial.why}{advice}"


class _Trial:
    """Tries ways to serve a model and remembers why some failed."""

    def __init__(self, model: CausalModel, *, deterministic: bool, rows: int) -> None:
        self.model = model
        self.deterministic = deterministic
        self._rows = rows
        self.reasons: list[str] = []
        self.ring_reason = ""
        self._queries = references(model)

    @property
    def longest_query_tokens(self) -> int:
        """Tokens of the longest probe query, the output's included."""
        return max(len(query.prompt) + len(query.tokens) for query in self._queries)

    @property
    def why(self) -> str:
        """The reasons in one line, each once."""
        return "; ".join(dict.fromkeys(self.reasons))

    def error(self, question: Question, way: Way, what: str) -> float | None:
        """The largest difference, if rounding explains it; else None, and a reason more."""
        try:
            with memory_named():
                found = question(way, self._queries)
        except (*MODEL_ERRORS, UnsupportedModelError) as failure:
            self.reasons.append(f"{what}: {type(failure).__name__}: {first_line(failure)}")
            return None
        allowed = tolerance(self.model)
        if found <= allowed:
            return found
        self.reasons.append(f"{what}: logits differ by {found:.1e} from generate's (allowed {allowed:.0e})")
        return None

    def holds(self, question: Question, way: Way) -> bool:
        """Whether a further promise holds; no reason is kept."""
        kept = list(self.reasons)
        holds = self.error(question, way, "") is not None
        self.reasons = kept
        return holds

    @property
    def _crossed_window(self) -> int:
        """The model's sliding window, if it is too wide for the probe queries; else 0."""
        window = self.model.window_tokens
        return window if LONGEST_WINDOW_TOKENS < window < self.model.max_context_tokens - _FAR_CHUNK else 0

    def windows_hold(self, layout: RecordLayout, way: Way, what: str) -> bool:
        """Whether windows too wide for the probe queries are applied as transformers' cache applies them."""
        window = self._crossed_window
        if not window:
            return True

        def question(tried: Way, _queries: References) -> float:
            return window_error(self.model, layout, tried.batch(1), window + 8, [3])

        return self.error(question, way, f"{what}, behind a window of {window}") is not None

    def chunks_hold(self, layout: RecordLayout, way: Way) -> bool:
        """Whether prompts may be computed in chunks, behind a wide window too."""
        window = self._crossed_window

        def question(tried: Way, _queries: References) -> float:
            return window_error(self.model, layout, tried.prompt(), window + 8, [3, 5, 7])

        return self.holds(chunk_error, way) and (not window or self.holds(question, way))

    def far_chunks_hold(self, layout: RecordLayout, way: Way) -> bool:
        """Whether tokens computed together, thousands behind the first, are what each alone would be."""

        def question(tried: Way, _queries: References) -> float:
            return far_chunk_error(self.model, layout, tried)

        return not self._sees_far(layout) or self.holds(question, way)

    def _sees_far(self, layout: RecordLayout) -> bool:
        """Whether made-up tokens reach further than the probe queries."""
        return bool(layout.token_slots) and far_tokens(self.model, layout) >= SHORTEST_FAR_TOKENS

    def far_holds(self, layout: RecordLayout, way: Way, what: str) -> bool:
        """Whether padding still changes nothing behind thousands of tokens."""
        if not self._sees_far(layout):
            return True

        def question(tried: Way, _queries: References) -> float:
            return far_error(self.model, layout, tried)

        tokens = far_tokens(self.model, layout)
        return self.error(question, way, f"{what}, behind {tokens} tokens") is not None

    def same_bits(self, way: Way, what: str) -> bool:
        """Whether mates, parks and rows change no bit, where that is asked for.

        The number of rows is that of the batch to be built (three at least): kernels are chosen by it.
        """
        if not self.deterministic:
            return True
        rows = max(self._rows, SHARED_ROWS)
        fixed = Way(lambda _: way.batch(rows), way.prompt)
        alone = alone_references(fixed, self._queries)
        found = shared_error(fixed, alone)
        if found:
            self.reasons.append(
                f"{what}: not deterministic: mates or another row change logits by {found:.1e}"
            )
        return not found

    def recipes(self) -> Iterator[tuple[str, RecordLayout, Way]]:
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
                way = _padded_way(self.model, layout)
                if self.windows_hold(layout, way, f"mask {form.value}"):
                    yield f"padded, mask {form.value}", layout, way
            return  # A cache the model takes is as good as its own.


def _shared(trial: _Trial, kind: str, rows: int, max_query_tokens: int | None) -> Iterator[Serving]:
    """Ways in which queries share forwards, best first."""
    for name, layout, way in trial.recipes():
        if kind != "padded":
            try:
                yield from _ring(trial, layout, way, rows, max_query_tokens)
            except ConfigError as refusal:
                if kind == "ring":
                    raise
                trial.ring_reason = refusal.message
        if kind == "ring" or (trial.deterministic and layout.token_slots):
            continue  # Padding is as wide as the longest mate: so are the shapes.
        error = trial.error(shared_error, way, name)
        if error is not None and trial.far_holds(layout, way, name) and trial.same_bits(way, name):
            reason = f"{name}: {_BESIDE} {error:.1e} of generate's"
            if trial.ring_reason and kind == "auto":
                reason += f"; not a ring: {trial.ring_reason}"
            yield _cached(trial, layout, way, rows, reason)
    if not trial.model.takes_cache and kind != "ring" and not trial.deterministic:
        trial.model.recipe = Recipe()
        way = _uncached_way(trial.model, shared=True)
        error = trial.error(shared_error, way, "without a cache")
        if error is not None:
            yield _uncached(way, rows, f"the model takes no cache: {_BESIDE} {error:.1e} of generate's")


def _ring(
    trial: _Trial, layout: RecordLayout, padded: Way, rows: int, max_query_tokens: int | None
) -> Iterator[Serving]:
    """Decode on a ring, where that is exact."""
    error = _ring_error(trial, layout, padded)
    if error is not None:
        arena = plan_arena(trial.model, layout, rows, max_query_tokens)
        way = _ring_way(trial, layout, arena.columns, padded)
        reason = f"ring: {_BESIDE} {error:.1e} of generate's{arena.remark}"
        yield _cached(trial, layout, way, rows, reason, capacity=arena.columns)


def _ring_error(trial: _Trial, layout: RecordLayout, padded: Way) -> float | None:
    """How far a ring is off, over a wrap of its columns; None, and the reason kept, where it is not exact."""
    model = trial.model
    if not layout.token_slots or not layout.keys_and_values_only:
        trial.ring_reason = "the model's cache holds more than keys and values, or none"
        return None
    if model.recipe.own_cache:
        trial.ring_reason = "the model makes its cache itself"
        return None
    kept, trial.reasons = trial.reasons, []
    near = _ring_way(trial, layout, trial.longest_query_tokens, padded)
    error = trial.error(shared_error, near, "ring")
    if error is not None:
        far = _ring_way(trial, layout, far_tokens(model, layout) + FAR_SPARE_COLUMNS, padded)
        holds = (
            trial.windows_hold(layout, far, "ring")
            and trial.far_holds(layout, far, "ring")
            and trial.same_bits(near, "ring")
        )
        error = error if holds else None
    trial.ring_reason, trial.reasons = trial.why, kept
    return error


def _alone(trial: _Trial) -> Iterator[Serving]:
    """Ways in which each query has the model for itself."""
    why = f"no shared batch is exact ({trial.why})"
    for name, layout, way in trial.recipes():
        error = trial.error(alone_error, way, f"alone, {name}")
        if error is not None:
            reason = f"one at a time, {why}: {_IN_TURN} {error:.1e} of generate's"
            yield _cached(trial, layout, way, 1, reason, alone=True)
    way = _uncached_way(trial.model, shared=False)
    error = trial.error(alone_error, way, "alone without a cache")
    if error is not None:
        reason = f"one at a time and without a cache, {why}: {_IN_TURN} {error:.1e} of generate's"
        yield _uncached(way, 1, reason)


def _cached(
    trial: _Trial,
    layout: RecordLayout,
    way: Way,
    rows: int,
    reason: str,
    *,
    capacity: int | None = None,
    alone: bool = False,
) -> Serving:
    # A model that no shared batch serves is computed in just the steps that `generate` takes.
    together = not alone and trial.far_chunks_hold(layout, way)
    chunkable = together and trial.chunks_hold(layout, way)
    replay_by_step = trial.deterministic or not together or not trial.holds(replay_error, way)
    if trial.model.limit_reason:
        reason += f"; queries end at {trial.model.max_context_tokens} tokens: {trial.model.limit_reason}"
    if not chunkable:
        reason += "; prompts in one forward: chunks would change the result"
    return Serving(
        way.batch(rows),
        way.prompt,
        reason,
        chunkable=chunkable,
        replay_by_step=replay_by_step,
        capacity=capacity,
    )


def _uncached(way: Way, rows: int, reason: str) -> Serving:
    return Serving(way.batch(rows), way.prompt, reason, preemption_mode="recompute")


def _padded_way(model: CausalModel, layout: RecordLayout) -> Way:
    return Way(lambda rows: PaddedBatch(model, rows, layout), lambda: PaddedBatch(model, 1, layout))


def _ring_way(trial: _Trial, layout: RecordLayout, columns: int, padded: Way) -> Way:
    """Decode on a ring; prompts are computed as for the padded batch, with the model's own attention."""
    return Way(
        lambda rows: RingBatch(trial.model, rows, layout, columns, row_by_row=trial.deterministic),
        padded.prompt,
    )


def _uncached_way(model: CausalModel, *, shared: bool) -> Way:
    return Way(
        lambda rows: UncachedBatch(model, rows, shared=shared),
        lambda: UncachedBatch(model, 1, shared=shared),
    )


def _probe_cache(model: CausalModel, rows: int, columns: int) -> Cache:
    ids = 1 + torch.arange(rows * columns, device=model.device).view(rows, columns) % (model.vocab_size - 1)
    positions = torch.arange(columns, device=model.device).expand(rows, columns)
    cache = None if model.recipe.own_cache else model.new_cache()
    output = model.run(ids, torch.ones_like(ids), positions, cache)
    return cache if cache is not None else model.cache_of(output)
