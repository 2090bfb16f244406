"""What a request may not ask for together, or not this much of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon.errors import InvalidRequestError, RequestTooLargeError
from batond.daemon.front.requests import Limits, RequestReader
from batond.daemon.requests.params import MAX_PROMPT_LOGPROBS
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
        (spec(session_id="x" * 129), "spec.session_id", "BAD_SESSION"),
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
