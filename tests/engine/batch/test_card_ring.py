"""The ring's step on a card against torch's, through embeds, parks, wraps and changing row counts.

On the CPU with kernels written in torch; on a card (marked `gpu`) with its own and with CUDA graphs.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import families
from batond.daemon.engine.batch.card_steps import NO_CARD, CardUse
from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.proof.trial import probe_layout
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine.model.layout import RecordLayout
    from batond.offload.slice import KVSlice

FAMILIES = [
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt_oss",
    "mistral",
    "gpt2",
    "phi3",
    "mixtral",
    "lfm2",
    "qwen3_next",
]
#: Their steps wait for the card, or keep state in tensors made anew: they are run eagerly.
NOT_CAPTURED = {"mixtral", "qwen3_next", "gpt_oss", "lfm2"}
#: Compiling takes its time: one family of each kind of norm and of rotary embedding.
COMPILED = {"llama", "qwen3", "gemma2", "gpt_neox", "gpt_oss"}
ROWS, CAPACITY = 5, 24
KERNELS = CardUse(graphs=False)


ON_CPU = {"llama", "gemma2", "gpt_neox", "gpt_oss", "qwen3_next", "llama4_text", "deepseek_v3"}


def _places(names: list[str]) -> list[Any]:
    """Families on both devices: few of them on the CPU, where all kernels are torch's."""
    need = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
    on_card = [pytest.param(name, "cuda", marks=[pytest.mark.gpu, need], id=f"{name}-cuda") for name in names]
    return [pytest.param(name, "cpu", id=f"{name}-cpu") for name in names if name in ON_CPU] + on_card


class Trip:
    """The same random life of a batch, on several of them: all must give the same logits."""

    def __init__(self, family: str, device: str, uses: dict[str, CardUse], **overrides: Any) -> None:
        self.model = CausalModel(families.make_family(family, **overrides), device)
        self.layout: RecordLayout = probe_layout(self.model)
        self.rng = random.Random(family)
        self.rings = {
            name: RingBatch(self.model, ROWS, self.layout, CAPACITY, card=use) for name, use in uses.items()
        }
        self.books = RingBatch(self.model, ROWS, self.layout, CAPACITY, card=NO_CARD)
        self.parked: list[KVSlice] = []
        self.highest_rows: set[int] = set()
        self.wraps = 0

    def go(self, steps: int) -> None:
        """Embed, park, bring back, free and step at random."""
        for _ in range(steps):
            for row in range(ROWS):
                self._change(row)
            if any(self.books.lengths):
                self._step()

    def _change(self, row: int) -> None:
        batches = [self.books, *self.rings.values()]
        length, draw = self.books.lengths[row], self.rng.random()
        if not length and draw < 0.3:
            kv = self.parked.pop() if self.parked and draw < 0.15 else self._prefilled()
            for batch in batches:
                batch.embed(row, kv)
        elif length == CAPACITY or (length and draw < 0.15):
            kept = self.books.extract(row)
            for batch in batches:
                batch.free(row)
            if length < CAPACITY - 1 and draw < 0.1:
                self.parked.append(kept)

    def _prefilled(self) -> KVSlice:
        single = PaddedBatch(self.model, 1, self.layout)
        single.step({0: [self.rng.randrange(3, 120) for _ in range(self.rng.randrange(1, 14))]})
        return single.extract(0)

    def _step(self) -> None:
        live = [row for row, length in enumerate(self.books.lengths) if length]
        tokens = {row: [self.rng.randrange(3, 120)] for row in live}
        expected = self.books.step(tokens)
        self.highest_rows.add(max(live) + 1)
        self.wraps += self.books._cursor == CAPACITY - 1
        for name, ring in self.rings.items():
            mine = _poison_what_nobody_owns(ring)
            logits = ring.step(tokens)
            assert torch.equal(ring._storage[~mine], torch.full_like(ring._storage[~mine], 0xFF)), name
            for row in live:
                error = (logits[row] - expected[row]).norm() / expected[row].norm()
                assert float(error) < 2e-4, (name, row, float(error))
                likeliest = ring.likeliest()
                assert likeliest is not None
                assert likeliest[row] == int(expected[row].argmax()), (name, row)


def _poison_what_nobody_owns(ring: RingBatch) -> torch.Tensor:
    """Set all columns that no row owns to NaN; returns those that may differ after the next step."""
    mine = torch.zeros(ROWS, CAPACITY, dtype=torch.bool, device=ring._storage.device)
    for row, length in enumerate(ring.lengths):
        for first, last in ring._ranges(length) if length else ():
            mine[row, first:last] = True
    ring._storage[~mine] = 0xFF
    for row, length in enumerate(ring.lengths):
        if length:
            mine[row, (ring._cursor + 1) % CAPACITY] = True
    return mine


@pytest.mark.parametrize(("family", "device"), _places(FAMILIES), indirect=["device"])
def test_steps_on_a_card_equal_torchs(family: str, device: str) -> None:
    """R2: eager, captured and compiled steps, while rows come, go, park and return, and the ring turns.

    Nothing that a row doesn't own is read, and no idle row is written.
    """
    uses = {"kernels": KERNELS, "graphs": CardUse(compiled=False)}
    if device == "cpu" or family in COMPILED:
        uses["compiled"] = CardUse()
    trip = Trip(family, device, uses)
    trip.go(70)
    assert trip.wraps >= 2
    assert trip.highest_rows >= {3, 4, 5}
    for name in uses.keys() - {"kernels"}:
        if device == "cpu" or family not in NOT_CAPTURED:
            assert trip.rings[name].graph_rows == [1, 2, 4, 5], trip.rings[name].why_no_graphs


@pytest.mark.parametrize(("family", "device"), _places(["llama4_text", "deepseek_v3"]), indirect=["device"])
def test_what_the_kernels_can_not_do_is_refused(family: str, device: str) -> None:
    """Chunked masks, keys computed from latents: the step says so before it has changed anything."""
    trip = Trip(family, device, {"kernels": KERNELS})
    ring = trip.rings["kernels"]
    ring.embed(1, trip._prefilled())
    before = list(ring.lengths)
    with pytest.raises(UnsupportedModelError):
        ring.step({1: [5]})
    assert list(ring.lengths) == before


@pytest.mark.parametrize(("family", "device"), _places(["llama", "gemma2", "gpt_oss"]), indirect=["device"])
def test_an_engine_on_a_card_emits_the_tokens_of_one_without(
    family: str, device: str, play: Callable[..., Any]
) -> None:
    """R2: parks, resumes, rows that come free and fill again; kernels and graphs against torch."""

    def tokens(**options: Any) -> list[list[int]]:
        said, engine = play(family, device=device, **options)
        assert ("card's kernel" in engine.batch_reason) == options.get("kernels", True)
        return list(said)

    expected = tokens(kernels=False)
    assert tokens() == expected
    assert tokens(graphs=False) == expected
