"""Chooses how a model is served, and proves on the model itself that the choice is exact."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batond.daemon.engine.batch.arenas.choice import ARENA_KINDS
from batond.daemon.engine.batch.card_steps import WHOLE_CARD, CardUse
from batond.daemon.engine.batch.ring_size import plan_ring
from batond.daemon.engine.batch.uncached import UncachedBatch
from batond.daemon.engine.model.recipe import Recipe
from batond.daemon.engine.proof.extension import extends_exactly
from batond.daemon.engine.proof.packing import find_packer
from batond.daemon.engine.proof.probe import Way, alone_error, replay_error, shared_error
from batond.daemon.engine.proof.prompts import prove_prompts
from batond.daemon.engine.proof.rings import prove_arena, prove_ring, ring_way
from batond.daemon.engine.proof.trial import Trial
from batond.daemon.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.daemon.engine.batch.prefill import PromptBatch
    from batond.daemon.engine.batch.prompt_steps import PromptSteps
    from batond.daemon.engine.batch.protocol import Batch
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.engine.step.packing import Packer

_log = logging.getLogger(__name__)

_BESIDE = "beside another query, parked and moved, logits stay within"
_IN_TURN = "taking turns, logits stay within"


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
        prompt_steps: Captured forwards of prompts; None where each is launched kernel by kernel.
        packer: Computes short prompts together; None where they come out otherwise.
        extends_slices: A finished turn's slice may be extended by the prompt of the next.
    """

    batch: Batch
    new_prefill_batch: Callable[[], PromptBatch]
    reason: str
    chunkable: bool = True
    replay_by_step: bool = False
    preemption_mode: str = "offload"
    capacity: int | None = None
    prompt_steps: PromptSteps | None = None
    packer: Packer | None = None
    extends_slices: bool = False

    def most_query_tokens(self, model: CausalModel, wanted: int | None) -> int:
        """Longest query: what is wanted (None is no bound), what the model takes, and what the ring holds."""
        limits = (wanted, model.max_context_tokens, self.capacity)
        return min(limit for limit in limits if limit is not None)


