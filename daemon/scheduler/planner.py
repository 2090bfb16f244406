"""Decides once a step who is prefilled, parked, resumed and admitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batond.daemon.scheduler.claims import holds_device_bytes, order_claims
from batond.daemon.scheduler.draft import Draft
from batond.daemon.scheduler.plan import Gate
from batond.daemon.scheduler.victims import PlannerLimits
from batond.policies.base import Phase

if TYPE_CHECKING:
    from batond.daemon.scheduler.plan import BatchView, Plan
    from batond.policies.base import Policy, QueryView

__all__ = ["Planner", "PlannerLimits"]


class Planner:
    """Turns a view of the engine into a plan, under any policy. Pure: it changes nothing but its own draft.

    The engine does the plan in this order: chunks, park, resume and admit, one decode step for all rows. What
    the planner takes for granted in a view:

    - `kv_free_bytes` has the whole reserve of running queries and the present KV of all others subtracted,
      and counts the bytes of parks under way as free.
    - A parked query without a copy of its KV shows `to_prefill_tokens` > 0 from the park on; while that is
      computed, its phase may be PARKED or PREFILLING, and it keeps `park_seq` until it has a row.
    - `parks` counts pre-emptions, neither parks by hand nor those for a lowered row limit.

    Args:
        policy: Order and pre-emption.
        limits: Protection of running queries.
    """

    def __init__(self, policy: Policy, limits: PlannerLimits = PlannerLimits()) -> None:  # noqa: B008 - frozen
        self._policy = policy
        self._limits = limits

    @property
    def policy(self) -> Policy:
        """The active policy; an exchange takes effect in the next plan."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy

    def plan(self, view: BatchView) -> Plan:
        """Decide the next step. One sort of the claims, one walk over them."""
        running = [query for query in view.queries if query.phase is Phase.RUNNING]
        fit = [query for query in view.queries if query.phase is not Phase.RUNNING and not query.held]
        claims = order_claims(fit, self._policy, view.now_s)
        if view.gate is Gate.BATCH:
            draft = self._draft(view, running, claims)
            draft.serve_group(claims, idle=not running)
        else:
            draft = self._walk(view, running, claims)
        held = [query for query in view.queries if query.held and query.phase is not Phase.RUNNING]
        for query in sorted(held, key=lambda query: query.seq):
            draft.block(query, "held")
        return draft.finish()

    def _walk(self, view: BatchView, running: list[QueryView], claims: list[QueryView]) -> Draft:
        draft = self._serve(view, running, claims, in_line=True)
        if running or not claims or not draft.finish().empty:
            return draft
        # Nobody runs who could give bytes back, and the first in line lacks some: smaller ones must pass, or
        # nothing would ever move again. Those that hold bytes go first, for they can give some back.
        holders = [query for query in claims if holds_device_bytes(query)]
        draft = self._serve(view, running, holders, in_line=False)
        if draft.finish().empty:
            draft = self._serve(view, running, claims, in_line=False)
        return draft

    def _serve(
        self, view: BatchView, running: list[QueryView], claims: list[QueryView], *, in_line: bool
    ) -> Draft:
        draft = self._draft(view, running, claims)
        for query in claims:
            draft.serve(query, in_line=in_line)
        return draft

    def _draft(self, view: BatchView, running: list[QueryView], claims: list[QueryView]) -> Draft:
        draft = Draft(view, running, claims, self._policy, self._limits)
        draft.shed_rows()
        return draft
