"""Chat sessions over the API: the same answers, less work, nothing shared between tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.clients.errors import InvalidRequestError

if TYPE_CHECKING:
    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import Client, JobInfo

pytestmark = [pytest.mark.redis]
FIRST = [(3 + 7 * place) % 250 for place in range(40)]
MORE = [11, 13, 17]


def answer(client: Client, token_ids: list[int], **options: Any) -> JobInfo:
    asked = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.7, "seed": 9, **options}
    return client.result(client.submit(token_ids=token_ids, **asked).job_id)


def test_the_next_turn_computes_only_what_is_new(daemon: LocalDaemon) -> None:
    with daemon.client("red") as red:
        first = answer(red, FIRST, session_id="talk")
        longer = [*FIRST, *first.output_token_ids, *MORE]
        warm = answer(red, longer, session_id="talk", logprobs=0)
        cold = answer(red, longer, logprobs=0)
    assert first.cached_prompt_tokens == cold.cached_prompt_tokens == 0
    # The last token of an answer was never put in: nothing came after it.
    assert len(FIRST) < warm.cached_prompt_tokens <= len(longer) - len(MORE)
    assert warm.output_token_ids == cold.output_token_ids
    assert warm.prompt_tokens == len(longer)
    assert [one.logprob for one in warm.logprobs] == pytest.approx(
        [one.logprob for one in cold.logprobs], abs=1e-4
    )


def test_tenants_of_the_same_session_id_do_not_meet(daemon: LocalDaemon) -> None:
    """V4: neither reuses, nor drops, what the other's conversation kept."""
    with daemon.client("red") as red, daemon.client("blue") as blue:
        said = answer(red, FIRST, session_id="same")
        longer = [*FIRST, *said.output_token_ids, *MORE]
        stranger = answer(blue, longer, session_id="same")
        own = answer(red, longer, session_id="same")
        again = answer(blue, [*longer, *stranger.output_token_ids], session_id="same")
    assert stranger.cached_prompt_tokens == 0
    assert own.cached_prompt_tokens > len(FIRST)
    assert again.cached_prompt_tokens >= len(longer)
    assert stranger.output_token_ids == own.output_token_ids


@pytest.mark.parametrize(
    "fields", [{"session_id": "a/b"}, {"session_id": "a", "n": 2}, {"session_id": "a", "prompt_logprobs": 0}]
)
def test_what_a_session_can_not_be_is_refused(daemon: LocalDaemon, fields: dict[str, Any]) -> None:
    """Q1."""
    with daemon.client("red") as red, pytest.raises(InvalidRequestError) as caught:
        red.submit(token_ids=[1], **fields)
    assert list(caught.value.fields) == ["spec.session_id"]
