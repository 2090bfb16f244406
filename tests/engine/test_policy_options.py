"""Options of policies in the engine process: at its start, and when the policy is exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest

from batond.daemon.engine.process import EngineProcess, build_engine
from batond.daemon.errors import ConfigError
from batond.daemon.wire.messages import CommandResult, SetPolicy
from batond.daemon.wire.settings import EngineSettings
from batond.policies.mlfq import Mlfq
from batond.policies.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine
    from batond.daemon.wire.channel import EngineChannel

    MakeEngine = Callable[..., LocalEngine]


def test_exchange_brings_the_options_configured_for_the_policy(llama: Any, make_engine: MakeEngine) -> None:
    """The message names a policy; its options are those of the configuration."""
    engine = make_engine(llama, rows=1)
    options: dict[str, dict[str, bool | int | float]] = {"mlfq": {"queues": 3, "ageing_s": 7.0}}
    process = EngineProcess(engine, cast("EngineChannel", Mock()), options)
    process._apply(SetPolicy(request_id=1, name="mlfq"))
    policy = engine.planner.policy
    assert isinstance(policy, Mlfq)
    assert (policy.ageing_s, len(policy._quanta)) == (7.0, 3)
    process._apply(SetPolicy(request_id=2, name="priority"))
    policy = engine.planner.policy
    assert isinstance(policy, Priority)
    assert policy.ageing_s == 60.0
    process._apply(SetPolicy(request_id=3, name="nobody"))
    results = [event for event in process._events if isinstance(event, CommandResult)]
    assert [result.reason for result in results] == ["", "", "BAD_CONFIG"]
    assert engine.planner.policy is policy


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_option_that_is_none_stops_the_start_before_the_model_is_loaded(policy: str) -> None:
    """Whether the policy is the one at the start or not."""
    settings = EngineSettings(
        model_path="nowhere", model_name="x", policy=policy, policy_options={"fair": {"output_weigth": 2.0}}
    )
    with pytest.raises(ConfigError, match="did you mean 'output_weight'"):
        build_engine(settings)
