"""The engine process: loading, dying, coming back, being stopped. A fake speaks the wire."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batond.daemon.errors import UnavailableError, UnsupportedModelError
from batond.daemon.front import engine_link
from batond.daemon.front.engine_link import EngineLink
from batond.daemon.front.overheard import LINE_CHARS
from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire.messages import Cancel, Finished, StepEvents, Submit, Tokens
from batond.daemon.wire.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batond.daemon.wire.messages import Ready

FAKE = Path(__file__).with_name("fake_engine.py")
TIMEOUT_S = 60.0


class Ear:
    """Notes what the engine said, in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[StepEvents] = []
        self.whys: list[str] = []
        self._news = asyncio.Event()

    def engine_loading(self, note: str) -> None:
        self._hear(f"loading {note}")

    def engine_up(self, ready: Ready) -> None:
        self._hear(f"up {ready.model}")

    async def engine_step(self, step: StepEvents) -> None:
        self.steps.append(step)
        self._hear("step")

    def engine_begins(self, query_ids: list[str]) -> None:
        self._hear(f"begins {query_ids}")

    def engine_down(self, why: str) -> None:
        self.whys.append(why)
        self._hear("down")

    def _hear(self, note: str) -> None:
        self.notes.append(note)
        self._news.set()

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not true():
                self._news.clear()
                await self._news.wait()


def link_to(mode: str) -> EngineLink:
    settings = EngineSettings(model_path="/nowhere", model_name="fake")
    return EngineLink(settings, backoff_s=0.01, command=(sys.executable, str(FAKE), mode))


@pytest.fixture
async def ear() -> Ear:
    return Ear()


@pytest.fixture
async def link(ear: Ear) -> AsyncIterator[EngineLink]:
    link = link_to("serve")
    with pytest.raises(UnavailableError):
        link.send(Cancel(query_id="too early"))
    task = asyncio.create_task(link.run(ear))
    await ear.until(lambda: "up fake" in ear.notes)
    yield link
    await link.stop()
    async with asyncio.timeout(TIMEOUT_S):
        await task


def submit(query_id: str, emitted: list[int]) -> Submit:
    return Submit(
        query_id=query_id,
        tenant="t",
        sla_class="standard",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=5),
        seed=1,
        emitted_token_ids=emitted,
    )


