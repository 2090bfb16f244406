"""Options of the command line: classes and tenants by name, and what is made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from batond.daemon.errors import ConfigError
from batond.daemon.queue.limits import TenantLimits
from batond.policies.classes import SlaClasses
from batond.policies.registry import check_configured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def pairs(text: str, field: str) -> dict[str, str]:
    """Read `name=value,name=value`.

    Raises:
        ConfigError: It is not of that form.
    """
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"{part!r} is not of the form name=value", field=field)
        found[key.strip()] = value.strip()
    return found


def policy_options(given: Sequence[str]) -> dict[str, dict[str, bool | int | float]]:
    """Read `policy.option=value`, each a number or true or false, and try the policies with them.

    Raises:
        ConfigError: One is not of that form, or the policy does not take it.
    """
    found: dict[str, dict[str, bool | int | float]] = {}
    for one in given:
        place, equals, text = one.partition("=")
        name, dot, option = place.strip().rpartition(".")
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not (equals and dot and name and option and isinstance(value, bool | int | float)):
            raise ConfigError(
                f"{one!r} is not of the form policy.option=number, such as fair.ageing_s=30", field="option"
            )
        found.setdefault(name, {})[option] = value
    check_configured(found)
    return found


def numbers(text: str, field: str) -> dict[str, float]:
    """Read `name=number,name=number`, all above 0.

    Raises:
        ConfigError: A value is something else.
    """
    found = {}
    for name, value in pairs(text, field).items():
        try:
            found[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"{field} of {name} is no number: {value!r}", field=field) from error
        if not 0 < found[name] < float("inf"):
            raise ConfigError(f"{field} of {name} must be above 0, not {value}", field=field)
    return found


def tenant_limits(weights: str, quotas: Mapping[str, str]) -> dict[str, TenantLimits]:
    """Shares and quotas of tenants.

    Args:
        weights: `tenant=number` pairs.
        quotas: The same for fields of `TenantLimits`, by field.

    Raises:
        ConfigError: Something is no number, or out of range.
    """
    limits = {name: TenantLimits(weight=value) for name, value in numbers(weights, "weights").items()}
    for field, text in quotas.items():
        for name, value in numbers(text, field).items():
            limits[name] = replace(limits.get(name, TenantLimits()), **{field: int(value)})
    return limits


def classes_with(longest_queue: str) -> SlaClasses:
    """The default classes with longest queue times, in seconds by class.

    Raises:
        ConfigError: A class is unknown, or a time makes no sense.
    """
    classes = SlaClasses()
    longest_s = numbers(longest_queue, "longest_queue")
    known_classes(longest_s, classes, "longest_queue")
    return SlaClasses(
        replace(sla, longest_queue_s=longest_s.get(sla.name, sla.longest_queue_s)) for sla in classes
    )


def known_classes(names: Mapping[str, object], classes: SlaClasses, field: str) -> None:
    """Refuse names of classes that there are not.

    Raises:
        ConfigError: There is one.
    """
    for name in names:
        if name not in classes:
            known = ", ".join(classes.names)
            raise ConfigError(f"unknown class {name!r}; known are {known}", field=field)
