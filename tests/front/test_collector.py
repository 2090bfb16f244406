"""The garbage collector of a front: told once what stays, and to look seldom."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from batond.daemon.front import collector

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def restored() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("restored")
def test_what_is_there_is_set_aside_and_cycles_still_go() -> None:
    class Node:
        me: Node

    before = gc.get_freeze_count()
    collector.settle()
    assert gc.get_freeze_count() > before
    seen = sum(isinstance(one, Node) for one in gc.get_objects())
    for _ in range(4 * collector.YOUNG_OBJECTS):  # Garbage that only a look at the young finds.
        node = Node()
        node.me = node
    left = sum(isinstance(one, Node) for one in gc.get_objects()) - seen
    assert left <= 2 * collector.YOUNG_OBJECTS  # A look may come late: other objects die in between.


@pytest.mark.usefixtures("restored")
def test_all_is_looked_at_seldom() -> None:
    """A look at everything stops every stream for as long as it takes."""
    collector.settle()
    looks = {0: 0, 1: 0, 2: 0}

    def count(phase: str, info: dict[str, int]) -> None:
        looks[info["generation"]] += phase == "start"

    gc.callbacks.append(count)
    try:
        kept = [[] for _ in range(20 * collector.YOUNG_OBJECTS)]  # A second of tokens that stay.
    finally:
        gc.callbacks.remove(count)
    assert kept
    assert looks[0] >= 10
    assert looks[2] == 0
