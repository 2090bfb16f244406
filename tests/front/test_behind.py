"""A watcher who is behind gets what came meanwhile joined, and nothing of it is lost, doubled or moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batond.daemon.front.follow import MOST_JOINED_TOKENS, Ended, Follower
from batond.daemon.front.hub import CameBack, Hub
from batond.daemon.queue import Chunk
from batond.daemon.wire.messages import TokenLogprobs

if TYPE_CHECKING:
    from batond.daemon.front.hub import LiveEvent
    from batond.daemon.queue import JobStore


async def behind(events: list[LiveEvent], from_index: int = 0) -> list[Any]:
    """What a watcher sees that reads nothing before all has come; it stops at the record's end."""
    hub = Hub()
    live = hub.open("t", "j", base_indexes=(0, 0))
    live.publish(events)
    live.close()
    seen = []
    follower = Follower(cast("JobStore", None), hub, stopping=lambda: False)
    async for event in follower.follow("t", "j", from_index):
        assert not isinstance(event, Ended)
        seen.append(event)
        if sum(len(one.token_ids) for one in seen if isinstance(one, Chunk)) == _tokens(events) - from_index:
            break
    return seen


def _tokens(events: list[LiveEvent]) -> int:
    return sum(len(one.token_ids) for one in events if isinstance(one, Chunk))


def line(*sizes: int, choice: int = 0) -> list[LiveEvent]:
    chunks: list[LiveEvent] = []
    at = 0
    for size in sizes:
        ids = list(range(at, at + size))
        chunks.append(Chunk(first_index=at, token_ids=ids, text=f"<{at}>", choice=choice))
        at += size
    return chunks


async def test_what_came_meanwhile_is_one_message() -> None:
    """R7: a slow reader catches up instead of falling behind for ever."""
    (one,) = await behind(line(1, 1, 2, 1))
    assert one == Chunk(first_index=0, token_ids=[0, 1, 2, 3, 4], text="<0><1><2><4>")


async def test_a_message_has_a_most_length() -> None:
    seen = await behind(line(*[200] * 6))
    assert all(len(one.token_ids) <= MOST_JOINED_TOKENS for one in seen)
    assert [token for one in seen for token in one.token_ids] == list(range(1200))


@pytest.mark.parametrize(
    "between",
    [
        CameBack(),
        Chunk(first_index=2, token_ids=[], text="~"),  # Text alone is told once an index.
        Chunk(first_index=0, token_ids=[7], text="b", choice=1),
    ],
)
async def test_what_stands_between_stays_there(between: LiveEvent) -> None:
    first, second, third, fourth = line(1, 1, 1, 1)
    seen = await behind([first, second, between, third, fourth])
    assert [one == between for one in seen] == [False, True, False]
    assert [one.token_ids for one in (seen[0], seen[2])] == [[0, 1], [2, 3]]


async def test_the_end_of_a_choice_ends_a_message() -> None:
    last = Chunk(first_index=1, token_ids=[1], text="z", finish_reason="length")
    (one,) = await behind([*line(1), last])
    assert (one.token_ids, one.finish_reason) == ([0, 1], "length")


async def test_logprobs_stay_beside_their_tokens() -> None:
    events: list[LiveEvent] = [
        Chunk(first_index=at, token_ids=[at], text="", logprobs=[TokenLogprobs(-float(at), [])])
        for at in range(3)
    ]
    (one,) = await behind(events)
    assert [known.logprob for known in one.logprobs] == [0.0, -1.0, -2.0]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
async def test_from_any_index_each_token_comes_once(sizes: list[int], data: st.DataObject) -> None:
    """D6: text of a chunk that is known in part comes whole."""
    total = sum(sizes)
    start = data.draw(st.integers(0, total - 1))
    seen = await behind(line(*sizes), start)
    assert seen[0].first_index == start
    assert [token for one in seen for token in one.token_ids] == list(range(start, total))
    ends = [sum(sizes[:number]) for number in range(1, len(sizes) + 1)]
    assert "".join(one.text for one in seen) == "".join(
        f"<{end - size}>" for end, size in zip(ends, sizes, strict=True) if end > start
    )
