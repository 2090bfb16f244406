"""An engine process that speaks the wire and computes nothing: `python fake_engine.py MODE FD`.

Modes: `serve` answers every Submit with its tokens; `fail` cannot load; `hang` loads for ever; `garbage`
breaks the framing after Ready; `deaf` ignores Stop; `bars` says whether progress bars are off. A Cancel of
the id `die` kills the process without a word, as the kernel would; `assert` ends it as a step that fails
does; `mutter` complains before it ends; `freeze` stops it.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from batond.bench.fake_engine import fake_ready
from batond.daemon.wire.channel import ChannelClosed, EngineChannel
from batond.daemon.wire.messages import (
    Cancel,
    Command,
    EngineFailed,
    Finished,
    FinishReason,
    LoadFailed,
    Loading,
    StepEvents,
    Stop,
    Submit,
    Tokens,
    Usage,
)
from batond.daemon.wire.settings import EngineSettings


def answer(submit: Submit) -> StepEvents:
    """All tokens still missing, in one step: token i is i."""
    first = len(submit.emitted_token_ids)
    tokens = list(range(first, submit.sampling.max_tokens))
    usage = Usage(
        prompt_tokens=len(submit.prompt_token_ids),
        output_tokens=submit.sampling.max_tokens,
        parks=0,
        recomputed_tokens=0,
        waited_s=0.0,
        parked_s=0.0,
    )
    return StepEvents(
        step=1,
        events=[
            Tokens(query_id=submit.query_id, first_index=first, token_ids=tokens, text="x" * len(tokens)),
            Finished(query_id=submit.query_id, finish_reason=FinishReason.LENGTH, usage=usage),
        ],
    )


def obey(channel: EngineChannel, command: Command, mode: str) -> bool:
    """Returns whether to go on."""
    match command:
        case Submit():
            channel.send(answer(command))
        case Cancel(query_id="die"):
            os._exit(9)
        case Cancel(query_id="mutter"):
            lines = [
                "long ago",
                *(f"block {i} \x1b[31mfailed\x1b[0m\a: {'x' * 300}" for i in range(3)),
                "no end",
            ]
            sys.stderr.write("\n".join(lines))
            sys.stderr.flush()
            os._exit(7)
        case Cancel(query_id="assert"):
            channel.send(EngineFailed(reason="AcceleratorError", message="device-side assert", step=4))
            os._exit(3)
        case Cancel(query_id="freeze"):
            os.kill(os.getpid(), signal.SIGSTOP)
        case Stop():
            return mode == "deaf"
        case _:
            pass
    return True


def main(mode: str, fd: int) -> int:
    channel = EngineChannel(fd)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineSettings)
    channel.send(Loading(note=os.environ.get("TQDM_DISABLE", "unset") if mode == "bars" else "reading"))
    if mode == "fail":
        channel.send(LoadFailed(reason="UNSUPPORTED_MODEL", message="it has no cache"))
        return 2
    if mode == "hang":
        channel.poll(3600.0)
        return 1
    channel.send(fake_ready(model=settings.model_name, rows=settings.rows, policy=settings.policy))
    if mode == "garbage":
        os.write(fd, b"\x03\x00\x00\x00abc")
    try:
        while all(obey(channel, command, mode) for command in channel.poll(0.5)):
            channel.send(StepEvents(step=0, events=[]))
    except ChannelClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
