"""The measurement of the second tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.bench import spill

if TYPE_CHECKING:
    from pathlib import Path


def test_all_ways_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    rates = spill.run(tmp_path / "kv", slice_bytes=100_001, slices=2, rounds=1)
    assert [rate.way for rate in rates] == ["plain", "direct", "buffered"]
    assert all(rate.out_mb_s > 0 and rate.in_mb_s > 0 for rate in rates)
    assert spill.table(rates).row_count == 3
    assert list((tmp_path / "kv").iterdir()) == []
