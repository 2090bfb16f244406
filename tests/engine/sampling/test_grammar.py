"""Structured output: whatever a random model wants to say, the text follows schema, expression or grammar."""

from __future__ import annotations

import json
import random
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.errors import InvalidRequestError
from batond.daemon.wire.messages import QueryFailed, QueryState

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeEngine = Callable[..., LocalEngine]

EOS = 2
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "ok": {"type": "boolean"},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "ok", "size"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def ascii_tokenizer() -> Tokenizer:
    """Ids 0-2 are special, as in the model; one token per printable ASCII character follows."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": EOS}
    vocabulary |= {chr(code): 3 + place for place, code in enumerate(range(33, 127))} | {"Ġ": 97}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return tokenizer


def wanted(**source: str) -> SamplingParams:
    return SamplingParams(max_tokens=120, temperature=1.5, logprobs=0, **source)  # type: ignore[arg-type]


KINDS: dict[str, SamplingParams] = {
    "schema": wanted(json_schema=SCHEMA),
    "regex": wanted(regex="[a-f]{3,6}-[0-9]+"),
    "grammar": wanted(grammar='root ::= "<" ("ab" | "c") [0-9] ">"'),
    "greedy regex": SamplingParams(max_tokens=60, regex="(yes|no), (maybe|never)"),
    "free": SamplingParams(max_tokens=30, temperature=1.5, ignore_eos=True),
}


def follows(kind: str, text: str) -> bool:
    match kind:
        case "schema":
            found = json.loads(text)
            return (
                set(found) == {"name", "ok", "size"}
                and isinstance(found["ok"], bool)
                and len(found["name"]) <= 5
                and 0 <= found["size"] <= 99
            )
        case "regex":
            return re.fullmatch("[a-f]{3,6}-[0-9]+", text) is not None
        case "grammar":
            return re.fullmatch("<(ab|c)[0-9]>", text) is not None
        case "greedy regex":
            return re.fullmatch("(yes|no), (maybe|never)", text) is not None
        case _:
            return True


def alone(make_engine: MakeEngine, model: Any, tokenizer: Tokenizer, kind: str, seed: int) -> list[int]:
    engine = make_engine(model, tokenizer, rows=1)
    query = engine.submit([5, 6, 7 + seed], KINDS[kind], seed=seed)
    engine.run_until_idle()
    assert query.output_token_ids
    return query.output_token_ids


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "free"])
def test_output_follows(llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer, kind: str) -> None:
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    engine = make_engine(llama, ascii_tokenizer, rows=3)
    queries = [engine.submit([5, 6, 7 + seed], KINDS[kind], seed=seed) for seed in range(6)]
    engine.run_until_idle()
    for query in queries:
        assert query.finish_reason == "stop"
        assert follows(kind, query.output_text), query.output_text
        assert query.output_token_ids[-1] == EOS
    if kind != "greedy regex":
        assert len({query.output_text for query in queries}) > 1


def test_mixed_batch_under_parks_equals_solo(
    llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer
) -> None:
    """R1, R3: the matcher's state travels with its query; rows without a grammar are free."""
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    rng = random.Random(4)
    engine = make_engine(llama, ascii_tokenizer, rows=3)
    submitted = [(kind, seed) for seed in range(2) for kind in KINDS]
    queries = [engine.submit([5, 6, 7 + seed], KINDS[kind], seed=seed) for kind, seed in submitted]
    while any(query.live for query in queries):
        engine.step()
        for query in queries:
            if query.live and query.state is not QueryState.PARKED and rng.random() < 0.1:
                engine.park(query)
            elif query.held and rng.random() < 0.4:
                engine.resume(query)
    assert engine.counters["parks"] > 10
    for query, (kind, seed) in zip(queries, submitted, strict=True):
        assert query.output_token_ids == alone(make_engine, llama, ascii_tokenizer, kind, seed)


