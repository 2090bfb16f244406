"""Chat through the official client, unchanged, against its own types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from batond.bench.fake_engine import fake_text, fake_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.bench.local_daemon import LocalDaemon

HELLO: list[Any] = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]


def encoded(text: str) -> list[int]:
    return [ord(char) % 999 + 1 for char in text]


def expected(seed: int, count: int, text: str = "system:short\nuser:hello\n") -> str:
    return fake_text(fake_tokens(encoded(text), seed, count))


@pytest.fixture
def client(gateway: Any, fake: LocalDaemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key=fake.tokens["alice"], max_retries=0, timeout=30
    ) as client:
        yield client


def test_a_chat_is_what_the_model_says(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="fake", messages=HELLO, max_completion_tokens=6, seed=5)
    assert found.choices[0].message.content == expected(5, 6)
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (24, 6, 30)


def test_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=HELLO,
        max_tokens=6,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == expected(5, 6)
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 6
