"""What requests look like, whom they sit beside, and how their text comes out: on both batches, in fp32."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from batond.bench.families import make_family
from batond.bench.model_support import solo_tokens
from batond.bench.schedules import Arrival, Player, Request
from batond.bench.solo import compare
from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.proof.serving import choose_batch
from batond.daemon.engine.sampling.text import TextStream
from batond.daemon.errors import InvalidRequestError
from batond.daemon.wire.messages import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeStand = Callable[[str, str], Any]
    MakeEngine = Callable[..., LocalEngine]

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
TOLERANCE = 1e-4
LENGTHS = range(1, 66)


def prompt(length: int, stride: int = 7) -> list[int]:
    return [3 + (stride * place + place * place) % 120 for place in range(length)]


# -- requests -------------------------------------------------------------------------------------------


def test_odd_prompts_are_prompts(make_engine: MakeEngine, batch_kind: str) -> None:
    """Q1, Q5: special tokens alone, the pad id alone, end-of-sequence first, in the middle and last."""
    model = make_family("llama")
    eos, pad = 2, 0
    assert model.generation_config.eos_token_id == eos
    model.config.pad_token_id = eos
    odd = [
        [eos],
        [pad],
        [eos] * 9,
        [pad] * 12,
        [1, eos],
        [pad, pad, 5, 9],
        [5, eos, 9, eos],
        [5, pad, 9, pad],
    ]
    engine = make_engine(model, rows=3, batch=batch_kind, chunk_tokens=4, max_query_tokens=64)
    mate = engine.submit(prompt(30), SamplingParams(max_tokens=30, ignore_eos=True))
    queries = []
    for tokens in odd:
        queries.append(engine.submit(tokens, GREEDY))
        engine.step()
        if queries[-1].live:
            engine.park(queries[-1])
            engine.resume(queries[-1])
    engine.run_until_idle()
    for query, tokens in zip(queries, odd, strict=True):
        assert query.output_token_ids == solo_tokens(model, tokens, 10)
    assert mate.output_token_ids == solo_tokens(model, prompt(30), 30)


@pytest.mark.parametrize("pad", [None, 2], ids=["no pad token", "pad is eos"])
def test_end_of_sequence_ends_wherever_it_stood_before(
    make_engine: MakeEngine, batch_kind: str, pad: int | None
) -> None:
    """Q5: an end-of-sequence id in the prompt ends nothing, one in the output does; pads don't matter."""
    model = make_family("llama")
    model.config.pad_token_id = model.generation_config.pad_token_id = pad
    engine = make_engine(model, rows=3, batch=batch_kind, max_query_tokens=64)
    wish = SamplingParams(max_tokens=12, logit_bias={2: 3.0})
    free = engine.submit([5, 2, 2, 9], SamplingParams(max_tokens=12, ignore_eos=True, logit_bias={2: 3.0}))
    mates = [engine.submit(prompt(20 + n), GREEDY) for n in range(2)]
    engine.run_until_idle()
    assert 2 in free.output_token_ids[1:-1], "the test would prove nothing"
    ended = engine.submit([5, 2, 2, 9], wish)
    engine.run_until_idle()
    cut = free.output_token_ids.index(2) + 1
    assert (ended.output_token_ids, ended.finish_reason) == (free.output_token_ids[:cut], "stop")
    for n, query in enumerate(mates):
        assert query.output_token_ids == solo_tokens(model, prompt(20 + n), 10)


BAD_FIELDS: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"max_tokens": 1.5},
    {"max_tokens": 1 << 31},
    {"temperature": float("nan")},
    {"top_p": 0},
    {"top_p": 1.1},
]


def test_the_same_answer_a_hundred_times(make_engine: MakeEngine, batch_kind: str) -> None:
    """Q1: between good jobs, which all finish."""
    model = make_family("llama")
    engine = make_engine(model, rows=3, batch=batch_kind, max_query_tokens=64)
    answers: dict[str, set[str]] = {}
    good = []
    for turn in range(100):
        if turn % 5 == 0:
            good.append(engine.submit(prompt(5 + turn % 7), GREEDY))
        for fields in BAD_FIELDS:
            with pytest.raises(InvalidRequestError) as caught:
                engine.submit(prompt(4), SamplingParams(**fields))
            answers.setdefault(str(fields), set()).add(str(caught.value))
        with pytest.raises(InvalidRequestError) as caught:
            engine.submit([], GREEDY)
        answers.setdefault("empty", set()).add(str(caught.value))
        engine.step()
    engine.run_until_idle()
    assert all(len(said) == 1 for said in answers.values())
    for number, query in enumerate(good):
        assert query.output_token_ids == solo_tokens(model, prompt(5 + 5 * number % 7), 10)


