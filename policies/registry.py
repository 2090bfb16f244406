"""Finds policies by entry point. A policy that can't be had stops the start; nothing falls back silently."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, cast

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from batond.policies.base import Policy

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
        ConfigError: No such name (the message lists the known ones), two packages claim it, its import or its
            constructor fails, or what comes out is no policy.
    """
    point = _find(name)
    try:
        factory = point.load()
        policy = factory(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"policy {name!r} ({point.value}) can't be loaded with options {options}: {error!r}; "
            f"known policies: {_known()}",
            policy=name,
        ) from error
    _check(name, policy)
    return cast("Policy", policy)


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
