"""Ageing by SLA class, and the waits that follow from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.errors import ConfigError
from batond.policies.base import Phase

if TYPE_CHECKING:
    from batond.policies.base import QueryView


def aged_level(query: QueryView, now_s: float, ageing_s: float) -> float:
    """Class order of a query, less one for every `ageing_s` since its arrival; running queries don't age."""
    # A clock that runs behind the arrival must not push a query back.
    if query.phase is Phase.RUNNING or now_s <= query.arrival_s:
        return query.class_order
    return query.class_order - (now_s - query.arrival_s) // ageing_s


def check_ageing(ageing_s: float) -> float:
    """Return `ageing_s`.

    Raises:
        ConfigError: It is not above 0; infinity, which turns ageing off, is.
    """
    if not ageing_s > 0:
        raise ConfigError(f"ageing_s must be above 0, not {ageing_s}", field="ageing_s")
    return ageing_s


def worst_first_row_s(levels: int, ageing_s: float, backlog_tokens: float, tokens_per_s: float) -> float:
    """Bound of the time from arrival to the first row under a policy that sorts by `aged_level` first.

    Args:
        levels: Ageing steps after which nothing that arrives is sorted before the query.
        ageing_s: Seconds that are worth one class.
        backlog_tokens: Tokens still to be computed then for all that runs or is sorted before the query, and
            for those that take rows from these: each is parked `max_parks` times at most, for one query of a
            more urgent class each time.
        tokens_per_s: Tokens that all rows together compute in a second.
    """
    return levels * ageing_s + backlog_tokens / tokens_per_s


def worst_finish_s(
    first_row_s: float, *, longest_turn_s: float, own_tokens: int, token_s: float, max_parks: int
) -> float:
    """Bound of the time from arrival to the last token, pre-emptions included.

    A query parked `max_parks` times is not pre-empted any more, and a parked one stands before every fresh
    query of its class, so after each park it waits for one row to come free.

    Args:
        first_row_s: Bound of the wait for the first row.
        longest_turn_s: Longest time until some row comes free, a row being kept to the end of its query.
        own_tokens: Output tokens of the query.
        token_s: Time of one decode step.
        max_parks: `PlannerLimits.max_parks`.
    """
    return first_row_s + max_parks * longest_turn_s + own_tokens * token_s
