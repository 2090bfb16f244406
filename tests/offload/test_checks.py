"""Checksums computed beside: the same however the body lies, whoever computes them; every damage is seen."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batond.offload import checks
from batond.offload.checks import Checker

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = torch.arange(1000, dtype=torch.int64).to(torch.uint8)


@pytest.fixture
def checker() -> Iterator[Checker]:
    made = Checker(block_bytes=64, inline_bytes=0)
    yield made
    made.close()


def test_threads_and_the_caller_come_to_the_same(checker: Checker) -> None:
    inline = Checker(block_bytes=64, inline_bytes=10_000)
    assert checker.begin(b"head", [BODY]).value() == inline.begin(b"head", [BODY]).value()


@given(cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_it_does_not_matter_where_the_pool_cuts_a_body(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 1000]
    parts = [BODY[start:end] for start, end in itertools.pairwise(edges)]
    inline = Checker(block_bytes=64)
    assert inline.begin(b"h", parts).value() == inline.begin(b"h", [BODY]).value()


@pytest.mark.parametrize("place", [0, 63, 64, 500, 999])
def test_every_byte_counts(checker: Checker, place: int) -> None:
    """R6: a flipped bit anywhere is found."""
    damaged = BODY.clone()
    damaged[place] ^= 1
    assert checker.begin(b"h", [damaged]).value() != checker.begin(b"h", [BODY]).value()


def test_header_order_and_length_count(checker: Checker) -> None:
    value = checker.begin(b"h", [BODY]).value()
    assert value != checker.begin(b"i", [BODY]).value()
    assert value != checker.begin(b"h", [BODY[64:], BODY[:64]]).value()
    assert value != checker.begin(b"h", [BODY[:-1]]).value()
    assert checker.begin(b"h", []).value() == checker.begin(b"h", []).value()


def test_nobody_waits_for_a_check_that_is_under_way(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a gigabyte takes a core 50 ms, in which the batch goes on."""
    go, digest = threading.Event(), checks._digest

    def slow(block: list[torch.Tensor]) -> bytes:
        assert go.wait(10)
        return digest(block)

    monkeypatch.setattr(checks, "_digest", slow)
    check = checker.begin(b"h", [BODY])
    assert not check.done
    go.set()
    value = check.value()
    assert check.done
    assert value == Checker(block_bytes=64).begin(b"h", [BODY]).value()
