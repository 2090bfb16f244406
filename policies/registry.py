"""Finds policies by entry point. A policy that can't be had stops the start; nothing falls back silently."""

from __future__ import annotations

import difflib
import inspect
import math
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batond.policies.base import Policy

    #: Options by policy and name, as the configuration has them.
    PolicyOptions: TypeAlias = Mapping[str, Mapping[str, bool | int | float]]

GROUP: Final = "batond.policies"
_METHODS: Final = ("rank", "may_preempt", "on_tokens")


def policy_names() -> tuple[str, ...]:
    """Names of all registered policies, sorted; none of them is imported for it."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def load_policy(name: str, **options: object) -> Policy:
    """Import and construct the policy registered as `name`.

    Args:
        name: Name of the entry point in the group `batond.policies`.
        options: Keyword arguments of the policy's constructor.

    Raises:
        ConfigError: No such name (the message lists the known ones), two packages claim it, it has no such
            option or the option no such value, its import or its constructor fails, or what comes out is no
            policy.
    """
    point = _find(name)
    try:
        factory = point.load()
        _check_options(name, factory, options)
        policy = factory(**options)
    except ConfigError as error:
        if error.message.startswith("policy "):
            raise
        raise ConfigError(
            f"policy {name!r}: {error.message}", **(error.details | {"policy": name})
        ) from error
    except Exception as error:
        raise ConfigError(
            f"policy {name!r} ({point.value}) can't be loaded with options {options}: {error!r}; "
            f"known policies: {_known()}",
            policy=name,
        ) from error
    _check(name, policy)
    return cast("Policy", policy)


def load_configured(name: str, options: PolicyOptions) -> Policy:
    """Load a policy with the options that the configuration has for it.

    Args:
        name: As in `load_policy`.
        options: Those of all policies.

    Raises:
        ConfigError: As in `load_policy`.
    """
    return load_policy(name, **options.get(name, {}))


def check_configured(options: PolicyOptions) -> None:
    """Load every policy that has options, so that a fault stops the start and not an exchange weeks later.

    Raises:
        ConfigError: As in `load_policy`.
    """
    for name in options:
        load_configured(name, options)


def _check_options(name: str, factory: Callable[..., object], options: Mapping[str, object]) -> None:
    """Check names, and that a number stands where the default is one; what it may be, the policy knows."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # Not every constructor tells.
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for option, value in options.items():
        if option not in parameters:
            near = difflib.get_close_matches(option, parameters, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(parameters) or 'none'}"
            raise ConfigError(f"policy {name!r} has no option {option!r}; {hint}", policy=name, option=option)
        wanted = _unlike(parameters[option].default, value)
        if wanted:
            raise ConfigError(
                f"policy {name!r}: {option} must be {wanted}, not {value!r}", policy=name, option=option
            )


def _unlike(default: object, value: object) -> str:
    """What a value would have to be, to be like the default; empty if it is."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return "" if number and isinstance(value, int) else "a whole number"
    if isinstance(default, float):
        return "" if number and not math.isnan(cast("float", value)) else "a number"
    return ""


def _find(name: str) -> EntryPoint:
    points = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if not points:
        raise ConfigError(f"unknown policy {name!r}; known policies: {_known()}", policy=name, known=_known())
    if len(points) > 1:
        raise ConfigError(
            f"policy {name!r} is registered twice: {', '.join(sorted(points))}; remove one package",
            policy=name,
        )
    return next(iter(points.values()))


def _check(name: str, policy: object) -> None:
    missing = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise ConfigError(
            f"policy {name!r} ({type(policy).__qualname__}) is no policy: it lacks {', '.join(missing)}",
            policy=name,
        )
    if getattr(policy, "name", None) != name:
        raise ConfigError(
            f"policy {name!r} calls itself {getattr(policy, 'name', None)!r}; both names must agree",
            policy=name,
        )


def _known() -> str:
    return ", ".join(policy_names()) or "none"
