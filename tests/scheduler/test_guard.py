"""A policy that raises costs its own decisions, not the engine."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.scheduler.guard import PolicyGuard
from batond.daemon.scheduler.hints import speaks_for
from batond.daemon.scheduler.line import Line
from batond.daemon.scheduler.plan import BatchView
from batond.daemon.scheduler.planner import Planner
from batond.policies.fair import Fair
from batond.policies.fcfs import Fcfs
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from batond.policies.base import QueryView, Rank

    from .conftest import Views


class Broken(Fcfs):
    """Raises in the method it is told to, while it is told to."""

    name = "broken"

    def __init__(self, method: str) -> None:
        self.method: str | None = method

    def rank(self, query: QueryView, now_s: float) -> Rank:
        self._fail("rank")
        return super().rank(query, now_s)

    def may_preempt(self, newcomer: QueryView, victim: QueryView, now_s: float) -> bool:
        self._fail("may_preempt")
        return super().may_preempt(newcomer, victim, now_s)

    def line_of(self, query: QueryView) -> int:
        self._fail("line_of")
        return super().line_of(query)

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        self._fail("on_tokens")

    def on_end(self, query: QueryView) -> None:
        self._fail("on_end")

    def _fail(self, method: str) -> None:
        if method == self.method:
            raise ZeroDivisionError(method)


class Rubbish(Fcfs):
    """Answers what can't be compared."""

    name = "rubbish"

    def rank(self, query: QueryView, now_s: float) -> Any:
        return (None, {}) if query.seq % 2 else super().rank(query, now_s)


class NoNumber(Fcfs):
    """Answers what compares with nothing, for some queries and not in each step."""

    name = "no-number"

    def __init__(self) -> None:
        self.wrong = True

    def rank(self, query: QueryView, now_s: float) -> Rank:
        level, *rest = super().rank(query, now_s)
        return (math.nan if self.wrong and query.seq % 2 else level, *rest)


def view_of(*queries: QueryView) -> BatchView:
    return BatchView(100.0, 1, queries, host_free_bytes=1 << 30)


@pytest.mark.parametrize("method", ["rank", "may_preempt", "line_of"])
def test_priority_plans_the_step_of_a_policy_that_raises(views: Views, method: str) -> None:
    queries = [views.running("batch"), views.ready("interactive"), views.waiting("batch")]
    policy, counters = Broken(method), Counter[str]()
    planner = Planner(policy)
    guard, line = PolicyGuard(planner, counters), Line.of(queries, policy)
    expected = Planner(Priority()).plan(view_of(*queries))
    assert expected.park
    assert guard.plan(view_of(), line) == expected
    assert counters["policy_errors"] == 1
    # It is asked again in the next step; nothing of the line is lost.
    policy.method = None
    assert guard.plan(view_of(), line) == Planner(Fcfs()).plan(view_of(*queries))
    assert counters["policy_errors"] == 1


def test_ranks_that_cannot_be_compared(views: Views) -> None:
    queries = [views.waiting(sla) for sla in ("batch", "standard", "interactive", "interactive")]
    queries += [views.parked(park_seq=number) for number in (1, 2)]
    policy, counters = Rubbish(), Counter[str]()
    planner = Planner(policy)
    guard, line = PolicyGuard(planner, counters), Line.of(queries, policy)
    for step in (1, 2, 3):
        assert guard.plan(view_of(), line) == Planner(Priority()).plan(view_of(*queries))
        assert counters["policy_errors"] == step
    planner.policy = Fcfs()
    assert guard.plan(view_of(), line) == Planner(Fcfs()).plan(view_of(*queries))
    for query in queries:
        line.remove(query.query_id)
    assert not line.views
    assert not line.lanes()