@pytest.mark.parametrize("penalty", [0.7, 1.8])
def test_padding_is_never_penalized(make_stand: MakeStand, batch_kind: str, penalty: float) -> None:
    """Q4: the repetition penalty alone and beside a long mate; the pad id would be the favourite."""
    stand = make_stand("llama", batch_kind)
    sampling = SamplingParams(
        max_tokens=8, ignore_eos=True, repetition_penalty=penalty, logit_bias={0: 7.0}, logprobs=1
    )
    request = Request(tuple(prompt(3)), sampling, seed=1)
    player = Player(stand.engine)
    player.submit(Arrival(Request(tuple(prompt(39)), SamplingParams(max_tokens=12, ignore_eos=True), seed=2)))
    for _ in range(8):
        player.step()
    query = player.submit(Arrival(request))
    for _ in range(3):
        player.step()
    stand.engine.park(query)
    player.drain()
    assert 0 in query.output_token_ids, "the test would prove nothing"
    assert compare(player, 1, request, stand.solo).faults == []


# -- text -----------------------------------------------------------------------------------------------


def _piece_tokenizer() -> Tokenizer:
    """Tokens of one to three characters, so that every text is split at odd places."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [
        letters[n % 26] + letters[(n * 7 + 3) % 26][: n % 3] + letters[n // 5 % 26][: n % 2]
        for n in range(400)
    ]
    unique = list(dict.fromkeys(pieces))[:128]
    assert len(unique) == 128
    tokenizer = Tokenizer(BPE(vocab={piece: place for place, piece in enumerate(unique)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 20])
def test_nothing_of_a_stop_string_is_streamed(make_engine: MakeEngine, batch_kind: str, size: int) -> None:
    """Q6: every substring of a text is its stop string once, split as the tokens fall, with parks."""
    model = make_family("llama")
    engine = make_engine(model, _piece_tokenizer(), rows=8, batch=batch_kind, max_query_tokens=64)
    whole = engine.submit(prompt(6), SamplingParams(max_tokens=16, ignore_eos=True))
    engine.run_until_idle()
    text = whole.output_text
    assert len(text) >= 20
    pieces: dict[str, list[str]] = {}

    def note(event: Any) -> None:
        if isinstance(event, Tokens):
            pieces.setdefault(event.query_id, []).append(event.text)

    engine.on_event = note
    stops = [text[first : first + size] for first in range(len(text) - size + 1)]
    queries = [
        engine.submit(prompt(6), SamplingParams(max_tokens=16, ignore_eos=True, stop=(stop,)))
        for stop in stops
    ]
    while engine.queries:
        engine.step()
        for query in queries:
            if query.row is not None and query.parks < len(query.output_token_ids) // 3:
                engine.park(query)
                engine.resume(query)
    for query, stop in zip(queries, stops, strict=True):
        assert "".join(pieces[query.query_id]) == query.output_text == text[: text.index(stop)]
        assert query.finish_reason == "stop"
        assert whole.output_token_ids[: len(query.output_token_ids)] == query.output_token_ids


@pytest.mark.parametrize("stop", ["zzzzz~", "~"])
def test_what_only_begins_like_a_stop_string_comes_out(
    make_engine: MakeEngine, batch_kind: str, stop: str
) -> None:
    """Q6: nothing is lost when the query ends by its length, though some was held back."""
    model = make_family("llama")
    engine = make_engine(model, _piece_tokenizer(), batch=batch_kind, max_query_tokens=64)
    whole = engine.submit(prompt(6), SamplingParams(max_tokens=9, ignore_eos=True))
    engine.run_until_idle()
    almost = whole.output_text[-3:] + stop
    query = engine.submit(prompt(6), SamplingParams(max_tokens=9, ignore_eos=True, stop=(almost,)))
    engine.run_until_idle()
    assert (query.output_text, query.finish_reason) == (whole.output_text, "length")


UNICODE = [
    "four bytes 😀😃 and more",
    "e\u0301 combining a\u0308\u0323",
    "family 👨\u200d👩\u200d👧\u200d👦 flag 🏴\u200d☠\ufe0f 🇩🇪",
    "日本語と한국어",
    "  leading and trailing  ",
]


def _byte_fallback_tokenizer() -> Tokenizer:
    """As of Llama 2: a few words, everything else as bytes `<0xNN>`."""
    words = ["\u2581", "a", "e", "n", "d", "\u2581and", "\u2581more", "family", "日", "l", "i", "g"]
    vocab = {word: place for place, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("text", UNICODE)
def test_byte_fallback_streams_the_full_decode(text: str) -> None:
    """Q7: characters come out whole, once their last byte is there; the pieces join to the full decode."""
    tokenizer = _byte_fallback_tokenizer()
    ids = tokenizer.encode(text.replace(" ", "\u2581")).ids
    assert len(ids) > len(text) / 2
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("text", UNICODE)
def test_a_text_cut_anywhere_is_the_full_decode_of_its_tokens(text: str, byte_tokenizer: Tokenizer) -> None:
    """Q7: also where the last character is incomplete."""
    ids = byte_tokenizer.encode(text).ids
    for count in range(1, len(ids) + 1):
        stream = TextStream(byte_tokenizer)
        joined = "".join(stream.push(token) for token in ids[:count]) + stream.flush()
        assert joined == byte_tokenizer.decode(ids[:count])


@pytest.mark.parametrize("text", UNICODE)
def test_a_cut_character_takes_no_whole_one_back(text: str) -> None:
    """Q7: a full decode with byte fallback spoils whole characters before a cut one; the stream may not.

    What was given out stays, and each byte that is left over is one U+FFFD.
    """
    tokenizer = _byte_fallback_tokenizer()
    ids = tokenizer.encode(text.replace(" ", "\u2581")).ids
    for count in range(1, len(ids) + 1):
        stream = TextStream(tokenizer)
        sure = "".join(stream.push(token) for token in ids[:count])
        tail = stream.flush()
        assert tokenizer.decode(ids).startswith(sure)
        assert tail == "\ufffd" * len(tail)
        assert len(tail) < 4
        assert count < len(ids) or not tail


# -- batch mates ----------------------------------------------------------------------------------------


@functools.cache
def _alone(family: str) -> tuple[Any, list[torch.Tensor]]:
    """A model, and transformers' own logits behind each prompt of 1 to 65 tokens and one more."""
    model = make_family(family)
    with torch.no_grad():
        logits = [
            model(input_ids=torch.tensor([[*prompt(length, 3 + length % 5), length]])).logits[0, -1].float()
            for length in LENGTHS
        ]
    return model, logits


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "lfm2"])
def test_lengths_1_to_65_in_one_batch(family: str, batch_kind: str) -> None:
    """Q9: largest difference of a logit from transformers' own under 1e-4."""
    model, expected = _alone(family)
    serving = choose_batch(batch_kind, CausalModel(model, "cpu"), len(LENGTHS), max_query_tokens=68)
    assert serving.batch.kind == batch_kind
    for row, length in enumerate(LENGTHS):
        single = serving.new_prefill_batch()
        single.step({0: prompt(length, 3 + length % 5)})
        serving.batch.embed(row, single.extract(0))
    logits = serving.batch.step({row: [length] for row, length in enumerate(LENGTHS)})
    serving.batch.check_integrity()
    assert float((logits - torch.stack(expected)).abs().max()) < TOLERANCE


