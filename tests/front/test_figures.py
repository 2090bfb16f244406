"""What happens to held jobs, as metrics by class and tenant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog.testing

from batond.daemon.front import figures as figures_module
from batond.daemon.front import held as held_module
from batond.daemon.front.figures import Figures
from batond.daemon.front.recent import Times
from batond.daemon.queue import Counts
from batond.daemon.telemetry.metrics import Metrics
from batond.daemon.wire.messages import (
    Finished,
    FinishReason,
    Preempted,
    Resumed,
    Started,
    Tokens,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.front.held import HeldJob

CLASSES = ("interactive", "standard", "batch")
USAGE = Usage(prompt_tokens=2, output_tokens=4, parks=1, recomputed_tokens=0, waited_s=0.0, parked_s=0.0)


class Scene:
    """A job of tenant `t`, accepted three seconds ago and claimed now, and a clock that the test sets."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, hold: Callable[..., HeldJob], **sampling: Any
    ) -> None:
        self.now_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(figures_module, "time", clock)
        monkeypatch.setattr(held_module, "time", clock)
        self.metrics = Metrics(["t"])
        self.figures = Figures(self.metrics, CLASSES)
        self.held = hold(**sampling)
        record = msgspec.structs.replace(self.held.claimed.record, created_ms=1000, waited_ms=3000)
        self.held.claimed = msgspec.structs.replace(self.held.claimed, record=record, now_ms=4000)
        self.held.__post_init__()

    def at(self, now_s: float, *events: Any) -> None:
        self.now_s = now_s
        step = self.held.digest(events, self.figures.heard)
        self.figures.ended(step)

    def started(self, choice: int = 0) -> Started:
        return Started(query_id=self.held.query_id(choice), row=choice)

    def tokens(self, *ids: int, choice: int = 0) -> Tokens:
        return Tokens(query_id=self.held.query_id(choice), first_index=0, token_ids=list(ids), text="")

    def parked(self, cause: str = "row", *, kept: bool = True) -> Preempted:
        return Preempted(query_id=self.held.query_id(), cause=cause, kept=kept, parked_bytes=1)

    def resumed(self) -> Resumed:
        return Resumed(query_id=self.held.query_id(), row=1)

    def finished(self, choice: int = 0) -> Finished:
        return Finished(query_id=self.held.query_id(choice), finish_reason=FinishReason.LENGTH, usage=USAGE)

    def value(self, name: str, **labels: str) -> float | None:
        given = {"tenant": "t", "sla_class": "standard"} | labels
        return self.metrics.registry.get_sample_value(name, given)

    def histogram(self, name: str) -> tuple[float, float] | None:
        """Count and sum; None if nothing was observed."""
        count, total = self.value(f"{name}_count"), self.value(f"{name}_sum")
        return None if count is None or total is None else (count, total)

    def age_s(self, sla_class: str = "standard", **oldest_wait_ms: int) -> float | None:
        counts = Counts(queued={}, oldest_wait_ms=oldest_wait_ms, held=1, dead=0, totals={})
        self.figures.counted([self.held], counts)
        found: float | None = self.metrics.registry.get_sample_value(
            "batond_starvation_age_seconds", {"sla_class": sla_class}
        )
        return found


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, hold: Callable[..., HeldJob]) -> Scene:
    return Scene(monkeypatch, hold)


def test_a_life_with_a_park(scene: Scene) -> None:
    scene.at(1.0, scene.tokens(5))  # The first token comes with the prompt, before there is a row.
    scene.at(2.0, scene.started())
    scene.at(3.0, scene.tokens(6), scene.parked())
    scene.at(8.0, scene.resumed())
    scene.at(9.0, scene.tokens(7))
    scene.at(10.0, scene.tokens(8), scene.finished())
    assert scene.histogram("batond_queue_time_seconds") == (1, 5.0)
    assert scene.histogram("batond_time_to_first_token_seconds") == (1, 4.0)
    assert scene.histogram("batond_time_per_output_token_seconds") == (1, 3.0)
    assert scene.histogram("batond_park_seconds") == (1, 5.0)
    recent = scene.figures.recent
    assert recent.first_tokens("standard", 10.0) == Times(1, 4.0, 4.0)
    assert recent.output_tokens("standard", 10.0) == Times(1, 3.0, 3.0)
    assert scene.value("batond_preemptions_total", cause="row", mode="kept") == 1
    assert scene.value("batond_jobs_ended_total", outcome="succeeded") == 1


