"""Which way of decoding on a ring is exact for a model: the card's kernels and graphs first, else torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batond.daemon.engine.batch.arenas.choice import auto_arena, choose_arena, plain_arena
from batond.daemon.engine.batch.card_steps import NO_CARD, CardUse
from batond.daemon.engine.batch.kernel_check import NO_CUDA_CARD, why_no_kernels
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.proof.far import FAR_SPARE_COLUMNS, far_tokens
from batond.daemon.engine.proof.probe import Way, shared_error
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from batond.daemon.engine.batch.arenas.arena import NewArena
    from batond.daemon.engine.model.layout import RecordLayout
    from batond.daemon.engine.proof.trial import Trial


@dataclass(frozen=True, slots=True)
class RingProof:
    """A way of decoding on a ring that was found exact.

    Attributes:
        error: Largest relative difference of its logits from `generate`'s.
        card: What of the card it uses.
        remark: What an operator should know of it, in words; "" if there is nothing.
    """

    error: float
    card: CardUse
    remark: str = ""


def prove_ring(trial: Trial, layout: RecordLayout, padded: Way) -> RingProof | None:
    """Find an exact way of decoding on a ring; None, and the reason kept in the trial, where there is none.

    Args:
        trial: Of the model.
        layout: Of its cache.
        padded: How prompts are computed.
    """
    if not layout.token_slots or not layout.keys_and_values_only:
        trial.ring_reason = "the model's cache holds more than keys and values, or none"
        return None
    if trial.model.recipe.own_cache:
        trial.ring_reason = "the model makes its cache itself"
        return None
    card = replace(trial.card, one_size=trial.deterministic)
    remark = ""
    if card.kernels:
        why = why_no_kernels(trial.model.device, trial.model.dtype)
        if not why:
            error = _ring_error(trial, layout, padded, replace(card, graphs=False))
            if error is not None:
                return _with_graphs(trial, layout, padded, RingProof(error, card))
            why = trial.ring_reason
        if why != NO_CUDA_CARD:
            remark = f"; decode attention in torch: {why}"
    error = _ring_error(trial, layout, padded, NO_CARD)
    return None if error is None else RingProof(error, NO_CARD, remark)


def ring_way(
    trial: Trial,
    layout: RecordLayout,
    columns: int,
    padded: Way,
    card: CardUse,
    *,
    new_arena: NewArena = auto_arena,
) -> Way:
    """Decode on a ring; prompts are computed as for the padded batch, with the model's own attention."""

    def new_batch(rows: int) -> RingBatch:
        return RingBatch(
            trial.model,
            rows,
            layout,
            columns,
            row_by_row=trial.deterministic,
            card=card,
            new_arena=new_arena,
        )

    return Way(new_batch, padded.prompt)


def prove_arena(
    trial: Trial, layout: RecordLayout, padded: Way, proof: RingProof, kind: str
) -> tuple[NewArena, str]:
    """Choose the arena of a ring, and try one on a card with the model.

    Args:
        trial: Of the model.
        layout: Of its cache.
        padded: How prompts are computed.
        proof: Of the ring.
        kind: One of `ARENA_KINDS`.

    Returns:
        What makes it; and why it is not elastic although that was asked for, "" otherwise.
    """
    device = trial.model.device
    new_arena, why = choose_arena(kind, device, kernels=proof.card.kernels)
    if new_arena is plain_arena or device.type == "cpu":  # On the CPU the ring was proved with it.
        return new_arena, why
    card = replace(proof.card, graphs=False, compiled=False)
    way = ring_way(trial, layout, trial.longest_query_tokens, padded, card, new_arena=new_arena)
    kept, trial.reasons = trial.reasons, []
    error = trial.error(shared_error, way, "elastic arena")
    why, trial.reasons = trial.why, kept
    return (plain_arena, why) if error is None else (new_arena, "")


def _with_graphs(trial: Trial, layout: RecordLayout, padded: Way, proof: RingProof) -> RingProof:
    """Keep graphs, and compiled parts in them, where captured steps of changing row counts are exact, too."""
    eager = replace(proof, card=replace(proof.card, graphs=False, compiled=False))
    if not proof.card.graphs:
        return eager
    remark = ""
    for compiled in (True, False) if proof.card.compiled else (False,):
        card = replace(proof.card, compiled=compiled, streamed=proof.card.streamed and compiled)
        error, why = _graph_error(trial, layout, padded, card)
        if error is not None:
            return RingProof(max(error, proof.error), card, remark)
        remark = f"; not compiled: {why}" if compiled else f"; no graphs: {why}"
    return replace(eager, remark=remark)


def _graph_error(trial: Trial, layout: RecordLayout, padded: Way, card: CardUse) -> tuple[float | None, str]:
    """How far captured steps are off, or None and why they will not do."""
    plain = ring_way(trial, layout, trial.longest_query_tokens, padded, card)
    way = Way(lambda rows: _captured(plain.batch(rows)), plain.prompt)
    kept, trial.reasons = trial.reasons, []
    error = trial.error(shared_error, way, "graphs")
    holds = error is not None and trial.same_bits(way, "graphs")
    why, trial.reasons = trial.why, kept
    return (error if holds else None), why


def _captured(batch: object) -> RingBatch:
    """The batch, if its steps are captured.

    Raises:
        UnsupportedModelError: They could not be.
    """
    if not isinstance(batch, RingBatch) or not batch.graph_rows:
        raise UnsupportedModelError(getattr(batch, "why_no_graphs", ""))
    return batch


def _ring_error(trial: Trial, layout: RecordLayout, padded: Way, card: CardUse) -> float | None:
    """How far a ring is off, over a wrap of its columns; None, and the reason kept, where it is not exact."""
    kept, trial.reasons = trial.reasons, []
    near = ring_way(trial, layout, trial.longest_query_tokens, padded, card)
    error = trial.error(shared_error, near, "ring")
    if error is not None:
        far_columns = far_tokens(trial.model, layout) + FAR_SPARE_COLUMNS
        far = ring_way(trial, layout, far_columns, padded, card)
        holds = (
            trial.windows_hold(layout, far, "ring")
            and trial.far_holds(layout, far, "ring")
            and trial.same_bits(near, "ring")
        )
        error = error if holds else None
    trial.ring_reason, trial.reasons = trial.why, kept
    return error
