"""Decides once a step who is prefilled, parked, resumed and admitted."""

from __future__ import annotations

import heapq
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from batond.daemon.scheduler.claims import holds_device_bytes
from batond.daemon.scheduler.draft import MAX_BLOCKED, Draft
from batond.daemon.scheduler.lanes import Kind, Walk
from batond.daemon.scheduler.line import Line
from batond.daemon.scheduler.plan import Gate
from batond.daemon.scheduler.rows import PlannerLimits

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
    - `parks` counts pre-emptions (`ParkOrder.preempts`), neither parks by hand nor those for a lowered limit.

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

    @property
    def limits(self) -> PlannerLimits:
        """Protection of running queries."""
        return self._limits

    def plan(self, view: BatchView, line: Line | None = None) -> Plan:
        """Decide the next step. One walk over the claims, as far as anybody can be served.

        Args:
            view: The engine now.
            line: Its queries, kept up to date since the last step: the same decisions, without a look at each
                of them. Ordered anew if the policy was exchanged. Without it, `view.queries` are sorted.
        """
        if line is None:
            line = Line.of(view.queries, self._policy)
        line.rank_by(self._policy)
        line.running.protect(self._limits)
        line.settle(view.now_s)
        draft = self._group(view, line) if view.gate is Gate.BATCH else self._walk(view, line)
        for query in heapq.nsmallest(MAX_BLOCKED, line.held.values(), key=attrgetter("seq")):
            draft.block(query, "held")
        return draft.finish()

    def _walk(self, view: BatchView, line: Line) -> Draft:
        draft = self._draft(view, line)
        walk = Walk(line, draft.shut)
        for query in walk:
            draft.serve(query)
            if draft.came_free():
                walk.reopen()
        if line.running or not line.has_claims or not draft.empty:
            return draft
        if draft.overdue is not None:
            overdue, draft = draft.overdue, self._draft(view, line)
            draft.serve_alone(overdue)
            return draft
        # Nobody runs who could give bytes back, and the first in line lacks some: smaller ones must pass, or
        # nothing would ever move again. Those that hold bytes go first, for they can give some back.
        draft = self._draft(view, line)
        for query in Walk(line, kinds={Kind.BEGUN, Kind.COPY, Kind.DROPPED}):
            if holds_device_bytes(query):
                draft.serve(query, in_line=False)
        if not draft.empty:
            return draft
        draft = self._draft(view, line)
        for query in Walk(line):
            draft.serve(query, in_line=False)
        if draft.empty:
            draft.serve_alone(_first(line))
        return draft

    def _group(self, view: BatchView, line: Line) -> Draft:
        draft = self._draft(view, line)
        draft.serve_group(Walk(line), idle=not line.running)
        if draft.empty and line.has_claims and not line.running:
            draft.serve_alone(_first(line), gated=True)
        return draft

    def _draft(self, view: BatchView, line: Line) -> Draft:
        draft = Draft(view, line, self._limits.pass_over_s)
        draft.shed()
        return draft


def _first(line: Line) -> QueryView:
    """The first claim of those that hold bytes on the device, else of all."""
    claims: list[QueryView] = [*Walk(line, kinds={Kind.BEGUN, Kind.DROPPED}), *islice(Walk(line), 1)]
    return next((query for query in claims if holds_device_bytes(query)), claims[-1])
