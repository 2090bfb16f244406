"""What becomes of a policy that raises: counted, logged, and `priority` decides in its place."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from batond.daemon.scheduler.hints import speaks_for
from batond.daemon.scheduler.planner import Planner
from batond.daemon.scheduler.victims import VictimPool
from batond.policies.base import CountsByOwner, TracksEnds
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from batond.daemon.scheduler.line import Line
    from batond.daemon.scheduler.plan import BatchView, Plan
    from batond.policies.base import Policy, QueryView

LOG_EVERY_S: Final = 60.0

_log = logging.getLogger(__name__)


class PolicyGuard:
    """Plans and accounts under the planner's policy, whatever the policy does.

    A step whose plan failed is planned from scratch under `Priority`; the policy is asked again in the next.

    Args:
        planner: Its policy may be exchanged at any time.
        counters: `policy_errors` is counted here.
        clock: Monotonic seconds.
    """

    def __init__(
        self, planner: Planner, counters: Counter[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._planner, self._counters, self._clock = planner, counters, clock
        self._logged_s = -LOG_EVERY_S
        self._unlogged = 0
        self._asked: Policy | None = None  # Whose hint is known.
        self._counts_by_owner = False

    @property
    def policy(self) -> Policy:
        """The active policy."""
        return self._planner.policy

    def plan(self, view: BatchView, line: Line) -> Plan:
        """As `Planner.plan`."""
        try:
            return self._planner.plan(view, line)
        except Exception as error:  # noqa: BLE001 - a policy is anybody's code
            self._note(error, "priority plans this step")
        line.reorder(self._planner.policy)  # What it raised in the middle of is begun anew.
        substitute = Planner(Priority(), self._planner.limits)
        return substitute.plan(replace(view, queries=tuple(line.views)))

    def least_urgent(self, line: Line, now_s: float, count: int) -> list[str]:
        """Ids of the running queries that lose their rows first, whatever protects them otherwise.

        Args:
            line: Up to date.
            now_s: Monotonic clock.
            count: How many at most.
        """
        try:
            views = VictimPool(line, now_s).least_urgent(count)
        except Exception as error:  # noqa: BLE001 - as above
            self._note(error, "classes decide who gives up a row")
            running = [line.running.view(query_id) for query_id in line.running]
            views = tuple(sorted(running, key=attrgetter("class_order", "seq"), reverse=True)[:count])
        return [view.query_id for view in views]

    def less_urgent(self, line: Line, query: QueryView, now_s: float, *, equals: bool) -> list[str]:
        """Ids of the running queries that a query may take rows from, as `VictimPool.less_urgent`."""
        try:
            views = VictimPool(line, now_s).less_urgent(query, equals=equals)
        except Exception as error:  # noqa: BLE001 - as above
            self._note(error, "nobody gives up a row")
            return []
        return [view.query_id for view in views]

    @property
    def counts_by_owner(self) -> bool:
        """Whether `on_tokens` takes a query as it was some tokens ago; see `CountsByOwner`."""
        policy = self._planner.policy
        if policy is not self._asked:
            self._asked = policy
            offered = isinstance(policy, CountsByOwner) and policy.counts_by_owner
            self._counts_by_owner = offered and speaks_for(policy, "counts_by_owner", "on_tokens")
        return self._counts_by_owner

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """As `Policy.on_tokens`; what it raises leaves the tokens unaccounted."""
        try:
            self._planner.policy.on_tokens(query, prompt_tokens, output_tokens)
        except Exception as error:  # noqa: BLE001 - as above
            self._note(error, "tokens are not accounted for")

    def on_end(self, query: QueryView) -> None:
        """As `TracksEnds.on_end`, if the policy has it."""
        policy = self._planner.policy
        if not isinstance(policy, TracksEnds):
            return
        try:
            policy.on_end(query)
        except Exception as error:  # noqa: BLE001 - as above
            self._note(error, "it did not learn of an end")

    def _note(self, error: Exception, outcome: str) -> None:
        self._counters["policy_errors"] += 1
        now_s = self._clock()
        if now_s - self._logged_s < LOG_EVERY_S:
            self._unlogged += 1
            return
        _log.error(
            "policy %s raised; %s; %d errors since the last such line",
            self._planner.policy.name,
            outcome,
            self._unlogged,
            exc_info=error,
        )
        self._logged_s, self._unlogged = now_s, 0
