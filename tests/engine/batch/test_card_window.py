"""What of a model's attention the card's kernels can do, and how a mask is recognized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from batond.daemon.engine.batch import card_window
from batond.daemon.engine.batch.card_window import CardWindow, recognize_window
from batond.daemon.engine.batch.step_inputs import StepInputs
from batond.daemon.errors import UnsupportedModelError

if TYPE_CHECKING:
    from batond.daemon.engine.batch.ring_rule import Ring, Rule

ROWS, CAPACITY, HEADS, DIM = 2, 40, 2, 16


class Noted:
    """Kernels that note what they are asked for."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.new: list[float] = []
        self.written: list[float] = []

    def decode_attention(
        self, query: torch.Tensor, ring: Ring, rule: Rule, *, new: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        assert ring.key.shape == (ROWS, CAPACITY, HEADS, DIM)
        self.rules.append(rule)
        self.new += [] if new is None else [float(new[0].mean())]
        return query

    def write_column(self, new_key: torch.Tensor, new_value: torch.Tensor, ring: Ring) -> None:
        assert new_key.shape == new_value.shape == (ROWS, HEADS, DIM)
        assert ring.key.shape == (ROWS, CAPACITY, HEADS, DIM)
        self.written.append(float(new_key.mean()))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Noted:
    noted = Noted()
    monkeypatch.setattr(card_window, "_kernels", lambda: noted)
    return noted


@pytest.fixture
def window() -> CardWindow:
    storage = torch.zeros(ROWS + 1, CAPACITY, 2 * HEADS * DIM * 4, dtype=torch.uint8)
    return CardWindow(storage, StepInputs(ROWS + 1, storage.device), ROWS)


def states(window: CardWindow, storage: torch.Tensor | None = None) -> torch.Tensor:
    """The second slot of the records, as a model is handed it."""
    raw = window._storage if storage is None else storage
    numbers = raw[:ROWS, :, HEADS * DIM * 4 :].view(torch.float32)
    return numbers.view(ROWS, CAPACITY, HEADS, DIM).transpose(1, 2)


def update(window: CardWindow, slot: int, number: float) -> None:
    """A layer's newest column, of equal numbers; its keys and values lie in the same slot of the records."""
    store = window._storage[:ROWS, :, slot * HEADS * DIM * 4 : (slot + 1) * HEADS * DIM * 4]
    layer = store.view(torch.float32).view(ROWS, CAPACITY, HEADS, DIM)
    window.update(layer, layer, *torch.full((2, ROWS, HEADS, 1, DIM), number))


def attend(window: CardWindow, **changes: Any) -> torch.Tensor:
    options: dict[str, Any] = {
        "query": torch.ones(ROWS, 2 * HEADS, 1, DIM),
        "key": states(window),
        "value": states(window),
        "mask": None,
        "scale": 0.5,
        "softcap": None,
        "sinks": None,
    }
    return window.attend(**{**options, **changes})


@pytest.mark.parametrize(("tokens", "found"), [(1, 1), (7, 7), (39, 39), (40, None), (1000, None)])
def test_a_sliding_window_is_recognized(tokens: int, found: int | None) -> None:
    assert recognize_window(sliding_window_causal_mask_function(tokens), CAPACITY) == found


@pytest.mark.parametrize("columns", [1, 2, 3, CAPACITY])
def test_a_causal_mask_shows_all(columns: int) -> None:
    assert recognize_window(causal_mask_function, columns) is None


@pytest.mark.parametrize("chunk", range(2, CAPACITY))
def test_chunks_are_no_window_wherever_their_edges_lie(chunk: int) -> None:
    function = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UnsupportedModelError):
        recognize_window(function, CAPACITY)


def test_a_mask_with_holes_or_of_many_rows_is_no_window() -> None:
    with pytest.raises(UnsupportedModelError, match="other columns than its newest"):
        recognize_window(lambda _r, _h, _q, column: column % 2 == 0, CAPACITY)
    seen = torch.ones(3, CAPACITY, dtype=torch.bool)
    holes = and_masks(causal_mask_function, lambda row, _h, _q, column: seen[row + 3, column])
    with pytest.raises(UnsupportedModelError, match="on the host"):
        recognize_window(holes, CAPACITY)


