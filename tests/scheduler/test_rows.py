"""Running queries are kept sorted from token to token as they would be sorted anew."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from batond.daemon.scheduler.rows import PlannerLimits, Rows, Standing

if TYPE_CHECKING:
    from batond.policies.base import QueryView

    from .conftest import Views

LIMITS = PlannerLimits(quantum_tokens=5, max_parks=2, prefetch_tokens=3)


def sorted_anew(live: dict[str, QueryView], limits: PlannerLimits) -> dict[tuple[int, Standing], set[str]]:
    """What protects whom, said plainly."""
    groups: dict[tuple[int, Standing], set[str]] = {}
    for query in live.values():
        if not query.preemptible:
            standing = Standing.KEPT
        elif query.parks >= limits.max_parks:
            standing = Standing.CAPPED
        elif query.since_admission_tokens < limits.quantum_tokens:
            standing = Standing.IN_QUANTUM
        else:
            standing = Standing.OPEN
        groups.setdefault((query.class_order, standing), set()).add(query.query_id)
    return groups


def check(rows: Rows, live: dict[str, QueryView], limits: PlannerLimits) -> None:
    """Compare all that is kept with what the queries say."""
    kept = {(group.class_order, group.standing): set(group.members) for group in rows.groups}
    assert kept == sorted_anew(live, limits)
    for group in rows.groups:
        assert group.reserved_bytes == sum(live[query_id].reserved_bytes for query_id in group.members)
    assert rows.reserved_bytes == sum(query.reserved_bytes for query in live.values())
    assert rows.written_bytes == sum(query.kv_bytes for query in live.values())
    near = limits.prefetch_tokens
    assert rows.ending == {
        query.query_id for query in live.values() if query.max_tokens - query.output_tokens <= near
    }
    assert set(rows) == set(live)
    assert len(rows) == len(live)


@pytest.mark.parametrize("seed", range(6))
def test_kept_rows_are_as_sorted_anew(views: Views, seed: int) -> None:
    """Rule 4 and the cap: queries come, decode, get a row anew, go; limits change in between."""
    dice = random.Random(seed)
    live: dict[str, QueryView] = {}
    made: list[str] = []

    def view_of(query_id: str) -> QueryView:
        made.append(query_id)
        return live[query_id]

    rows, limits = Rows(view_of), LIMITS
    rows.protect(limits)
    for _ in range(400):
        if len(live) < 12 and dice.random() < 0.3:
            sla = dice.choice(("interactive", "standard", "batch"))
            query = views.running(sla, since=dice.randint(0, 8), parks=dice.randint(0, 3), max_tokens=40)
            live[query.query_id] = query
            rows.put(query)
        for query_id in dice.sample(sorted(live), k=len(live) // 2):
            query = live[query_id]
            live[query_id] = query = replace(
                query,
                output_tokens=query.output_tokens + 1,
                since_admission_tokens=query.since_admission_tokens + 1,
                kv_bytes=query.kv_bytes + 1,
            )
            if dice.random() < 0.3:
                rows.put(query)
            else:
                rows.advance(
                    query_id,
                    left_tokens=query.max_tokens - query.output_tokens,
                    since_admission_tokens=query.since_admission_tokens,
                    kv_bytes=query.kv_bytes,
                )
        if live and dice.random() < 0.2:
            query_id = dice.choice(sorted(live))
            change = dice.choice(({"parks": 1}, {"since_admission_tokens": 0}, {"reserved_bytes": 777}))
            live[query_id] = replace(live[query_id], **change)
            rows.put(live[query_id])
        for query_id in [name for name, query in live.items() if query.output_tokens >= query.max_tokens]:
            del live[query_id]
            rows.remove(query_id)
        if dice.random() < 0.02:
            limits = dice.choice((LIMITS, PlannerLimits(), PlannerLimits(quantum_tokens=0)))
            rows.protect(limits)
        check(rows, live, limits)
        if live and dice.random() < 0.3:
            query_id = dice.choice(sorted(live))
            assert rows.view(query_id) == live[query_id]
    assert made


def test_a_view_is_made_when_somebody_looks(views: Views) -> None:
    """Tokens alone make no views; who it is stays known."""
    made = []
    query = views.running(since=50, max_tokens=100)
    later = replace(query, output_tokens=52, since_admission_tokens=51, kv_bytes=59)

    def view_of(query_id: str) -> QueryView:
        made.append(query_id)
        return later

    rows = Rows(view_of)
    rows.put(query)
    rows.advance(query.query_id, left_tokens=48, since_admission_tokens=51, kv_bytes=59)
    assert rows.known(query.query_id) is query
    assert rows.written_bytes == 59
    assert made == []
    assert [rows.view(query.query_id), rows.view(query.query_id)] == [later, later]
    assert made == [query.query_id]
