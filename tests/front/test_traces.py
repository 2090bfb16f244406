"""What happens to held jobs, as spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog.testing

from batond.daemon.front.traces import MOST_EVENTS, JobTraces
from batond.daemon.queue import HandBackOutcome, JobState
from batond.daemon.telemetry.trace_context import TraceContext
from batond.daemon.wire.messages import (
    Finished,
    FinishReason,
    Preempted,
    QueryFailed,
    Resumed,
    Started,
    Submit,
    Tokens,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.front.held import HeldJob
    from batond.daemon.queue import ClaimedJob
    from batond.daemon.telemetry.tracing import SpanData

USAGE = Usage(prompt_tokens=2, output_tokens=4, parks=1, recomputed_tokens=0, waited_s=0.0, parked_s=0.0)
CONTEXT = TraceContext("a" * 32, "b" * 16, sampled=True, parent_span_id="c" * 16, state="v=1")


class Sink:
    """Keeps spans."""

    def __init__(self) -> None:
        self.spans: list[SpanData] = []
        self.broken = False

    def emit(self, data: SpanData) -> None:
        if self.broken:
            raise RuntimeError("broken")
        self.spans.append(data)

    async def close(self) -> None: ...


@pytest.fixture
def sink() -> Sink:
    """Gives where spans go."""
    return Sink()


@pytest.fixture
def job(hold: Callable[..., HeldJob]) -> Callable[..., ClaimedJob]:
    """Makes a traced job, accepted at 1000 ms and claimed at 4000 ms of Redis's clock."""

    def make(context: TraceContext | None = CONTEXT, *, n: int = 1, **record: Any) -> ClaimedJob:
        claimed = hold(n=n).claimed
        kept = context.kept() if context is not None else ""
        new = {"created_ms": 1000, "queued_ms": 1000, "trace": kept, "choices": n, **record}
        return msgspec.structs.replace(
            claimed, record=msgspec.structs.replace(claimed.record, **new), now_ms=4000
        )

    return make


def traced(sink: Sink) -> JobTraces:
    """Traces whose store is asked for nothing."""
    return JobTraces(sink, None, 1.0)  # type: ignore[arg-type]


def names(span: SpanData) -> list[str]:
    """Of its events."""
    return [name for name, _, _ in span.events]


async def test_a_job_has_one_span_from_submission_to_end(
    scene: Any, job: Callable[..., ClaimedJob], sink: Sink
) -> None:
    async with scene(job(), traces=traced(sink)) as here:
        q = (await here.engine.heard(Submit)).query_id
        await here.say(Started(query_id=q, row=1, reason="row_free"))
        await here.say(Tokens(query_id=q, first_index=0, token_ids=[1, 2], text="ab"))
        await here.say(
            Preempted(query_id=q, cause="row", kept=True, parked_bytes=9, for_query_id="other/secret@1")
        )
        await here.say(Resumed(query_id=q, row=0, reason="row_free"))
        await here.say(
            Tokens(query_id=q, first_index=2, token_ids=[3], text="c"),
            Finished(query_id=q, finish_reason=FinishReason.LENGTH, usage=USAGE),
        )
        await here.last()
        await here.dispatcher._committer.join()
    (span,) = sink.spans
    assert (span.name, span.context, span.error) == ("text_completion m", CONTEXT, "")
    assert span.start_ms == 1000
    assert 4000 <= span.end_ms < 4000 + 60_000
    assert names(span) == ["queued", "claimed", "started", "first_token", "parked", "resumed", "finished"]
    times = [at_ms for _, at_ms, _ in span.events]
    assert times == sorted(times)
    assert span.events[4][2] == {"batond.cause": "row", "batond.kept": True}
    assert "secret" not in repr(span)
    shown = dict(span.attributes)
    waits = [shown.pop(key) for key in ("batond.queue_time", "gen_ai.response.time_to_first_chunk")]
    assert all(isinstance(wait, float) and 3 <= wait < 60 for wait in waits)
    assert shown == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "batond",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 256,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": "j",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "batond.tenant": "t",
        "batond.job_id": "j",
        "batond.sla_class": "standard",
        "batond.outcome": "succeeded",
        "batond.claims": 1,
        "batond.parks": 1,
        "batond.recomputed_tokens": 0,
    }


async def test_an_engine_s_death_is_a_park_of_the_same_span(
    scene: Any, job: Callable[..., ClaimedJob], sink: Sink
) -> None:
    async def noted(*_: object, alone: bool) -> bool:
        return alone

    async with scene(job(), traces=traced(sink)) as here:
        here.queue.mark_alone = noted
        q = (await here.engine.heard(Submit)).query_id
        here.dispatcher.engine_begins([q])
        await here.say(Started(query_id=q, row=0))
        here.dispatcher.engine_down("gone")
        here.dispatcher.engine_up(here.engine.ready)
        q = (await here.engine.heard(Submit, 2)).query_id
        await here.say(Started(query_id=q, row=0))
        await here.say(QueryFailed(query_id=q, reason="NO_LUCK", message="my secret", usage=USAGE))
        await here.last()
        await here.dispatcher._committer.join()
    (span,) = sink.spans
    assert names(span) == ["queued", "claimed", "started", "parked", "resumed", "finished"]
    assert span.events[3][2] == {"batond.cause": "engine_restart", "batond.kept": False}
    assert (span.error, span.attributes["error.type"]) == ("NO_LUCK", "NO_LUCK")
    assert span.attributes["batond.outcome"] == "failed"
    assert "secret" not in repr(span)


