"""The planner's view of running queries: made when somebody looks, and then as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.engine import SamplingParams
from batond.daemon.engine.queries import roster
from batond.daemon.engine.queries.view import query_view
from batond.daemon.scheduler.planner import PlannerLimits
from batond.policies.fair import Fair
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.policies.base import QueryView

    MakeEngine = Callable[..., LocalEngine]

LONG = SamplingParams(max_tokens=24, ignore_eos=True)


class Watching(Priority):
    """Looks at how far queries are when tokens come; inherits a hint that it does not."""

    name = "watching"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []
        self.ended: dict[str, tuple[int, int, int]] = {}

    def on_tokens(self, query: QueryView, prompt_tokens: int, output_tokens: int) -> None:
        if output_tokens:
            self.seen.append((query.query_id, query.output_tokens, query.since_admission_tokens))

    def on_end(self, query: QueryView) -> None:
        self.ended[query.query_id] = (
            query.output_tokens,
            query.since_admission_tokens,
            query.prefilled_tokens,
        )


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_steps_that_only_decode_make_no_views(
    llama: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Rows full, one waits in vain: no view is made, and each that is asked for is the query as it is."""
    engine = make_engine(llama, rows=2, policy=policy)
    running = [engine.submit([5, 6, 7 + n], LONG, sla_class="batch") for n in range(2)]
    engine.submit([5, 6], LONG, sla_class="batch")
    for _ in range(5):
        engine.step()
    made: list[str] = []

    def counting(query: Any, *args: Any, **options: Any) -> QueryView:
        made.append(query.query_id)
        return query_view(query, *args, **options)

    monkeypatch.setattr(roster, "query_view", counting)
    for _ in range(6):
        engine.step()
        engine._roster.refresh()
        assert made == []
    for query in running:
        view = engine._roster.line.view(query.query_id)
        assert view == query_view(query, engine.residency.batch.layout)
        assert view.output_tokens == len(query.output_token_ids) > 8
    assert made == [query.query_id for query in running]
    engine.check_integrity()
    engine.run_until_idle()


def test_lost_token_is_found(llama: Any, make_engine: MakeEngine) -> None:
    """The check of the books counts what rows have written too."""
    engine = make_engine(llama, rows=1)
    query = engine.submit([5, 6, 7], LONG)
    for _ in range(4):
        engine.step()
    engine._roster.refresh()
    engine.check_integrity()
    query.output_token_ids.append(5)
    with pytest.raises(AssertionError, match="told of all tokens"):
        engine.check_integrity()
    query.output_token_ids.pop()
    engine.run_until_idle()


def test_policy_that_looks_gets_every_query_as_it_is(llama: Any, make_engine: MakeEngine) -> None:
    """`on_tokens` sees each token as it comes, parks between or not; the end has them all."""
    policy = Watching()
    engine = make_engine(llama, rows=1, policy=policy, limits=PlannerLimits(quantum_tokens=1))
    low = engine.submit([5, 6, 7], LONG, sla_class="batch")
    for _ in range(5):
        engine.step()
    urgent = engine.submit([8, 9], LONG, sla_class="interactive")
    engine.run_until_idle()
    assert low.parks == 1
    for query in (low, urgent):
        assert [seen[1] for seen in policy.seen if seen[0] == query.query_id] == list(range(1, 24))
    since = [seen[2] for seen in policy.seen if seen[0] == urgent.query_id]
    assert since == list(range(23))
    assert policy.ended == {
        low.query_id: (24, since_of(policy, low.query_id), 26),
        urgent.query_id: (24, 23, 25),
    }


def since_of(policy: Watching, query_id: str) -> int:
    """Tokens since its last row, counting the last one."""
    return [seen[2] for seen in policy.seen if seen[0] == query_id][-1] + 1


def test_fair_charges_tokens_of_queries_it_has_not_looked_at(llama: Any, make_engine: MakeEngine) -> None:
    """S8: older views will do for accounts, down to the last token."""
    policy = Fair()
    engine = make_engine(llama, rows=2, policy=policy)
    for tenant, prompt in (("a", [5, 6, 7]), ("b", [5, 6])):
        engine.submit(prompt, LONG, tenant=tenant)
    engine.run_until_idle()
    # The first token of an output comes with the prompt's last chunk, and is not charged beside it.
    assert [policy.counter(tenant, 1) for tenant in "ab"] == [3 + 23, 2 + 23]
