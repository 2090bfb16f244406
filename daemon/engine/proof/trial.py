"""One attempt to find an exact way to serve a model: questions, answers, and the reasons kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from batond.daemon.engine.batch.card_steps import WHOLE_CARD
from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.model.causal import MODEL_ERRORS, first_line
from batond.daemon.engine.model.layout import RecordLayout
from batond.daemon.engine.model.recipe import MaskForm, Recipe
from batond.daemon.engine.proof.far import (
    SHORTEST_FAR_TOKENS,
    far_chunk_error,
    far_error,
    far_tokens,
    window_error,
)
from batond.daemon.engine.proof.probe import (
    LONGEST_WINDOW_TOKENS,
    SHARED_ROWS,
    Way,
    alone_references,
    chunk_error,
    memory_named,
    references,
    shared_error,
    tolerance,
)
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers.cache_utils import Cache

    from batond.daemon.engine.batch.card_steps import CardUse
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.proof.probe import Question, References

_FAR_CHUNK = 16  # Columns that the looks behind a window need beyond it.
_LAYOUT_SIZES = (1, 2, 2, 5)  # Rows of two forwards, then columns of both.


class Trial:
    """Tries ways to serve a model and remembers why some failed.

    Args:
        model: The model.
        deterministic: No bit of a query may depend on its mates.
        rows: Rows of the batch to be built.
        card: What a ring may use of a card.
    """

    def __init__(
        self, model: CausalModel, *, deterministic: bool, rows: int, card: CardUse = WHOLE_CARD
    ) -> None:
        self.model = model
        self.deterministic = deterministic
        self.card = card
        self._rows = rows
        self.reasons: list[str] = []
        self.ring_reason = ""
        self.queries = references(model)

    @property
    def longest_query_tokens(self) -> int:
        """Tokens of the longest probe query, the output's included."""
        return max(len(query.prompt) + len(query.tokens) for query in self.queries)

    @property
    def why(self) -> str:
        """The reasons in one line, each once."""
        return "; ".join(dict.fromkeys(self.reasons))

    def error(self, question: Question, way: Way, what: str) -> float | None:
        """The largest difference, if rounding explains it; else None, and a reason more."""
        try:
            with memory_named():
                found = question(way, self.queries)
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
        alone = alone_references(fixed, self.queries)
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
                way = padded_way(self.model, layout)
                if self.windows_hold(layout, way, f"mask {form.value}"):
                    yield f"padded, mask {form.value}", layout, way
            return  # A cache the model takes is as good as its own.


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


def padded_way(model: CausalModel, layout: RecordLayout) -> Way:
    """Decode and prompts on padded tensors."""
    return Way(lambda rows: PaddedBatch(model, rows, layout), lambda: PaddedBatch(model, 1, layout))


def _probe_cache(model: CausalModel, rows: int, columns: int) -> Cache:
    ids = 1 + torch.arange(rows * columns, device=model.device).view(rows, columns) % (model.vocab_size - 1)
    positions = torch.arange(columns, device=model.device).expand(rows, columns)
    cache = None if model.recipe.own_cache else model.new_cache()
    output = model.run(ids, torch.ones_like(ids), positions, cache)
    return cache if cache is not None else model.cache_of(output)