async def test_another_daemon_goes_on_with_what_stands_in_redis(
    scene: Any, job: Callable[..., ClaimedJob], sink: Sink
) -> None:
    record = {"epoch": 3, "queued_ms": 3000, "started_ms": 1500, "first_token_ms": 1750, "preemptions": 2}
    async with scene(job(**record), traces=traced(sink)) as here:
        q = (await here.engine.heard(Submit)).query_id
        await here.say(Started(query_id=q, row=0), Tokens(query_id=q, first_index=0, token_ids=[1], text="a"))
        await here.say(Finished(query_id=q, finish_reason=FinishReason.STOP, usage=USAGE))
        await here.last()
        await here.dispatcher._committer.join()
    (span,) = sink.spans
    assert (span.context, span.start_ms) == (CONTEXT, 1000)
    assert names(span) == ["queued", "started", "first_token", "queued", "claimed", "resumed", "finished"]
    assert span.attributes["batond.queue_time"] == 0.5
    assert span.attributes["gen_ai.response.time_to_first_chunk"] == 0.75
    assert (span.attributes["batond.claims"], span.attributes["batond.parks"]) == (3, 2)


async def test_a_claim_that_ends_before_its_job_has_a_span_below(
    scene: Any, job: Callable[..., ClaimedJob], sink: Sink
) -> None:
    async with scene(job(), traces=traced(sink)) as here:
        q = (await here.engine.heard(Submit)).query_id
        await here.say(Started(query_id=q, row=0))
        with structlog.testing.capture_logs() as lines:
            here.dispatcher.lost("t", "j", 1)
    (span,) = sink.spans
    assert (span.name, names(span)) == ("claim", ["started"])
    assert (span.context.trace_id, span.context.parent_span_id) == ("a" * 32, "b" * 16)
    assert (span.start_ms, span.attributes["batond.claim.end"]) == (4000, "lost")
    assert {"event": "lease_lost", "trace_id": "a" * 32}.items() <= lines[0].items()


@pytest.mark.parametrize(
    ("outcome", "state"),
    [(HandBackOutcome.DEAD, JobState.DEAD), (HandBackOutcome.CANCELLED, JobState.CANCELLED)],
)
def test_a_claim_given_up_may_be_the_end(
    hold: Callable[..., HeldJob],
    job: Callable[..., ClaimedJob],
    sink: Sink,
    outcome: HandBackOutcome,
    state: JobState,
) -> None:
    traces, held = traced(sink), hold()
    held.claimed = job()
    traces.take(held)
    traces.handed_back(held, outcome, charged=outcome is HandBackOutcome.DEAD)
    traces.left(held)
    (span,) = sink.spans
    assert (span.context, span.attributes["batond.outcome"]) == (CONTEXT, state.value)
    assert span.error == ("ATTEMPTS" if state is JobState.DEAD else "")


@pytest.mark.parametrize("context", [None, "garbage", TraceContext("a" * 32, "b" * 16, sampled=False)])
async def test_what_is_not_sampled_has_no_span(
    scene: Any, job: Callable[..., ClaimedJob], sink: Sink, context: Any
) -> None:
    claimed = job(None, trace=context) if context == "garbage" else job(context)
    async with scene(claimed, traces=traced(sink)) as here:
        q = (await here.engine.heard(Submit)).query_id
        await here.say(Started(query_id=q, row=0))
        await here.say(Finished(query_id=q, finish_reason=FinishReason.LENGTH, usage=USAGE))
        assert (await here.last()).state is JobState.SUCCEEDED
        await here.dispatcher._committer.join()
    assert sink.spans == []


async def test_choices_are_told_apart_and_events_are_bounded(
    scene: Any, job: Callable[..., ClaimedJob], sink: Sink
) -> None:
    async with scene(job(n=2), traces=traced(sink)) as here:
        await here.engine.heard(Submit, 2)
        first, second = (one.query_id for one in here.engine.told if isinstance(one, Submit))
        await here.say(Started(query_id=second, row=0))
        for _ in range(MOST_EVENTS):
            await here.say(
                Preempted(query_id=second, cause="row", kept=True, parked_bytes=1),
                Resumed(query_id=second, row=0),
            )
        ends = [Finished(query_id=q, finish_reason=FinishReason.LENGTH, usage=USAGE) for q in (first, second)]
        await here.say(*ends)
        await here.last()
        await here.dispatcher._committer.join()
    (span,) = sink.spans
    assert span.events[2][:1] + span.events[2][2:] == ("started", {"batond.row": 0, "batond.choice": 1})
    assert names(span)[-1] == "finished"
    assert len(span.events) == MOST_EVENTS + 3
    assert span.attributes["batond.events_left_out"] == MOST_EVENTS + 3
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]


async def test_a_broken_trace_breaks_no_job(scene: Any, job: Callable[..., ClaimedJob], sink: Sink) -> None:
    sink.broken = True
    async with scene(job(), traces=traced(sink)) as here:
        q = (await here.engine.heard(Submit)).query_id
        await here.say(Finished(query_id=q, finish_reason=FinishReason.LENGTH, usage=USAGE))
        with structlog.testing.capture_logs() as lines:
            assert (await here.last()).state is JobState.SUCCEEDED
            await here.dispatcher._committer.join()
        assert here.dispatcher.running_jobs == 0
    assert [line["event"] for line in lines] == ["trace_broke"]
