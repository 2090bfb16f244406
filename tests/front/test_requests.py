"""What a request may not ask for together, or not this much of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.errors import InvalidRequestError, RequestTooLargeError
from batond.daemon.front import requests as module
from batond.daemon.front.requests import Limits, RequestReader
from batond.daemon.requests.params import MAX_CLIENT_ID_CHARS, MAX_PROMPT_LOGPROBS
from batond.policies.classes import SlaClasses
from batond.v1 import types_pb2

if TYPE_CHECKING:
    from batond.daemon.front.identity import Tenant

LIMITS: dict[str, Any] = {
    "model": "tiny",
    "max_query_tokens": 1 << 20,
    "vocab_size": 100,
    "default_max_tokens": 50,
    "max_choices": 4,
    "max_choice_tokens": 120,
}


def reader(**limits: Any) -> RequestReader:
    return RequestReader(None, SlaClasses(), Limits(**LIMITS | limits))  # type: ignore[arg-type]


def spec(prompt_tokens: int = 2, session_id: str = "", **sampling: Any) -> types_pb2.JobSpec:
    return types_pb2.JobSpec(
        tokens=types_pb2.TokenInput(token_ids=[1] * prompt_tokens),
        session_id=session_id,
        sampling=types_pb2.SamplingParams(**sampling),
    )


@pytest.mark.parametrize(
    ("given", "field", "reason"),
    [
        (spec(session_id="a b"), "spec.session_id", "BAD_SESSION"),
        (spec(session_id="x" * (MAX_CLIENT_ID_CHARS + 1)), "spec.session_id", "BAD_SESSION"),
        (spec(session_id="chat", n=2), "spec.session_id", "BAD_SESSION"),
        (spec(session_id="chat", prompt_logprobs=0), "spec.session_id", "BAD_SESSION"),
        (spec(n=5), "spec.sampling.n", "BAD_SAMPLING"),
        (spec(n=0), "spec.sampling.n", "BAD_SAMPLING"),
        (spec(logit_bias={1 << 30: 5.0}), "spec.sampling.logit_bias", "BAD_SAMPLING"),
        (spec(stop_token_ids=[1 << 30]), "spec.sampling.stop_token_ids", "BAD_SAMPLING"),
        (spec(n=3, max_tokens=41), "spec.sampling.n", RequestTooLargeError.reason),
        (
            spec(MAX_PROMPT_LOGPROBS // 21 + 1, prompt_logprobs=20),
            "spec.sampling.prompt_logprobs",
            RequestTooLargeError.reason,
        ),
    ],
    ids=["space", "long", "n", "prompt", "many", "none", "bias", "stop", "tokens", "numbers"],
)
def test_a_refusal_names_its_field(given: types_pb2.JobSpec, field: str, reason: str, tenant: Tenant) -> None:
    """Q1."""
    with pytest.raises(InvalidRequestError) as caught:
        reader().read(given, tenant)
    assert (caught.value.details["field"], caught.value.reason) == (field, reason)


@pytest.mark.parametrize(
    "given",
    [
        spec(session_id="a b", regex="a+"),
        spec(n=5, regex="a+"),
        spec(logit_bias={1 << 30: 5.0}, regex="a+"),
        spec(0, regex="a+"),
        spec(1 << 21, regex="a+"),
    ],
    ids=["session", "n", "bias", "empty", "long"],
)
def test_a_grammar_is_parsed_last(
    given: types_pb2.JobSpec, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q1: what is refused anyway costs no more than a look."""
    parsed: list[Any] = []
    monkeypatch.setattr(module, "check_structure", parsed.append)
    with pytest.raises(InvalidRequestError):
        reader().read(given, tenant)
    assert parsed == []
    reader().read(spec(regex="a+"), tenant)
    assert len(parsed) == 1


def test_ids_are_as_long_as_they_may_be(tenant: Tenant) -> None:
    """Front and engine hold sessions to one limit; jobs have the same."""
    longest = "x" * MAX_CLIENT_ID_CHARS
    assert reader().read(spec(session_id=longest), tenant).spec.session_id == longest
    assert module.check_job_id(longest) == longest
    with pytest.raises(InvalidRequestError, match=str(MAX_CLIENT_ID_CHARS)):
        module.check_job_id(longest + "x")


def test_inline_prefill_has_no_prompt_logprobs(tenant: Tenant) -> None:
    with pytest.raises(InvalidRequestError, match="inside the batch step"):
        reader(prompt_logprobs=False).read(spec(prompt_logprobs=0), tenant)


def test_a_session_is_kept_with_the_job(tenant: Tenant) -> None:
    assert reader().read(spec(session_id="chat:1"), tenant).spec.session_id == "chat:1"


def test_several_choices_share_a_default_of_max_tokens(tenant: Tenant) -> None:
    assert reader().read(spec(n=4), tenant).spec.sampling.max_tokens == 30
    assert reader().read(spec(n=2), tenant).spec.sampling.max_tokens == 50
    assert reader().read(spec(n=3, max_tokens=40), tenant).spec.sampling.max_tokens == 40
    assert reader().read(spec(max_tokens=500), tenant).spec.sampling.max_tokens == 500
