"""Policies by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import ConfigError
from batond.policies import registry
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority
from batond.policies.registry import GROUP, load_policy, policy_names

if TYPE_CHECKING:
    from collections.abc import Callable


class Half:
    """Lacks methods."""

    name = "half"


class Misnamed(Fcfs):
    """Calls itself otherwise."""


class Refusing(Fcfs):
    """Can't be constructed."""

    name = "refusing"

    def __init__(self) -> None:
        raise RuntimeError("no licence")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace what is installed by entry points of the given values."""

    def register(*pairs: tuple[str, str]) -> None:
        points = EntryPoints(EntryPoint(name, value, GROUP) for name, value in pairs)
        monkeypatch.setattr(registry, "entry_points", points.select)

    return register


def test_built_in_policies_are_installed() -> None:
    assert {"deadline", "fair", "fcfs", "mlfq", "priority", "shortest"} <= set(policy_names())
    assert isinstance(load_policy("fcfs"), Fcfs)
    assert isinstance(load_policy("priority"), Priority)


@pytest.mark.parametrize("name", policy_names())
def test_every_installed_policy_loads_under_its_own_name(name: str) -> None:
    assert load_policy(name).name == name


def test_options_reach_the_constructor() -> None:
    policy = load_policy("priority", ageing_s=7.0)
    assert isinstance(policy, Priority)
    assert policy.ageing_s == 7.0


def test_unknown_option_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="colour"):
        load_policy("fcfs", colour="red")


def test_meaningless_option_keeps_its_message() -> None:
    with pytest.raises(ConfigError, match="ageing_s must be above 0"):
        load_policy("priority", ageing_s=0.0)


@pytest.mark.parametrize("name", ["fifo", "", "FCFS"])
def test_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"known policies: .*fcfs.*priority") as raised:
        load_policy(name)
    assert "fcfs" in raised.value.details["known"]


@pytest.mark.parametrize("value", ["batond_no_such_module:X", "batond.policies.fcfs:NoSuchClass"])
def test_failing_import_stops_the_start(register: Callable[..., None], value: str) -> None:
    register(("mine", value), ("other", "x:Y"))
    with pytest.raises(ConfigError, match=r"can't be loaded.*known policies: mine, other"):
        load_policy("mine")


def test_what_is_no_policy_is_refused_with_what_it_lacks(register: Callable[..., None]) -> None:
    register(("half", f"{__name__}:Half"))
    with pytest.raises(ConfigError, match="lacks rank, may_preempt, on_tokens"):
        load_policy("half")


def test_policy_under_a_foreign_name_is_refused(register: Callable[..., None]) -> None:
    register(("mine", f"{__name__}:Misnamed"))
    with pytest.raises(ConfigError, match="calls itself 'fcfs'"):
        load_policy("mine")


def test_failing_constructor_stops_the_start(register: Callable[..., None]) -> None:
    register(("refusing", f"{__name__}:Refusing"))
    with pytest.raises(ConfigError, match="no licence"):
        load_policy("refusing")


def test_name_claimed_by_two_packages_is_refused(register: Callable[..., None]) -> None:
    register(("mine", "a:A"), ("mine", "b:B"))
    with pytest.raises(ConfigError, match="registered twice: a:A, b:B"):
        load_policy("mine")
