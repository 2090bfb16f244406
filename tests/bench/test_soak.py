"""The soak finds nothing in this engine, and finds what is broken on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from batond.bench import soak
from batond.daemon.engine.queries.residency import Residency
from batond.daemon.errors import ConfigError
from batond.offload.slice import KVSlice

if TYPE_CHECKING:
    from batond.daemon.engine.queries.query import Query


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(soak, "_stands", {})


@pytest.mark.parametrize("batch", ["padded", "ring"])
def test_a_short_soak_finds_nothing(batch: str) -> None:
    """R1, R2, R3, R7: random schedules equal solo runs, and solo runs equal transformers."""
    lines: list[str] = []
    report = soak.run(soak.Options(16, batch=batch, families=("llama", "lfm2")), lines.append)
    assert report.passed, lines
    assert report.batches == {"llama": batch, "lfm2": batch}
    assert report.counts["schedules"] == 16
    assert report.counts["copied"] > 5
    assert report.counts["anchored"] > 0
    assert report.summary().startswith("OK: 16 schedules")


@pytest.mark.slow
def test_a_damaged_slice_is_found_and_the_schedule_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soak that can't fail proves nothing: here parks keep the second token twice, the first not."""
    store = Residency._store

    def losing(self: Any, query: Query, kv: KVSlice) -> int | None:
        order = [1, 1, *range(2, kv.n_tokens)] if kv.n_tokens > 1 else [0]
        return store(self, query, KVSlice(kv.tokens[order], kv.state))

    monkeypatch.setattr(Residency, "_store", losing)
    options, lines = soak.Options(40, families=("gpt2",)), []
    report = soak.run(options, lines.append)
    assert not report.passed
    number = report.mismatches[0].number
    assert any(f"--seed {number} --schedules 1 --family gpt2" in line for line in lines)
    monkeypatch.setattr(soak, "_stands", {})
    again = soak.run(soak.Options(1, seed=number, families=("gpt2",)), lines.append)
    assert [one.number for one in again.mismatches] == [number]
    assert again.mismatches[0].faults == report.mismatches[0].faults


def test_options_without_meaning_are_refused() -> None:
    for wrong in ({"dtype": "int4"}, {"families": ("nobody",)}, {"rows": 0}, {"workers": 0}):
        with pytest.raises(ConfigError):
            soak.Options(1, **wrong)
