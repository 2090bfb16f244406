"""Traces and costs: what is read, and errors that say where they are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ConfigError
from batond.daemon.simulator.costs import PRESETS, load_costs
from batond.daemon.simulator.trace import Request, busiest, read_trace, rebased, with_classes
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "arrival_s,prompt_tokens,output_tokens"


def test_a_trace_is_read_and_sorted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEAD},tenant,class\n2.5,7,3,a,batch\n1,9,4,,\n")
    assert read_trace(path) == [Request(1.0, 9, 4), Request(2.5, 7, 3, "a", "batch")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lacks the columns arrival_s, prompt_tokens, output_tokens"),
        ("arrival_s,prompt_tokens\n1,2\n", "lacks the columns output_tokens"),
        (f"{HEAD}\n", "has no rows"),
        (f"{HEAD}\n1,2,3\n1,x,3\n", "line 3: invalid literal"),
        (f"{HEAD}\n1,2\n", "line 2: invalid literal"),
        (f"{HEAD}\n-1,2,3\n", "line 2: arrival_s must not be negative"),
        (f"{HEAD}\nnan,2,3\n", "line 2: arrival_s must not be negative"),
        (f"{HEAD}\n1,0,3\n", "line 2: .* at least 1, not 1, 0, 3"),
    ],
)
def test_a_bad_trace_says_what_and_where(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


def test_a_missing_or_binary_trace_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't be read"):
        read_trace(tmp_path / "binary.csv")


def test_the_busiest_window_begins_at_zero() -> None:
    requests = [Request(at, 1, 1) for at in (0.0, 50.0, 51.0, 52.0, 59.9, 60.0, 90.0)]
    assert [request.arrival_s for request in busiest(requests, 10)] == pytest.approx([0, 1, 2, 9.9])
    assert [request.arrival_s for request in rebased(requests[1:3], 2.0)] == [0.0, 0.5]


def test_classes_by_tenant_and_unknown_names() -> None:
    requests = [Request(0, 1, 1, "code"), Request(0, 1, 1, "conv", "batch")]
    mapped = with_classes(requests, SlaClasses(), {"code": "interactive"})
    assert [request.sla_class for request in mapped] == ["interactive", "batch"]
    with pytest.raises(ConfigError, match="unknown class 'slow'"):
        with_classes(requests, SlaClasses(), {"code": "slow"})
    with pytest.raises(ConfigError, match="no tenant 'cod'"):
        with_classes(requests, SlaClasses(), {"cod": "batch"})


def test_costs_come_from_a_preset_a_file_and_single_values(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"step_s": 0.5}))
    costs = load_costs(str(path), ["row_s=0.25"])
    assert (costs.step_s, costs.row_s) == (0.5, 0.25)
    assert costs.prefill_s == PRESETS["h100"].prefill_s


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("a100", "", "neither a preset"),
        ("cpu", "speed=1", "unknown costs speed"),
        ("cpu", "step_s", "must be a number"),
        ("cpu", "step_s=fast", "not of the form"),
        ("cpu", "step_s=0", "must be above 0"),
        ("cpu", "row_s=-1", "from 0 on"),
        ("cpu", "row_s=NaN", "from 0 on"),
        ("cpu", "kv_bytes=0.5", "whole number"),
    ],
)
def test_bad_costs_are_refused(name: str, change: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_costs(name, [change] if change else [])
