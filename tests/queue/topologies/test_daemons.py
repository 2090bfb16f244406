"""Real daemons behind Sentinels and on a Cluster: their clients see nothing of a failover but a pause."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE, fake_tokens
from batond.bench.faults.counts import full_or
from batond.bench.local_daemon import LocalDaemon
from batond.bench.local_redis import Cluster, Sentinels
from batond.clients import Chunk, Finished, JobState
from batond.daemon.queue.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.clients import JobStream

TOKENS = 300
STEP_S = 0.02
MODEL = "fake"


@pytest.fixture
def start(mended: Sentinels | Cluster) -> Iterator[Callable[..., LocalDaemon]]:
    """Starts daemons on the servers; all end with the test."""
    started: list[LocalDaemon] = []
    with tempfile.TemporaryDirectory(prefix="bt-") as name:

        def one(**queue: Any) -> LocalDaemon:
            folder = Path(name) / str(len(started))
            folder.mkdir()
            daemon = LocalDaemon(
                folder,
                ["red"],
                model={"path": str(folder), "name": MODEL},
                engine={"rows": 3},
                sections={"queue": {**place_keys(mended), **queue}, "service": {"drain_timeout_s": 0.2}},
                environment={STEP_VARIABLE: str(STEP_S)},
                tokens={"red": "red-token-of-the-test"},
                program=PROGRAM,
            )
            started.append(daemon)
            daemon.wait_ready()
            return daemon

        yield one
        for daemon in started:
            daemon.stop()


def place_keys(place: Sentinels | Cluster) -> dict[str, Any]:
    """Keys of `[queue]` for the servers."""
    if isinstance(place, Sentinels):
        return {"mode": "sentinel", "nodes": place.nodes, "sentinel_service": place.service}
    return {"mode": "cluster", "nodes": place.nodes[:2]}


def fail_over(place: Sentinels | Cluster) -> None:
    """Kills the primary of the daemons' queue, and brings it back as a replica: some wait for one.

    Its replicas have all jobs by then: without `wait_replicas` one that was accepted could be lost.
    """
    key = Keys(MODEL).base
    primary = place.primary_of(key) if isinstance(place, Cluster) else place.primary
    with primary.client() as client:
        client.ping()  # WAIT speaks of what was written until the last command of its connection.
        assert client.wait(len(place.replicas_of(primary)), 20_000) == len(place.replicas_of(primary))
    if isinstance(place, Cluster):
        place.fail_over(key)
    else:
        place.fail_over()
    place.mend()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "wait_replicas"),
    [("sentinel", 0), ("cluster", 1), *full_or((), (("sentinel", 1), ("cluster", 0)))],
    indirect=["place"],
)
async def test_streams_go_on_over_a_failover(
    mended: Sentinels | Cluster, start: Callable[..., LocalDaemon], wait_replicas: int
) -> None:
    """D5, from outside: every token once and in order, on the daemon that runs a job and on the other one."""
    first, second = start(wait_replicas=wait_replicas), start(wait_replicas=wait_replicas)
    with first.client("red") as client, second.client("red") as other:
        streams = [
            client.generate(token_ids=[number], max_tokens=TOKENS, seed=number) for number in range(1, 7)
        ]
        begun = [read(stream, 5) for stream in streams]
        watched = [other.watch(stream.job_id) for stream in streams[:2]]
        killing = asyncio.create_task(asyncio.to_thread(fail_over, mended))
        outputs = await asyncio.gather(*(asyncio.to_thread(read, one) for one in (*streams, *watched)))
        await killing
        for number, before, tokens in zip([1, 2, 3, 4, 5, 6, 1, 2], [*begun, [], []], outputs, strict=True):
            assert before + tokens == fake_tokens([number], number, TOKENS)
        late = client.wait(client.submit(token_ids=[9], max_tokens=3, seed=9).job_id)
        assert (late.state, list(late.output_token_ids)) == (JobState.SUCCEEDED, fake_tokens([9], 9, 3))
    assert (first.stop(), second.stop()) == (0, 0)


def read(stream: JobStream, count: int | None = None) -> list[int]:
    """Reads until a token index was seen, or to the end; gives the tokens, each of which comes once."""
    tokens: list[int] = []
    start = stream.next_token_index
    while count is None or stream.next_token_index < count:
        event = next(stream)
        if isinstance(event, Chunk):
            assert event.first_token_index == start + len(tokens)
            tokens += event.token_ids
        elif isinstance(event, Finished):
            assert event.job.state is JobState.SUCCEEDED
            break
    return tokens