def test_state_is_rebuilt_from_replayed_tokens(
    llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer
) -> None:
    """D3."""
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    whole = alone(make_engine, llama, ascii_tokenizer, "schema", 1)
    for emitted in (1, len(whole) // 2, len(whole) - 1, len(whole)):
        engine = make_engine(llama, ascii_tokenizer)
        query = engine.submit([5, 6, 8], KINDS["schema"], seed=1, emitted_token_ids=whole[:emitted])
        engine.run_until_idle()
        assert (query.output_token_ids, query.finish_reason) == (whole, "stop")


def test_replayed_tokens_that_break_the_grammar_fail_that_query_alone(
    llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer
) -> None:
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    engine = make_engine(llama, ascii_tokenizer)
    events: list[Any] = []
    engine.on_event = events.append
    good = engine.submit([5, 6, 7], KINDS["regex"], seed=0)
    bad = engine.submit([5, 6, 7], KINDS["regex"], seed=0, emitted_token_ids=[3])
    engine.run_until_idle()
    assert bad.state is QueryState.FAILED
    assert [event.reason for event in events if isinstance(event, QueryFailed)] == ["GRAMMAR_DEAD_END"]
    assert good.finish_reason == "stop"


def test_a_grammar_the_vocabulary_can_not_spell_fails_clearly(
    llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer
) -> None:
    """The vocabulary has ASCII alone."""
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    engine = make_engine(llama, ascii_tokenizer)
    query = engine.submit([5], SamplingParams(regex="aé"))
    mate = engine.submit([6], KINDS["regex"], seed=3)
    engine.run_until_idle()
    assert query.state is QueryState.FAILED
    assert query.error is not None
    assert query.error[0] == "GRAMMAR_DEAD_END"
    assert mate.finish_reason == "stop"


@pytest.mark.parametrize(
    "more",
    [
        {"ignore_eos": True},
        {"min_tokens": 20},
        {"min_tokens": 20, "temperature": 2.0},
        {"logit_bias": {EOS: -100.0}},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0},
    ],
    ids=str,
)
def test_a_complete_grammar_wins(
    llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer, more: dict[str, Any]
) -> None:
    """Where nothing else may follow, the generation ends, whatever else was asked for."""
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    engine = make_engine(llama, ascii_tokenizer)
    query = engine.submit([5, 6], SamplingParams(max_tokens=40, regex="abab", **more), seed=1)
    engine.run_until_idle()
    assert (query.output_text, query.finish_reason, len(query.output_token_ids)) == ("abab", "stop", 5)


def test_min_tokens_makes_an_open_grammar_go_on(
    llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer
) -> None:
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    engine = make_engine(llama, ascii_tokenizer)
    eager = {EOS: 100.0}
    short = engine.submit([5], SamplingParams(regex="[ab]+", logit_bias=eager))
    longer = engine.submit([5], SamplingParams(regex="[ab]+", logit_bias=eager, min_tokens=7))
    engine.run_until_idle()
    assert (len(short.output_token_ids), len(longer.output_token_ids)) == (2, 8)


def test_stop_ids_wait_until_the_grammar_is_complete(
    llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer
) -> None:
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    engine = make_engine(llama, ascii_tokenizer)
    stop = ascii_tokenizer.token_to_id("z")
    sampling = SamplingParams(regex="[a-c]{4}", stop_token_ids=(stop,), logit_bias={stop: 100.0})
    query = engine.submit([5], sampling)
    engine.run_until_idle()
    assert re.fullmatch("[a-c]{4}", query.output_text)
    assert query.output_token_ids[-1] == stop


@pytest.mark.parametrize(
    "source",
    [
        {"regex": "("},
        {"regex": "a{5,2}"},
        {"grammar": "no rules at all"},
        {"grammar": 'start ::= "a"'},
        {"json_schema": '{"type": "nonsense"}'},
        {"json_schema": '{"$ref": "#/nowhere"}'},
    ],
    ids=str,
)
def test_sources_that_mean_nothing_are_refused_every_time(
    llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer, source: dict[str, str]
) -> None:
    """Q1: by the field's name, and the engine goes on."""
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    engine = make_engine(llama, ascii_tokenizer)
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match=next(iter(source))) as caught:
            engine.submit([5], SamplingParams(**source))  # type: ignore[arg-type]
        assert caught.value.details["field"] == next(iter(source))
    assert not engine.queries
    query = engine.submit([5], KINDS["regex"], seed=1)
    engine.run_until_idle()
    assert query.finish_reason == "stop"


def test_without_the_extra_the_refusal_says_what_to_install(
    llama: Any, make_engine: MakeEngine, ascii_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    engine = make_engine(llama, ascii_tokenizer)
    with pytest.raises(InvalidRequestError, match=r"batond\[structured\]") as caught:
        engine.submit([5], SamplingParams(json_schema="{}"))
    assert caught.value.reason == "NO_STRUCTURED_OUTPUT"
