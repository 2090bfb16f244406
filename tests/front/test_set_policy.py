"""The policy set by hand: the engine answers, and one that is started anew is told again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from batond.daemon.errors import StateError
from batond.daemon.front.dispatcher import Dispatcher
from batond.daemon.front.hub import Hub
from batond.daemon.telemetry.metrics import Metrics
from batond.daemon.wire.messages import CommandResult, SetPolicy, StepEvents
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from batond.daemon.wire.messages import Ready


class Engine:
    """Keeps what it is told and says when it was told something."""

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.told: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, command: Any) -> None:
        self.told.put_nowait(command)


@pytest.fixture
def engine(ready: Ready) -> Engine:
    """An engine under the policy of the configuration."""
    return Engine(ready)


@pytest.fixture
def dispatcher(engine: Engine) -> Dispatcher:
    """A dispatcher whose tasks don't run: setting a policy needs none of them."""
    parts: dict[str, Any] = {"store": None, "keeper": None, "link": engine}
    return Dispatcher(
        **parts,
        hub=Hub(),
        classes=SlaClasses(),
        metrics=Metrics(),
        owner="d1",
        lease_s=10,
        claim_ahead=2,
    )


async def answer(dispatcher: Dispatcher, engine: Engine, reason: str = "") -> str:
    command = await asyncio.wait_for(engine.told.get(), 10)
    assert isinstance(command, SetPolicy)
    result = CommandResult(request_id=command.request_id, reason=reason, message="as it said")
    await dispatcher.engine_step(StepEvents(step=1, events=[result]))
    return command.name


async def test_a_new_engine_is_told_again(dispatcher: Dispatcher, engine: Engine) -> None:
    setting = asyncio.create_task(dispatcher.set_policy("fair"))
    assert await answer(dispatcher, engine) == "fair"
    await setting
    assert dispatcher.policy == "fair"
    dispatcher.engine_up(engine.ready)
    assert await answer(dispatcher, engine) == "fair"


async def test_an_engine_that_has_it_is_not_told(dispatcher: Dispatcher, engine: Engine) -> None:
    dispatcher.engine_up(engine.ready)
    setting = asyncio.create_task(dispatcher.set_policy("fair"))
    await answer(dispatcher, engine)
    await setting
    dispatcher.engine_up(msgspec.structs.replace(engine.ready, policy="fair"))
    assert engine.told.empty()


async def test_a_refused_policy_is_not_kept(dispatcher: Dispatcher, engine: Engine) -> None:
    setting = asyncio.create_task(dispatcher.set_policy("broken"))
    await answer(dispatcher, engine, reason="BAD_CONFIG")
    with pytest.raises(StateError, match="as it said") as caught:
        await setting
    assert caught.value.reason == "BAD_CONFIG"
    assert dispatcher.policy == ""
    dispatcher.engine_up(engine.ready)
    assert engine.told.empty()