def test_a_long_prompt_lets_an_urgent_one_pass(make_engine: MakeEngine, batch_kind: str) -> None:
    """S9: it waits for one chunk at most, no chunk is repeated, and nobody's tokens change."""
    model = make_family("llama", max_position_embeddings=4200)
    engine = make_engine(model, rows=2, batch=batch_kind, chunk_tokens=256, max_query_tokens=4200)
    counters = engine.counters
    running = engine.submit(prompt(4), SamplingParams(max_tokens=60, ignore_eos=True))
    engine.step()
    before = counters["prefill_tokens"]
    long = engine.submit(prompt(4100, 3), GREEDY, sla_class="batch")
    for _ in range(5):
        engine.step()
    assert counters["prefill_tokens"] - before == 5 * 256
    urgent = engine.submit(prompt(20, 5), GREEDY, sla_class="interactive")
    engine.step()
    assert len(urgent.output_token_ids) == 2, "one token from its prompt, one from the step it joined"
    computed = counters["prefill_tokens"] - before
    assert 5 * 256 + 20 <= computed <= 6 * 256
    assert long.prefilled_tokens == computed - 20
    while engine.queries:
        last, tokens = counters["prefill_tokens"], len(running.output_token_ids)
        engine.step()
        assert counters["prefill_tokens"] - last <= 256
        assert not running.live or len(running.output_token_ids) == tokens + 1
    assert counters["prefill_tokens"] - before == 4100 + 20
    assert counters["recomputed_tokens"] == 0
    assert (long.parks, running.parks) == (0, 0)
    assert long.output_token_ids == solo_tokens(model, prompt(4100, 3), 10)
    assert urgent.output_token_ids == solo_tokens(model, prompt(20, 5), 10)
