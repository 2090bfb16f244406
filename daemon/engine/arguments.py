"""What an engine is made with: checked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from batond.daemon.errors import ConfigError
from batond.policies.registry import load_policy

if TYPE_CHECKING:
    from batond.policies.base import Policy


def as_policy(policy: str | Policy) -> Policy:
    """A policy, or the registered one of this name.

    Raises:
        ConfigError: There is none of the name, or it lacks something.
    """
    if isinstance(policy, str):
        return load_policy(policy)
    methods = ("rank", "may_preempt", "on_tokens")
    lacks = [method for method in methods if not callable(getattr(policy, method, None))]
    # A class has them too, and each call of one fails: `priority` would decide for ever.
    if lacks or isinstance(policy, type) or not isinstance(policy.name, str):
        raise ConfigError(f"policy must be a policy or the name of one, not {policy!r}", field="policy")
    return policy


def check_arguments(
    *,
    rows: int,
    prefill: str,
    chunk_tokens: int | Literal["auto"] | None,
    host_pool_bytes: int,
    kv_budget_bytes: int | None,
    session_bytes: int | None,
    session_ttl_s: float,
    spill_bytes: int | None,
) -> None:
    """Refuse what has no meaning; see `LocalEngine`.

    Raises:
        ConfigError: With the name of the argument.
    """
    given: tuple[tuple[str, Any, int], ...] = (
        ("rows", rows, 1),
        ("host_pool_bytes", host_pool_bytes, 0),
        ("kv_budget_bytes", 1 if kv_budget_bytes is None else kv_budget_bytes, 1),
        ("session_bytes", 0 if session_bytes is None else session_bytes, 0),
        ("spill_bytes", 0 if spill_bytes is None else spill_bytes, 0),
    )
    for name, value, least in given:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}", field=name)
    if prefill not in {"decoupled", "inline"}:
        raise ConfigError(f'prefill must be "decoupled" or "inline", not {prefill!r}', prefill=prefill)
    if chunk_tokens not in {None, "auto"} and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise ConfigError(
            f'chunk_tokens must be "auto" or at least 1, not {chunk_tokens!r}', chunk_tokens=chunk_tokens
        )
    if not session_ttl_s > 0:
        raise ConfigError(f"session_ttl_s must be above 0, not {session_ttl_s}", field="session_ttl_s")