def choose_batch(
    kind: str,
    model: CausalModel,
    rows: int,
    *,
    max_query_tokens: int | None = None,
    one_at_a_time: bool = False,
    deterministic: bool = False,
    inline: bool = False,
    pack_tokens: int | None = None,
    sessions: bool = True,
    card: CardUse = WHOLE_CARD,
    arena: str = "auto",
    governed: bool = False,
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
        inline: Prompts are computed in the batch, which therefore is padded, and nothing is kept of them.
        pack_tokens: Most prompt tokens computed at once, and of prompts computed together; None is no bound,
            and a default.
        sessions: Find out whether slices of finished turns may be extended.
        card: What a ring may use of a card.
        arena: What a ring's memory is: "auto", "plain" or "elastic".
        governed: Somebody sees to it that rows hold no more than there is: an elastic ring may be larger.

    Raises:
        ConfigError: The kind is unknown or contradicts another argument, or the ring doesn't fit into memory.
        UnsupportedModelError: The model's tokens would depend on batch mates or parks.
    """
    if kind not in {"auto", "padded", "ring"}:
        raise ConfigError(f'batch must be "auto", "padded" or "ring", not {kind!r}', batch=kind)
    if inline and (kind == "ring" or deterministic):
        raise ConfigError(
            "a ring takes one token a row and step: inline prefill needs the padded batch,"
            " which is not deterministic"
        )
    if arena not in ARENA_KINDS:
        raise ConfigError(f'arena must be "auto", "plain" or "elastic", not {arena!r}', arena=arena)
    kind = "padded" if inline else kind
    trial = Trial(model, deterministic=deterministic, rows=rows, card=card)
    ways = [
        _shared(trial, kind, rows, max_query_tokens, chunk_tokens=pack_tokens, arena=arena, governed=governed)
    ]
    if one_at_a_time and kind != "ring" and not deterministic:
        ways.append(_alone(trial))
    for serving in itertools.chain(*ways):
        if inline:
            _check_inline(model, serving)
            return serving
        return _completed(trial, serving, max_query_tokens, pack_tokens=pack_tokens, sessions=sessions)
    raise UnsupportedModelError(_refusal(trial, kind, one_at_a_time=one_at_a_time), model=model.name)


def _check_inline(model: CausalModel, serving: Serving) -> None:
    """Refuse a model that would see the gaps between prompts computed in the batch."""
    if serving.batch.layout.state_slots or model.has_windows or not serving.chunkable:
        raise UnsupportedModelError(
            "inline prefill leaves gaps that sliding windows or recurrent state count", model=model.name
        )


def _completed(
    trial: Trial, serving: Serving, max_query_tokens: int | None, *, pack_tokens: int | None, sessions: bool
) -> Serving:
    """Find out what else is exact: prompts packed together, kept slices extended."""
    if trial.deterministic or not serving.chunkable:
        return serving
    prompts, batch = serving.new_prefill_batch, serving.batch
    packer = find_packer(
        trial.model,
        batch.layout,
        prompts,
        trial.queries,
        most_tokens=pack_tokens,
        steps=serving.prompt_steps,
    )
    extends = False
    if sessions and serving.preemption_mode == "offload" and not serving.replay_by_step:
        most_tokens = serving.most_query_tokens(trial.model, max_query_tokens)
        extends = extends_exactly(trial.model, batch, prompts, most_tokens)
    return replace(serving, packer=packer, extends_slices=extends)


def _refusal(trial: Trial, kind: str, *, one_at_a_time: bool) -> str:
    """Why no way was found, and what to try."""
    if trial.deterministic:
        why = trial.ring_reason or trial.why
        return f"the model can't be served deterministically: {why}; without, it may be served exactly"
    if kind == "ring":
        why = trial.ring_reason or trial.why
        return f'no ring serves this model exactly: {why}; "auto" serves it another way if one is exact'
    advice = "" if one_at_a_time else "; allow one_at_a_time to try it in a batch of one row"
    return f"no batch serves this model exactly: {trial.why}{advice}"


def _shared(
    trial: Trial,
    kind: str,
    rows: int,
    max_query_tokens: int | None,
    *,
    chunk_tokens: int | None,
    arena: str,
    governed: bool,
) -> Iterator[Serving]:
    """Ways in which queries share forwards, best first."""
    for name, layout, way in trial.recipes():
        if kind != "padded":
            try:
                yield from _ring(
                    trial,
                    layout,
                    way,
                    rows,
                    max_query_tokens,
                    chunk_tokens=chunk_tokens,
                    arena=arena,
                    governed=governed,
                )
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
    trial: Trial,
    layout: RecordLayout,
    padded: Way,
    rows: int,
    max_query_tokens: int | None,
    *,
    chunk_tokens: int | None,
    arena: str,
    governed: bool,
) -> Iterator[Serving]:
    """Decode on a ring, where that is exact."""
    proof = prove_ring(trial, layout, padded)
    if proof is not None:
        new_arena, why = prove_arena(trial, layout, padded, proof, arena)
        elastic = arena == "elastic" and not why and governed
        most_tokens = min((one for one in (chunk_tokens, max_query_tokens) if one is not None), default=None)
        prompts = prove_prompts(trial, layout, padded, proof.card, most_tokens)
        size = plan_ring(trial.model, layout, rows, max_query_tokens, elastic=elastic)
        way = ring_way(trial, layout, size.columns, prompts.way, proof.card, new_arena=new_arena)
        reason = f"ring: {_BESIDE} {proof.error:.1e} of generate's{size.remark}{proof.remark}{prompts.remark}"
        if why:
            reason += f"; a plain arena: {why}"
            _log.warning("the ring's memory does not follow its rows: %s", why)
        if proof.remark:
            _log.warning("a slower way to decode was chosen%s", proof.remark)
        serving = _cached(trial, layout, way, rows, reason, capacity=size.columns)
        reason = serving.reason + getattr(serving.batch, "remark", "")
        yield replace(serving, reason=reason, prompt_steps=prompts.steps)


def _alone(trial: Trial) -> Iterator[Serving]:
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
    trial: Trial,
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


def _uncached_way(model: CausalModel, *, shared: bool) -> Way:
    return Way(
        lambda rows: UncachedBatch(model, rows, shared=shared),
        lambda: UncachedBatch(model, 1, shared=shared),
    )