@pytest.mark.parametrize("lines", [True, False], ids=["lines", "no lines"])
def test_ranks_that_are_no_numbers_are_errors(views: Views, *, lines: bool) -> None:
    """No order can be kept among them: they must neither lose a query nor bring the line into disorder."""
    policy, counters, dice = NoNumber(), Counter[str](), random.Random(1)
    if not lines:
        vars(policy)["line_of"] = None
    queries = [views.waiting() for _ in range(20)] + [views.parked(park_seq=place) for place in range(1, 20)]
    dice.shuffle(queries)
    guard, line = PolicyGuard(Planner(policy), counters), Line(policy)
    for step, query in enumerate(queries):
        line.put(query)
        policy.wrong = dice.random() < 0.7
        errors = counters["policy_errors"]
        plan = guard.plan(view_of(), line)
        known = queries[: step + 1]
        if counters["policy_errors"] > errors:
            assert plan == Planner(Priority()).plan(view_of(*known))
        else:
            assert plan == Planner(Fcfs()).plan(view_of(*known))
    assert 0 < counters["policy_errors"] < len(queries)
    dice.shuffle(queries)
    for place, query in enumerate(queries):
        line.remove(query.query_id)
        policy.wrong = place % 3 == 0
        guard.plan(view_of(), line)
        assert len(line.views) == len(queries) - place - 1
    assert not line.lanes()


def test_accounting_that_raises_is_counted(views: Views) -> None:
    counters = Counter[str]()
    PolicyGuard(Planner(Broken("on_tokens")), counters).on_tokens(views.running(), 0, 1)
    PolicyGuard(Planner(Broken("on_end")), counters).on_end(views.running())
    PolicyGuard(Planner(Fcfs()), counters).on_end(views.running())
    assert counters["policy_errors"] == 2


def test_the_log_has_one_line_a_minute(views: Views, caplog: pytest.LogCaptureFixture) -> None:
    """With the traceback, and the number of errors that were not logged."""
    clock = [1000.0]
    guard = PolicyGuard(Planner(Broken("on_tokens")), Counter(), lambda: clock[0])
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            guard.on_tokens(views.running(), 0, 1)
        assert len(caplog.records) == 1
        clock[0] += 60.0
        guard.on_tokens(views.running(), 0, 1)
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert "ZeroDivisionError" in caplog.text
    assert "99 errors" in caplog.records[1].getMessage()


class Reading(Fair):
    """Accounts in its own way, and says nothing of how."""

    name = "reading"

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing."""


class ReadingToo(Reading):
    """Says so again."""

    counts_by_owner = True


def test_a_hint_holds_for_the_method_it_was_made_for() -> None:
    """Who replaces a method does not inherit what was said of it; an exchange is seen at once."""
    planner = Planner(Fair())
    guard = PolicyGuard(planner, Counter())
    answers = []
    for policy in (Fair(), Reading(), ReadingToo(), Broken("rank"), Rubbish()):
        planner.policy = policy
        answers.append(guard.counts_by_owner)
    assert answers == [True, False, True, False, True]
    plain = Fair()
    vars(plain)["on_tokens"] = print
    assert not speaks_for(plain, "counts_by_owner", "on_tokens")


@pytest.mark.parametrize(
    ("sla", "equals", "expected"),
    [
        ("interactive", False, ["b2", "b1", "s"]),
        ("standard", False, ["b2", "b1"]),
        ("batch", False, []),
        ("batch", True, ["b2"]),
    ],
)
def test_who_makes_room_for_a_prompt(views: Views, sla: str, equals: bool, expected: list[str]) -> None:  # noqa: FBT001 - a parameter
    """Rule 1 holds in the middle of a step too; equals give way only to those before them."""
    rows = {"b1": views.running("batch", since=0), "s": views.running("standard", since=0)}
    prompt = views.prefilling(sla)
    rows["b2"] = views.running("batch", since=0)
    names = {view.query_id: name for name, view in rows.items()}
    for policy, found in ((Priority(), expected), (Broken("may_preempt"), [])):
        counters: Counter[str] = Counter()
        guard = PolicyGuard(Planner(policy), counters)
        line = Line(policy, {view.query_id: view for view in rows.values()}.__getitem__)
        for view in rows.values():
            line.put(view)
        ids = guard.less_urgent(line, prompt, prompt.arrival_s, equals=equals)
        assert [names[query_id] for query_id in ids] == found
        assert bool(counters["policy_errors"]) == (policy.name == "broken")
