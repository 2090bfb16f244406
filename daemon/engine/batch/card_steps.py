"""The ring's decode step on a card: everything that changes is read there, so that it can be captured."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batond.daemon.engine.batch.card_window import CardWindow
from batond.daemon.engine.batch.compiled import CompiledParts
from batond.daemon.engine.batch.graphs import StepGraphs, StepOutput, capture_on_card, row_buckets
from batond.daemon.engine.batch.linears import StreamedLinears
from batond.daemon.engine.batch.ring_attention import RING_ATTENTION, active_window, ignored_arguments
from batond.daemon.engine.batch.ring_cache import ring_cache
from batond.daemon.engine.batch.step_inputs import StepInputs
from batond.daemon.engine.batch.token_reader import TokenReader
from batond.daemon.engine.model.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout

#: The model's own may be for prompts: the ring's mask function needs the columns.
RING_RECIPE = Recipe()


@dataclass(frozen=True, slots=True)
class CardUse:
    """What of a card is used for decoding.

    Attributes:
        kernels: Attention by the ring's own kernels.
        graphs: Steps captured as graphs; needs the kernels.
        compiled: Captured steps have the model's small parts compiled.
        streamed: Captured steps have the model's linears by kernels made for few rows.
        one_size: One graph for all rows: no bit of a row depends on which others are in use.
    """

    kernels: bool = True
    graphs: bool = True
    compiled: bool = True
    streamed: bool = True
    one_size: bool = False


WHOLE_CARD = CardUse()
NO_CARD = CardUse(kernels=False, graphs=False, compiled=False, streamed=False)


class CardSteps:
    """Runs the step over the first rows of a ring, captured where that is wanted and can be.

    Args:
        model: The model.
        layout: Byte layout of its cache.
        storage: The ring's records, uint8, shape [rows, capacity, record].
        state: The rows' states, uint8, shape [rows, state bytes].
        use: What to use.

    Attributes:
        graphs: The captured steps; without any, each step is run eagerly over all rows.

    Raises:
        UnsupportedModelError: The model's cache has layers that the ring can't stand in for.
    """

    def __init__(
        self,
        model: CausalModel,
        layout: RecordLayout,
        storage: torch.Tensor,
        state: torch.Tensor,
        use: CardUse,
    ) -> None:
        self._model, self._layout, self._storage, self._state = model, layout, storage, state
        self._rows = storage.shape[0]
        self._inputs = StepInputs(self._rows, storage.device)
        self._reader = TokenReader(self._rows, storage.device)
        self._last: StepOutput | None = None
        self._chosen: torch.Tensor | None = None  # By whom follows the last step.
        self._following_rows = 0
        self._ignored = ignored_arguments(model.attention_name)
        self._linears: StreamedLinears | None = None
        self._eager = self._step_of(self._rows)
        self.graphs = StepGraphs()
        if use.graphs:
            sizes = (self._rows,) if use.one_size else row_buckets(self._rows)
            with contextlib.ExitStack() as replaced:
                if use.compiled:
                    replaced.enter_context(CompiledParts(model.model).in_use())
                if use.streamed:
                    self._linears = StreamedLinears(model.model, storage.device)
                    replaced.enter_context(self._linears.in_use())
                self.graphs = capture_on_card(self._step_of, sizes, storage.device)
        self._compiled = use.compiled

    @property
    def remark(self) -> str:
        """What an operator should know, in words."""
        said = "; decode attention by the card's kernel"
        if self.graphs.sizes:
            said += ", compiled" if self._compiled else ""
            said += f", steps as graphs of {', '.join(map(str, self.graphs.sizes))} rows"
        return said + (f" ({self.graphs.why_no_more})" if self.graphs.why_no_more else "")

    def run(self, tokens: Mapping[int, Sequence[int]], lengths: Sequence[int], cursor: int) -> StepOutput:
        """One step.

        Args:
            tokens: One new token by occupied row.
            lengths: Tokens by row, the new ones included; 0 is idle.
            cursor: The column it writes.

        Returns:
            Of the first rows, up to the last in `tokens` at least. The next step may overwrite it.
        """
        self._inputs.fill(tokens, lengths, cursor)
        return self._launch(max(tokens, default=0) + 1)

    def follow(self, rows: Sequence[int], lengths: Sequence[int], cursor: int) -> None:
        """Set the inputs of the step after the last one, whose tokens it takes where they lie on the card.

        Args:
            rows: Of the last step, at least one; the others are idle in the next.
            lengths: Tokens by row, the new ones included; 0 is idle.
            cursor: The column it writes.

        Raises:
            RuntimeError: There was no step.
        """
        if self._chosen is None:
            raise RuntimeError("there was no step")
        self._following_rows = max(rows) + 1
        self._inputs.follow(rows, self._chosen, lengths, cursor)

    def run_on(self) -> None:
        """Launch the step whose inputs `follow` has set; `last` is what it computes."""
        self._launch(self._following_rows)

    @property
    def last(self) -> StepOutput:
        """What the last step computes.

        Raises:
            RuntimeError: There was none.
        """
        if self._last is None:
            raise RuntimeError("there was no step")
        return self._last

    def give(self, token_ids: torch.Tensor) -> None:
        """Have these tokens follow the last step instead of the likeliest; int64, shape [its rows]."""
        self._chosen = token_ids
        self._reader.start(token_ids)

    def likeliest(self) -> Sequence[int]:
        """The token ids behind the last step, the likeliest or those given; waits for them alone."""
        return self._reader.wait()

    def _launch(self, needed_rows: int) -> StepOutput:
        self._last = self.graphs.run(needed_rows) or self._eager()
        self.give(self._last.likeliest)
        return self._last

    def _step_of(self, rows: int) -> Callable[[], StepOutput]:
        """The step over the first rows."""
        inputs, model = self._inputs, self._model
        window = CardWindow(self._storage, inputs, rows, ignored=self._ignored)
        cache = ring_cache(model, self._layout, self._storage[:rows], self._state[:rows], window)
        ids, positions, mask = inputs.token_ids[:rows], inputs.position_ids[:rows], window.padding_mask()

        def run() -> StepOutput:
            beside = contextlib.nullcontext() if self._linears is None else self._linears.run()
            with active_window(window), window.step(), model.attention(RING_ATTENTION), beside:
                logits = model.forward(ids, mask, positions, cache, recipe=RING_RECIPE)
            return StepOutput(logits, logits.argmax(dim=-1))

        return run
