"""A step that fails as a whole ends the engine process with its reason; the culprits were named before it."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from batond.daemon.engine import process
from batond.daemon.engine.step.faults import breaks_device
from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire.channel import EngineChannel, FrameBuffer, encode_frame
from batond.daemon.wire.messages import Begins, EngineFailed, Event, Ready, StepEvents, Submit, Tokens
from batond.daemon.wire.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeEngine = Callable[..., Any]

ASSERT = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("error", "breaks"),
    [
        (RuntimeError(ASSERT), True),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("shapes can't be multiplied"), False),
        (ValueError("CUDA error: not from torch"), False),
    ],
)
def test_which_errors_are_past_mending(error: Exception, breaks: bool) -> None:  # noqa: FBT001 - a parameter
    assert breaks_device(error) is breaks


@pytest.mark.parametrize(("after", "tokens"), [(0, 0), (1, 0), (3, 3)])
def test_a_device_assert_ends_the_process_with_its_reason(
    llama: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, after: int, tokens: int
) -> None:
    """D8: in the first prefill, where others' errors are one query's fault, and in a decode step."""
    engine = make_engine(llama, rows=2)
    exits: list[int] = []
    calls = 0
    forward = llama.forward

    def broken(*arguments: Any, **given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError(ASSERT)
        return forward(*arguments, **given)

    def leave(status: int) -> None:
        exits.append(status)
        raise SystemExit(status)

    monkeypatch.setattr(process, "build_engine", lambda _: engine)
    monkeypatch.setattr(process, "self_test", lambda _: None)
    monkeypatch.setattr(process.logging, "shutdown", lambda: None)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(llama, "forward", broken)
    ours, theirs = socket.socketpair()
    channel = EngineChannel(theirs)
    monkeypatch.setattr(process, "EngineChannel", lambda _: channel)
    submit = Submit(
        query_id="t/poison@1",
        tenant="t",
        sla_class="standard",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=8, ignore_eos=True),
        seed=1,
    )
    ours.sendall(encode_frame(msgspec.msgpack.Encoder(), submit))
    settings = msgspec.json.encode(EngineSettings(model_path="", model_name="m"))
    with pytest.raises(SystemExit):
        process.engine_main(-1, settings)
    channel.close()
    for query in list(engine.queries.values()):
        engine.forget(query)  # What broke is not looked at afterwards.
    ours.settimeout(10)
    decoder, frames = msgspec.msgpack.Decoder(Event), FrameBuffer()
    events = [decoder.decode(payload) for payload in frames.feed(ours.recv(1 << 20))]
    ours.close()
    assert exits == [process.FAILED_STATUS]
    assert isinstance(events[0], Ready)
    assert [event.query_ids for event in events if isinstance(event, Begins)] == [["t/poison@1"]]
    assert isinstance(events[1], Begins), "before the step that is the last"
    last = events[-1]
    assert isinstance(last, EngineFailed)
    assert (last.reason, last.message) == ("RuntimeError", ASSERT)
    assert last.step >= 1
    given = [one for event in events if isinstance(event, StepEvents) for one in event.events]
    assert sum(len(one.token_ids) for one in given if isinstance(one, Tokens)) == tokens
