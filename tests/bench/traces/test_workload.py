"""Which rows of a trace are replayed, as what, and which wishes contradict each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batond.bench.traces.options import Options, OwnDaemon, RunningDaemon
from batond.bench.traces.workload import choose, offered_classes, prompts, with_targets, write_requests
from batond.clients.model import SlaClass as Offered
from batond.daemon.errors import ConfigError
from batond.policies.classes import DEFAULT_CLASSES, SlaClasses

if TYPE_CHECKING:
    from pathlib import Path

CLASSES = SlaClasses()


def test_the_busiest_window_is_thinned_and_shrunk(trace: Path) -> None:
    options = Options(
        trace=trace,
        classes={"code": "interactive", "conv": "batch"},
        window_s=10,
        requests=15,
        shrink=16,
    )
    chosen = choose(options, CLASSES)
    requests = chosen.requests
    assert (chosen.trace_rows, chosen.window_rows, chosen.begins_s) == (34, 30, 50.0)
    assert len(requests) == 15
    assert requests[0].arrival_s == 0.0
    assert requests[-1].arrival_s == pytest.approx(2.8)
    assert {request.prompt_tokens for request in requests} <= {10, 11, 12, 13, 14}
    assert {request.output_tokens for request in requests} <= {2, 3, 4}
    assert {request.sla_class for request in requests} == {"interactive", "batch"}
    assert "15 of 30 rows from 50 s on, of 34" in chosen.described()


def test_a_window_can_begin_where_it_is_told(trace: Path) -> None:
    chosen = choose(Options(trace=trace, start_s=5, window_s=20, requests=0), CLASSES)
    assert [one.arrival_s for one in chosen.requests] == [0.0, 10.0]
    with pytest.raises(ConfigError, match="no request arrives in the 5 s from 200 s on"):
        choose(Options(trace=trace, start_s=200, window_s=5), CLASSES)


def test_rows_that_do_not_fit_are_left_out_before_the_window_is_chosen(trace: Path) -> None:
    chosen = choose(Options(trace=trace, fit_tokens=200, window_s=100, requests=0), CLASSES)
    assert max(one.prompt_tokens + one.output_tokens for one in chosen.requests) <= 200
    assert chosen.too_long == 34 - len(chosen.requests) > 0
    assert "too long" in chosen.described()
    # What a daemon takes counts after lengths were divided.
    assert choose(Options(trace=trace, shrink=16), CLASSES, most_tokens=20).too_long == 0
    with pytest.raises(ConfigError, match="at most 50 tokens"):
        choose(Options(trace=trace), CLASSES, most_tokens=50)


def test_classes_by_lot_are_the_same_for_a_row_whatever_the_window(trace: Path) -> None:
    share = {"interactive": 0.3, "batch": 0.7}
    whole = choose(Options(trace=trace, share=share, window_s=0, requests=0), CLASSES).requests
    late = choose(Options(trace=trace, share=share, window_s=10, requests=0), CLASSES).requests
    assert [one.sla_class for one in whole[-30:]] == [one.sla_class for one in late]
    assert {one.sla_class for one in whole} == {"interactive", "batch"}
    other = choose(Options(trace=trace, share=share, window_s=0, requests=0, seed=1), CLASSES).requests
    assert [one.sla_class for one in whole] != [one.sla_class for one in other]
    with pytest.raises(ConfigError, match="unknown class 'urgent'"):
        choose(Options(trace=trace, share={"urgent": 1.0}), CLASSES)


def test_targets_take_the_place_of_those_of_a_class() -> None:
    some = Options(trace=None, ttft_s={"batch": 9.0}, tpot_s={"interactive": 0.5})  # type: ignore[arg-type]
    classes = with_targets(DEFAULT_CLASSES, some)
    assert classes.get("batch").ttft_target_s == 9.0
    assert classes.get("batch").tpot_target_s == 1.0
    assert classes.get("interactive").tpot_target_s == 0.5
    with pytest.raises(ConfigError, match="unknown class 'urgent'"):
        with_targets(DEFAULT_CLASSES, Options(trace=None, ttft_s={"urgent": 1.0}))  # type: ignore[arg-type]


def test_a_class_of_a_running_daemon_needs_targets_that_are_known() -> None:
    offered = [Offered("batch", 1, preemptible=True), Offered("gold", 0, preemptible=False)]
    named = Options(trace=None, ttft_s={"gold": 2.0}, tpot_s={"gold": 0.1})  # type: ignore[arg-type]
    classes = offered_classes(offered, named)
    assert list(classes.names) == ["gold", "batch"]
    assert (classes.get("gold").ttft_target_s, classes.get("batch").ttft_target_s) == (2.0, 60.0)
    with pytest.raises(ConfigError, match="--tpot gold="):
        offered_classes(offered, Options(trace=None, ttft_s={"gold": 2.0}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"shrink": 0.5}, "shrink must be at least 1"),
        ({"requests": -1}, "requests must be at least 0"),
        ({"window_s": float("nan")}, "window_s must be at least 0"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"start_s": -1.0}, "begin at 0 s or later"),
        ({"rate": 1.0, "load": 1.0}, "rate and load exclude each other"),
        ({"load": 1.0, "saturate": True}, "load and saturate exclude each other"),
        ({"load": 1.0, "simulate": False}, "give a rate"),
        ({"classes": {"a": "batch"}, "share": {"batch": 1.0}}, "classes and share"),
        ({"policies": ()}, "no policy"),
        ({"daemon": RunningDaemon(address="x:1")}, "is not simulated"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Options(trace=None, **wishes)  # type: ignore[arg-type]


def test_the_load_is_what_nothing_else_says() -> None:
    where: dict[str, Any] = {"trace": None, "daemon": OwnDaemon()}
    assert Options(**where).effective_load == 1.1
    assert Options(**where, load=2.0).effective_load == 2.0
    assert Options(**where, rate=2.0).effective_load is None
    assert Options(**where, saturate=True).effective_load is None
    assert Options(**where, simulate=False).effective_load is None


def test_tokens_are_those_of_the_tenant_else_of_all() -> None:
    some = RunningDaemon(address="x:1", token="all", tokens={"code": "c", "operator": "o"})
    assert (some.token_of("code"), some.token_of("conv"), some.operator_token) == ("c", "all", "o")
    assert RunningDaemon(address="x:1").token_of("code") is None
    with pytest.raises(ConfigError, match="no token for the tenant 'conv'"):
        RunningDaemon(address="x:1", tokens={"code": "c"}).token_of("conv")


def test_no_credential_is_told_in_a_file(trace: Path) -> None:
    daemon = RunningDaemon(address="x:1", token="secret-one", tokens={"code": "secret-two"})
    told = json.dumps(Options(trace=trace, daemon=daemon, simulate=False).about())
    assert "secret" not in told
    assert str(trace.parent) not in told
    assert '"trace": "trace.csv"' in told


def test_requests_are_written_for_other_systems(trace: Path, tmp_path: Path) -> None:
    requests = choose(Options(trace=trace, window_s=10, requests=5), CLASSES).requests
    write_requests(tmp_path / "requests.json", requests)
    rows = json.loads((tmp_path / "requests.json").read_text())
    assert [(one["prompt_len"], one["output_len"]) for one in rows] == [
        (one.prompt_tokens, one.output_tokens) for one in requests
    ]
    assert prompts(requests, 50, 1) == prompts(requests, 50, 1)
    assert [len(one) for one in prompts(requests, 50, 2)] == [one["prompt_len"] for one in rows]
