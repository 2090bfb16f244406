"""Slices under way take a small part of a small card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from batond.daemon.engine.queries import arriving, outgoing
from batond.daemon.engine.queries.card_share import card_share_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 1 << 30


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    card_share_bytes.cache_clear()
    yield
    card_share_bytes.cache_clear()


@pytest.mark.parametrize(("total_gib", "binds"), [(24, True), (141, False)])
def test_a_small_card_bounds_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch, *, total_gib: int, binds: bool
) -> None:
    """M1: both directions together stay under a sixteenth of it."""
    properties = SimpleNamespace(total_memory=total_gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    share = card_share_bytes(torch.device("cuda", 0))
    assert (share < outgoing.MOST_BYTES) is binds
    assert min(share, outgoing.MOST_BYTES) + min(share, arriving.MOST_BYTES) <= total_gib * GIB // 16


def test_on_a_cpu_nothing_is_bounded_by_a_card() -> None:
    assert card_share_bytes(torch.device("cpu")) > outgoing.MOST_BYTES


def test_parks_wait_for_the_oldest_where_the_card_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is asked for with each slice, of the card that it lies on."""
    kv = SimpleNamespace(nbytes=10, tokens=torch.zeros(1))
    finished: list[object] = []
    store = SimpleNamespace(
        begin_store=lambda *_: SimpleNamespace(kv=kv),
        ready=lambda _: False,
        finish_store=finished.append,
    )
    monkeypatch.setattr(outgoing, "card_share_bytes", lambda _: 35)
    under_way = outgoing.Outgoing(store)  # type: ignore[arg-type]  # What it asks of a store, and no more.
    for name in "abcd":
        under_way.start(name, kv, "digest", on_lost=lambda: None)  # type: ignore[arg-type]  # As above.
    assert len(finished) == 1
    assert len(under_way) == 3