def test_a_placeholder_stands_for_its_window(window: CardWindow, kernels: Noted) -> None:
    masks = [window.mask_for(sliding_window_causal_mask_function(n)) for n in (5, 9, 5, 99)]
    assert masks[0] is masks[2]
    assert masks[3] is None
    for mask in masks:
        attend(window, mask=mask)
    assert [rule.window for rule in kernels.rules] == [5, 9, 5, None]


def test_a_mask_of_the_models_own_is_refused(window: CardWindow, kernels: Noted) -> None:
    mask = window.mask_for(sliding_window_causal_mask_function(5))
    assert mask is not None
    for other in (mask.clone(), mask[..., :7], mask.float()):
        with pytest.raises(UnsupportedModelError, match="masks of its own"):
            attend(window, mask=other)
    assert not kernels.rules


def test_what_is_not_the_ring_as_it_lies_is_refused(window: CardWindow, kernels: Noted) -> None:
    mine = states(window)
    for other in (mine.clone(), mine[:, :, 1:], mine[:1], mine.flip(2)):
        for name in ("key", "value"):
            with pytest.raises(UnsupportedModelError, match="computed from"):
                attend(window, **{name: other})
    assert not kernels.rules


def test_what_the_kernel_has_no_room_for_is_refused(window: CardWindow, kernels: Noted) -> None:
    with pytest.raises(UnsupportedModelError, match="wider than 256"):
        attend(window, query=torch.ones(ROWS, HEADS, 1, 320))
    with pytest.raises(UnsupportedModelError, match=r"float32, torch\.float64"):
        attend(window, query=torch.ones(ROWS, HEADS, 1, DIM, dtype=torch.float64))
    with pytest.raises(UnsupportedModelError, match="share"):
        attend(window, query=torch.ones(ROWS, HEADS + 1, 1, DIM))
    with pytest.raises(UnsupportedModelError, match="sinks"):
        attend(window, sinks=torch.ones(ROWS, 2 * HEADS))
    assert not kernels.rules


def test_scale_cap_and_sinks_reach_the_kernel(window: CardWindow, kernels: Noted) -> None:
    attend(window, softcap=3.0, sinks=torch.arange(2.0 * HEADS)[None, :, None])
    rule = kernels.rules[0]
    assert (rule.scale, rule.softcap) == (0.5, 3.0)
    assert rule.sinks is not None
    assert rule.sinks.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_compilers_own_error_is_the_models_shape(
    window: CardWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels:
        error: Exception = Exception("out of resources")

        @classmethod
        def decode_attention(cls, *_args: Any, **_options: Any) -> None:
            raise cls.error

    monkeypatch.setattr(card_window, "_kernels", lambda: Kernels)
    with pytest.raises(UnsupportedModelError, match="out of resources"):
        attend(window)
    Kernels.error = torch.OutOfMemoryError("none left")
    with pytest.raises(torch.OutOfMemoryError):
        attend(window)


def test_a_layers_attention_writes_its_newest_column(window: CardWindow, kernels: Noted) -> None:
    with window.step():
        update(window, 1, 3.0)
        attend(window)
        attend(window)  # A layer that reads another's: it is written by then.
    assert (kernels.new, kernels.written) == ([3.0], [])


def test_what_no_attention_takes_is_written_before_anything_follows(
    window: CardWindow, kernels: Noted
) -> None:
    with window.step():
        update(window, 0, 1.0)
        update(window, 0, 2.0)
        assert kernels.written == [1.0]
        attend(window)
        assert kernels.written == [1.0, 2.0]
        update(window, 1, 3.0)
    assert (kernels.new, kernels.written) == ([], [1.0, 2.0, 3.0])


def test_a_failed_step_leaves_nothing_to_the_next(window: CardWindow, kernels: Noted) -> None:
    def fail_half_way() -> None:
        with window.step():
            update(window, 1, 3.0)
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        fail_half_way()
    with window.step():
        attend(window)
    assert (kernels.new, kernels.written) == ([], [])