async def test_progress_bars_stay_out_of_the_log(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is one JSON object a line, GGUF files or not."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    link = link_to("bars")
    task = asyncio.create_task(link.run(ear))
    await ear.until(lambda: "up fake" in ear.notes)
    assert ear.notes[0] == "loading 1"
    await link.stop()
    async with asyncio.timeout(TIMEOUT_S):
        await task


async def test_the_settings_go_in_and_events_come_out(link: EngineLink, ear: Ear) -> None:
    assert ear.notes[:2] == ["loading reading", "up fake"]
    assert link.ready is not None
    link.send(submit("q", [0, 1]))
    await ear.until(lambda: any(step.events for step in ear.steps))
    tokens, finished = next(step.events for step in ear.steps if step.events)
    assert isinstance(tokens, Tokens)
    assert (tokens.first_index, tokens.token_ids) == (2, [2, 3, 4])
    assert isinstance(finished, Finished)
    assert link.silent_s < TIMEOUT_S


async def test_a_dead_engine_comes_back(link: EngineLink, ear: Ear) -> None:
    """D3: the death is told before the new engine is up, and the new engine takes commands."""
    for deaths in (1, 2):
        link.send(Cancel(query_id="die"))
        await ear.until(lambda n=deaths: ear.notes.count("up fake") == n + 1)
    life = [note for note in ear.notes if note in {"down", "up fake"}]
    assert life == ["up fake", "down", "up fake", "down", "up fake"]
    link.send(submit("q", []))
    await ear.until(lambda: any(step.events for step in ear.steps))


async def test_the_last_words_of_an_engine_are_told(link: EngineLink, ear: Ear) -> None:
    """D8: they are the evidence: what failed, in which step, and how the process ended."""
    link.send(Cancel(query_id="assert"))
    await ear.until(lambda: ear.notes.count("up fake") == 2)
    link.send(Cancel(query_id="die"))
    await ear.until(lambda: ear.notes.count("up fake") == 3)
    first, second = ear.whys
    assert first == "step 4: AcceleratorError: device-side assert; exit status 3"
    assert second.startswith("the engine is gone")
    assert second.endswith("; exit status 9")


async def test_the_last_lines_of_an_engine_are_evidence_and_stay_in_the_log(
    link: EngineLink, ear: Ear, capfd: pytest.CaptureFixture[str]
) -> None:
    """D8: few, short and printable, on one line; the log has all of it, as it was written."""
    link.send(Cancel(query_id="mutter"))
    await ear.until(lambda: ear.notes.count("up fake") == 2)
    why = ear.whys[0]
    _, _, said = why.partition("; exit status 7; on standard error: ")
    assert why.isprintable()
    *blocks, last = said.split(" | ")
    assert [block[:16] for block in blocks] == [f"block {i}  failed " for i in range(3)]
    assert {len(block) for block in blocks} == {LINE_CHARS}
    assert last == "no end"
    logged = capfd.readouterr().err
    assert "long ago\nblock 0 \x1b[31mfailed\x1b[0m\a: " in logged
    assert "no end" in logged


async def test_a_frozen_engine_is_killed_and_replaced(link: EngineLink, ear: Ear) -> None:
    """V3, D12: also one that is stopped and can't hear any signal but the last."""
    link._frozen_after_s = 2.0
    link.send(Cancel(query_id="die"))  # The engine after it is watched by that.
    ups = ear.notes.count("up fake")
    await ear.until(lambda: ear.notes.count("up fake") > ups)
    link.send(Cancel(query_id="freeze"))
    await ear.until(lambda: ear.notes.count("up fake") > ups + 1)
    assert ear.whys[-1] == "it said nothing for 2 s and was killed; killed by SIGKILL"


async def test_commands_to_a_dead_engine_are_refused(link: EngineLink, ear: Ear) -> None:
    link.send(Cancel(query_id="die"))
    await ear.until(lambda: "down" in ear.notes)
    assert link.ready is None
    with pytest.raises(UnavailableError):
        link.send(submit("q", []))


async def test_a_model_that_cannot_be_served_stops_the_start(ear: Ear) -> None:
    with pytest.raises(UnsupportedModelError, match="no cache"):
        await asyncio.wait_for(link_to("fail").run(ear), TIMEOUT_S)
    assert "down" not in ear.notes


async def test_an_engine_that_cannot_start_stops_the_start(ear: Ear) -> None:
    link = EngineLink(
        EngineSettings(model_path="", model_name=""), command=(sys.executable, "-c", "raise SystemExit(3)")
    )
    with pytest.raises(UnavailableError, match="exit status 3"):
        await asyncio.wait_for(link.run(ear), TIMEOUT_S)


async def test_an_engine_that_speaks_nonsense_is_replaced(ear: Ear) -> None:
    link = link_to("garbage")
    task = asyncio.create_task(link.run(ear))
    await ear.until(lambda: ear.notes.count("up fake") >= 2)
    assert "down" in ear.notes
    await link.stop()
    await asyncio.wait_for(task, TIMEOUT_S)


async def test_an_engine_that_will_not_stop_is_killed(ear: Ear) -> None:
    link = link_to("deaf")
    task = asyncio.create_task(link.run(ear))
    await ear.until(lambda: "up fake" in ear.notes)
    await link.stop(timeout_s=0.2)
    await asyncio.wait_for(task, TIMEOUT_S)
    assert "down" not in ear.notes, "an end that was asked for is not a death"


async def test_an_engine_is_stopped_while_it_loads(ear: Ear) -> None:
    """V2: SIGTERM during a long load."""
    link = link_to("hang")
    task = asyncio.create_task(link.run(ear))
    await ear.until(lambda: "loading reading" in ear.notes)
    await link.stop()
    await asyncio.wait_for(task, TIMEOUT_S)
    assert ear.notes == ["loading reading"]


async def test_the_pause_before_an_engine_comes_back_is_not_silence(ear: Ear) -> None:
    """V3: who pauses for a minute is not frozen: liveness must not have the daemon restarted."""
    link = link_to("serve")
    link._first_backoff_s = 3600.0
    task = asyncio.create_task(link.run(ear))
    await ear.until(lambda: "up fake" in ear.notes)
    link.send(Cancel(query_id="die"))
    await ear.until(lambda: "down" in ear.notes)
    link._heard_s -= 1000.0
    assert link.silent_s == 0.0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await link.stop()


async def test_an_engine_that_waits_for_us_is_not_silent(
    link: EngineLink, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis away for long: the step waits for room, and the watchdog must not take that for a freeze."""
    entered, room = asyncio.Event(), asyncio.Event()

    async def wait_for_room(step: StepEvents) -> None:
        entered.set()
        await room.wait()
        ear.steps.append(step)
        ear._hear("step")

    monkeypatch.setattr(ear, "engine_step", wait_for_room)
    link.send(
        Submit(
            query_id="q",
            tenant="t",
            sla_class="batch",
            prompt_token_ids=[1],
            sampling=SamplingParams(),
            seed=0,
        )
    )
    async with asyncio.timeout(TIMEOUT_S):
        await entered.wait()
    link._heard_s -= 1000.0
    assert link.silent_s == 0.0
    seen = len(ear.steps)
    room.set()
    await ear.until(lambda: len(ear.steps) > seen)
    assert link.silent_s < TIMEOUT_S


async def test_a_step_that_cannot_be_taken_in_ends_the_engine_and_not_the_front(ear: Ear) -> None:
    """D3: it names a choice that there is not, say; a new engine begins from what is committed."""

    class Shocked(Ear):
        async def engine_step(self, step: StepEvents) -> None:
            await super().engine_step(step)
            if self.notes.count("step") == 1:
                raise IndexError("no such choice")

    ear, link = Shocked(), link_to("serve")
    task = asyncio.create_task(link.run(ear))
    await ear.until(lambda: ear.notes.count("up fake") == 2 and ear.notes.count("step") > 1)
    assert "down" in ear.notes
    await link.stop()
    async with asyncio.timeout(TIMEOUT_S):
        await task


async def test_an_engine_that_reads_nothing_is_replaced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: the front has given it up, and what is still to be written to it never will be."""
    monkeypatch.setattr(engine_link, "LAST_BREATH_S", 0.2)
    link = link_to("serve")

    class Shocked(Ear):
        async def engine_step(self, step: StepEvents) -> None:
            await super().engine_step(step)
            if self.notes.count("step") == 1:
                assert link.pid is not None
                os.kill(link.pid, signal.SIGSTOP)
                link.send(submit("q", list(range(1 << 20))))
                raise IndexError("no such choice")

    ear = Shocked()
    task = asyncio.create_task(link.run(ear))
    await ear.until(lambda: ear.notes.count("up fake") == 2)
    assert ear.whys[0].endswith("killed by SIGKILL")
    await link.stop()
    async with asyncio.timeout(TIMEOUT_S):
        await task
