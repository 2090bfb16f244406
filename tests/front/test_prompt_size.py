"""A text that can't fit is refused before it costs anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from batond.daemon.errors import RequestTooLargeError
from batond.daemon.front.requests import Limits, RequestReader
from batond.daemon.front.text import ModelTokenizer
from batond.policies.classes import SlaClasses
from batond.v1 import types_pb2

if TYPE_CHECKING:
    from batond.daemon.front.identity import Tenant

LIMIT_TOKENS = 64
LONGEST_TOKEN_CHARS = len("<eos>")


class CountingTokenizer(ModelTokenizer):
    """Counts what it is asked to encode."""

    encoded = 0

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoded += 1
        return super()._encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    wrapped.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return CountingTokenizer(wrapped)


@pytest.fixture
def reader(tokenizer: CountingTokenizer) -> RequestReader:
    """A reader with a small limit."""
    limits = Limits(model="tiny", max_query_tokens=LIMIT_TOKENS, vocab_size=257, default_max_tokens=8)
    return RequestReader(tokenizer, SlaClasses(), limits)


def _specs(chars: int) -> list[types_pb2.JobSpec]:
    text = "x" * chars
    chat = types_pb2.ChatInput(messages=[types_pb2.ChatMessage(role="user", content=text)])
    return [types_pb2.JobSpec(text=types_pb2.TextInput(text=text)), types_pb2.JobSpec(chat=chat)]


@pytest.mark.parametrize("kind", [0, 1])
def test_a_text_that_cannot_fit_is_not_tokenized(
    reader: RequestReader, tokenizer: CountingTokenizer, tenant: Tenant, kind: int
) -> None:
    """M7: no tenant keeps the daemon busy with megabytes that are refused anyway."""
    with pytest.raises(RequestTooLargeError) as refused:
        reader.read(_specs(LIMIT_TOKENS * LONGEST_TOKEN_CHARS + 1)[kind], tenant)
    assert refused.value.details["limit"] == str(LIMIT_TOKENS)
    assert tokenizer.encoded == 0


@pytest.mark.parametrize("kind", [0, 1])
def test_a_text_that_may_fit_is_counted_in_tokens(
    reader: RequestReader, tokenizer: CountingTokenizer, tenant: Tenant, kind: int
) -> None:
    """M7: limit - 1 works, and the limit is one of tokens."""
    assert len(reader.read(_specs(LIMIT_TOKENS - 1)[kind], tenant).spec.prompt_token_ids) == LIMIT_TOKENS - 1
    with pytest.raises(RequestTooLargeError):
        reader.read(_specs(LIMIT_TOKENS + 1)[kind], tenant)
    assert tokenizer.encoded == 2
