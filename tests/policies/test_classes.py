"""SLA classes."""

from __future__ import annotations

import math

import pytest

from batond.daemon.errors import ConfigError, InvalidRequestError
from batond.policies.classes import SlaClass, SlaClasses


def sla(name: str, order: int, **changes: object) -> SlaClass:
    values = {"preemptible": True, "ttft_target_s": 1.0, "tpot_target_s": 0.1} | changes
    return SlaClass(name=name, order=order, **values)


def test_defaults_are_those_of_the_design() -> None:
    """S11: clients see names only, the order is ours."""
    classes = SlaClasses()
    assert classes.names == ("interactive", "standard", "batch")
    assert [(c.order, c.preemptible) for c in classes] == [(0, False), (1, True), (2, True)]


def test_lookup_by_name() -> None:
    classes = SlaClasses()
    assert classes.get("batch").order == 2
    assert "batch" in classes
    assert "gold" not in classes
    assert len(classes) == 3


@pytest.mark.parametrize("name", ["gold", "", "Batch", "0"])
def test_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="interactive, standard, batch") as raised:
        SlaClasses().get(name)
    assert raised.value.reason == "UNKNOWN_CLASS"
    assert raised.value.details["known"] == "interactive, standard, batch"


def test_iterates_from_the_most_urgent_whatever_the_order_of_configuration() -> None:
    assert SlaClasses([sla("slow", 9), sla("quick", 0), sla("usual", 4)]).names == ("quick", "usual", "slow")


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="must differ"):
        SlaClasses([sla("a", 0), sla("a", 1)])


def test_no_class_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        SlaClasses([])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttft_target_s", 0.0),
        ("ttft_target_s", math.nan),
        ("tpot_target_s", -1.0),
        ("tpot_target_s", math.inf),
        ("longest_queue_s", 0.0),
        ("share", 0.0),
    ],
)
def test_meaningless_number_is_refused_by_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"gold: {field}") as raised:
        sla("gold", 0, **{field: value})
    assert raised.value.details["field"] == field


@pytest.mark.parametrize("name", ["", "Gold", "a b", "x" * 33, "9a", "a\n"])
def test_name_that_would_confuse_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="SLA class name"):
        sla(name, 0)


def test_negative_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="order"):
        sla("gold", -1)


@pytest.mark.parametrize(("given_s", "ms"), [(None, 0), (0.0004, 1), (0.3, 300), (2.0, 2000), (1e-9, 1)])
def test_the_shortest_longest_queue_time_is_still_one(given_s: float | None, ms: int) -> None:
    """0 ms means that it may wait for ever; who asked for less than a millisecond asked for the opposite."""
    assert sla("a", 0, longest_queue_s=given_s).longest_queue_ms == ms
