"""A card has a number wherever the engine speaks of it: some of torch's functions take no other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from batond.daemon.devices import numbered
from batond.daemon.engine.model.causal import CausalModel


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two cards, the second is current; `set_device` takes what torch's takes, and notes it."""
    noted: list[int] = []

    def set_device(device: torch.device) -> None:
        index: int | None = device.index
        if index is None:
            raise ValueError(f"Expected a torch.device with a specified index, but got:{device}")
        noted.append(index)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return noted


@pytest.mark.usefixtures("chosen")
def test_a_card_is_known_by_its_number() -> None:
    assert numbered("cuda") == torch.device("cuda", 1)
    assert numbered(torch.device("cuda")) == torch.device("cuda", 1)
    assert numbered("cuda:0") == torch.device("cuda", 0)
    assert numbered("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("asked", "number"), [("cuda", 1), ("cuda:0", 0)])
def test_a_model_goes_to_the_card_by_its_number(
    llama: Any, asked: str, number: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `LocalEngine(device="cuda")` fails without: torch selects a card by number only."""
    model, moved = copy.copy(llama), list[torch.device]()
    monkeypatch.setattr(model, "to", lambda device: moved.append(device) or model, raising=False)
    assert CausalModel(model, asked).device == torch.device("cuda", number)
    assert moved == [torch.device("cuda", number)]
    assert chosen == [number]
