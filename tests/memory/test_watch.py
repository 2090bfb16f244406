"""Readings on a thread: nobody waits for it, and what is not renewed in time is lost."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.memory.governor import OwnUse
from batond.daemon.memory.readings import MemoryReading, ReadingLost
from batond.daemon.memory.watch import FIRST_TRIES, PAIR_TRIES, MemoryWatch, Sample, read_within

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30
WAIT_S = 30.0  # Of events that come at once unless something is broken.


def own_use() -> OwnUse:
    return OwnUse(committed_bytes=GIB)


def test_a_sample_is_fresh_for_a_while_and_then_lost(
    source: Any, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """M9: loss and return are logged once each and counted."""
    watch = MemoryWatch(source, own_use, clock=clock)
    assert watch.latest() is None
    assert watch.losses == 0, "it has only begun"
    assert watch.sample()
    sample = watch.latest()
    assert sample == Sample(MemoryReading(100 * GIB, 100 * GIB, 100.0), own_use())
    source.broken = "Unknown Error"
    clock.now_s += 0.9
    assert not watch.sample()
    assert watch.latest() is sample, "one failure changes nothing"
    assert watch.trouble == ""
    clock.now_s += 0.2
    with caplog.at_level(logging.WARNING):
        assert [watch.latest() for _ in range(3)] == [None] * 3
        assert "no reading of a scripted memory for 1.1 s: Unknown Error" in watch.trouble
        source.broken = ""
        assert watch.sample()
        assert watch.latest() is not None
        assert watch.latest() is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "Unknown Error" in caplog.text
    assert "are back" in caplog.text
    assert (watch.losses, watch.trouble) == (1, "")


def test_readings_that_never_come_are_lost_too(source: Any, clock: Any) -> None:
    watch = MemoryWatch(source, own_use, clock=clock, stale_s=1.0)
    source.broken = "no driver"
    watch.sample()
    clock.now_s += 1.1
    assert watch.latest() is None
    assert watch.losses == 1
    assert "no driver" in watch.trouble


def test_a_call_that_hangs_hangs_nobody(clock: Any) -> None:
    """M9: its time-out is that the reading gets old; an answer that took so long is old as well."""
    asked, answer, sampled = threading.Event(), threading.Event(), threading.Semaphore(0)

    class Hanging:
        name = "a hanging memory"
        hangs = False
        closed = False

        def read(self) -> MemoryReading:
            at_s = clock()
            if self.hangs:
                asked.set()
                assert answer.wait(WAIT_S)
            return MemoryReading(100, 50, at_s)

        def close(self) -> None:
            self.closed = True

    source = Hanging()
    watch = MemoryWatch(
        source, own_use, clock=clock, interval_s=0.001, stale_s=0.25, on_sample=lambda _: sampled.release()
    )
    watch.start()
    assert sampled.acquire(timeout=WAIT_S)
    assert watch.latest() is not None
    source.hangs = True
    assert asked.wait(WAIT_S)
    clock.now_s += 5.0
    assert watch.latest() is None
    assert "the call has not come back" in watch.trouble
    source.hangs = False
    answer.set()
    for _ in range(50):  # The late answer, then those that follow it.
        assert sampled.acquire(timeout=WAIT_S)
        if watch.latest() is not None:
            break
    assert watch.latest() is not None
    assert watch.losses == 1
    watch.close()
    assert source.closed


def test_closing_leaves_a_thread_that_hangs_alone(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """M9: the engine ends although the driver does not answer."""
    asked, answer = threading.Event(), threading.Event()

    class Stuck:
        name = "a stuck memory"
        closed = False

        def read(self) -> MemoryReading:
            asked.set()
            answer.wait(WAIT_S)
            return MemoryReading(100, 50, 0.0)

        def close(self) -> None:
            assert threading.current_thread().name == "memory-watch"
            self.closed = True

    monkeypatch.setattr("batond.daemon.memory.watch.CLOSE_TIMEOUT_S", 0.01)
    source = Stuck()
    watch = MemoryWatch(source, own_use, clock=clock)
    watch.start()
    assert asked.wait(WAIT_S)
    watch.close()
    assert not source.closed, "the call is still in it"
    assert watch._thread is not None
    assert watch._thread.daemon
    answer.set()
    watch._thread.join(WAIT_S)
    assert source.closed, "by the thread that was in it"


@pytest.mark.parametrize("failing", ["source", "own", "listener"])
def test_a_surprise_does_not_end_the_thread(clock: Any, source: Any, failing: str) -> None:
    """M9: whatever is raised is a failed try, and the next one follows."""
    broken, tried, fine = threading.Event(), threading.Semaphore(0), threading.Event()
    broken.set()

    def surprise(name: str) -> Callable[..., None]:
        def call(*_: Any) -> None:
            if name == failing and broken.is_set():
                tried.release()
                raise RuntimeError("out of the blue")
            if name == "listener":
                fine.set()

        return call

    in_source, in_own = surprise("source"), surprise("own")

    class Source:
        name = "a surprising memory"

        def read(self) -> MemoryReading:
            in_source()
            return MemoryReading(100, 50, clock())

        def close(self) -> None: ...

    def own() -> OwnUse:
        in_own()
        return own_use()

    watch = MemoryWatch(Source(), own, clock=clock, interval_s=0.001, on_sample=surprise("listener"))
    watch.start()
    assert tried.acquire(timeout=WAIT_S)
    assert tried.acquire(timeout=WAIT_S)
    assert watch.last_failure == "RuntimeError: out of the blue"
    broken.clear()
    assert fine.wait(WAIT_S)
    watch.close()
    assert watch.latest() is not None


def test_reading_and_own_use_belong_together(source: Any, clock: Any) -> None:
    """Own use that changed while the source was asked is measured again, with another reading."""
    uses = [OwnUse(committed_bytes=n * GIB) for n in (10, 5, 5)]
    source.used_bytes = 10 * GIB
    reads = 0
    read = source.read

    def counted() -> MemoryReading:
        nonlocal reads
        reads += 1
        source.used_bytes = 5 * GIB if reads > 1 else 10 * GIB
        return read()

    source.read = counted
    watch = MemoryWatch(source, lambda: uses.pop(0), clock=clock)
    assert watch.sample()
    sample = watch.latest()
    assert sample is not None
    assert (sample.own.committed_bytes, sample.reading.free_bytes) == (5 * GIB, 95 * GIB)
    assert reads == 2


def test_own_use_that_never_rests_is_taken_as_it_is(source: Any, clock: Any) -> None:
    asked = 0

    def restless() -> OwnUse:
        nonlocal asked
        asked += 1
        return OwnUse(committed_bytes=asked * GIB)

    watch = MemoryWatch(source, restless, clock=clock)
    assert watch.sample()
    assert asked == PAIR_TRIES + 1


def test_it_starts_once(source: Any, clock: Any) -> None:
    watch = MemoryWatch(source, own_use, clock=clock)
    watch.start()
    with pytest.raises(RuntimeError, match="started before"):
        watch.start()
    watch.close()
    assert source.closed


def test_the_first_reading_is_waited_for(source: Any) -> None:
    watch = MemoryWatch(source, own_use, interval_s=0.001)
    watch.start()
    assert watch.wait_first(WAIT_S)
    watch.close()


def test_a_source_that_refuses_is_not_waited_for_long(source: Any) -> None:
    """M9: a failure may be of this moment; several in a row are an answer."""
    source.broken = "no driver"
    watch = MemoryWatch(source, own_use, interval_s=0.001)
    watch.start()
    assert not watch.wait_first(WAIT_S)
    assert watch.last_failure == "no driver"
    assert watch._tries >= FIRST_TRIES
    watch.close()


def test_a_first_call_that_hangs_does_not_hang_the_start(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """M9: neither in the watch nor in a single reading."""
    answer = threading.Event()

    class Stuck:
        name = "a stuck memory"

        def read(self) -> MemoryReading:
            answer.wait(WAIT_S)
            return MemoryReading(100, 50, 0.0)

        def close(self) -> None: ...

    monkeypatch.setattr("batond.daemon.memory.watch.CLOSE_TIMEOUT_S", 0.01)
    watch = MemoryWatch(Stuck(), own_use, clock=clock)
    watch.start()
    assert not watch.wait_first(0.01)
    assert watch.last_failure == "no answer within 0.01 s"
    watch.close()
    with pytest.raises(ReadingLost, match="a stuck memory: no answer within"):
        read_within(Stuck(), 0.01)
    answer.set()


def test_one_reading_within_a_time(source: Any) -> None:
    assert read_within(source).total_bytes == 100 * GIB
    source.broken = "Unknown Error"
    with pytest.raises(ReadingLost, match="a scripted memory: Unknown Error"):
        read_within(source)
