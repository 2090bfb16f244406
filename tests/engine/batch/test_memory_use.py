"""What batches say of the memory that their rows take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.memory.use import NO_KEYS_AND_VALUES

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def bench(llama: Any, make_bench: Callable[[Any], Any]) -> Any:
    return make_bench(llama)


def test_a_padded_batch_takes_what_its_tensors_take(bench: Any) -> None:
    batch = bench.batch(3)
    assert batch.memory == NO_KEYS_AND_VALUES
    batch.embed(0, bench.prefilled(list(range(3, 40))))
    use = batch.memory
    assert use.committed_bytes == 3 * 37 * bench.layout.record_bytes
    assert (use.pooled_bytes, use.elastic) == (0, False)
    batch.step({0: [5]})
    grown = batch.memory.committed_bytes
    assert grown > 3 * 38 * bench.layout.record_bytes  # Room for columns to come.
    batch.embed(1, bench.prefilled([4, 5]))
    batch.free(0)
    assert batch.memory.committed_bytes >= 3 * 2 * bench.layout.record_bytes
    assert batch.trim() == 0
    batch.free(1)
    assert batch.memory == NO_KEYS_AND_VALUES