def test_who_ends_while_parked_was_parked_until_then(scene: Scene) -> None:
    scene.at(0.0, scene.started())
    scene.at(1.0, scene.parked(kept=False))
    scene.at(3.5, scene.finished())
    assert scene.histogram("batond_park_seconds") == (1, 2.5)
    assert scene.value("batond_preemptions_total", cause="row", mode="dropped") == 1
    assert scene.histogram("batond_time_per_output_token_seconds") is None, "it has no second token"


def test_a_job_of_several_choices_starts_once(
    monkeypatch: pytest.MonkeyPatch, hold: Callable[..., HeldJob]
) -> None:
    scene = Scene(monkeypatch, hold, n=2)
    scene.at(1.0, scene.started(0), scene.started(1), scene.tokens(5), scene.tokens(5, choice=1))
    assert scene.histogram("batond_queue_time_seconds") == (1, 4.0)
    assert scene.histogram("batond_time_to_first_token_seconds") == (1, 4.0)


def test_what_goes_on_elsewhere_has_had_its_first_token(
    monkeypatch: pytest.MonkeyPatch, hold: Callable[..., HeldJob]
) -> None:
    scene = Scene(monkeypatch, hold, token_ids=(1, 2))
    scene.at(1.0, scene.tokens(5))
    assert scene.histogram("batond_time_to_first_token_seconds") is None


def test_the_starvation_age_is_that_of_whoever_has_been_without_a_row_for_longest(scene: Scene) -> None:
    """S8."""
    assert scene.age_s() == 3.0, "it has waited in the queue"
    scene.now_s = 4.0
    assert scene.age_s() == 7.0, "and waits in the engine"
    assert scene.age_s(standard=60_000) == 60.0
    scene.at(5.0, scene.started())
    assert scene.age_s() == 0.0
    scene.at(6.0, scene.parked())
    scene.now_s = 16.0
    assert scene.age_s() == 10.0
    assert scene.age_s("batch") == 0.0
    assert scene.age_s("interactive", interactive=2000, gone=10**9) == 2.0
    scene.at(17.0, scene.resumed())
    assert scene.age_s() == 0.0
    scene.at(18.0, scene.parked("manual"))
    scene.now_s = 99.0
    assert scene.age_s() == 0.0, "the operator wants it so"


def test_jobs_of_a_class_that_is_served_no_more_are_seen_to_starve(scene: Scene) -> None:
    """S8: taken out of the configuration while jobs waited; said once, and shown until they are gone."""
    waiting = Counts(queued={"gone": 2}, oldest_wait_ms={"gone": 90_000}, held=0, dead=0, totals={})
    with structlog.testing.capture_logs() as lines:
        scene.figures.counted([], waiting)
        scene.figures.counted([], waiting)
    assert (
        scene.metrics.registry.get_sample_value("batond_starvation_age_seconds", {"sla_class": "gone"})
        == 90.0
    )
    assert [(line["event"], line["sla_class"], line["waiting"]) for line in lines] == [
        ("class_not_served", "gone", 2)
    ]
    assert scene.age_s("gone") == 0.0


def test_after_the_death_of_an_engine_everybody_waits_for_a_row(scene: Scene) -> None:
    scene.at(1.0, scene.started())
    scene.now_s = 2.0
    scene.figures.engine_died(scene.held)
    scene.now_s = 5.0
    assert scene.age_s() == 3.0
    scene.at(6.0, scene.started())
    assert scene.age_s() == 0.0
    assert scene.histogram("batond_park_seconds") is None, "that was no park"
    assert scene.histogram("batond_queue_time_seconds") == (1, 4.0)


def test_strangers_are_other(scene: Scene) -> None:
    scene.figures.rested("t", "max_running")
    scene.figures.rested("stranger", "max_running")
    scene.figures.rested("stranger", "tokens_per_minute")
    read = scene.metrics.registry.get_sample_value
    name = "batond_quota_refusals_total"
    assert read(name, {"tenant": "t", "quota": "max_running"}) == 1
    assert read(name, {"tenant": "other", "quota": "max_running"}) == 1
    assert read(name, {"tenant": "other", "quota": "tokens_per_minute"}) == 1


def test_dead_jobs_are_counted(scene: Scene) -> None:
    """D8: whoever is not looked for is not found; a gauge can be alarmed on."""
    for dead in (3, 0):
        scene.figures.counted([], Counts(queued={}, oldest_wait_ms={}, held=0, dead=dead, totals={}))
        assert scene.metrics.registry.get_sample_value("batond_dead_jobs") == dead
