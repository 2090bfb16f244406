"""The table of token counts against plain counting, through any order of arrivals, growth and departures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batond.daemon.engine.sampling.penalties import History, TokenCounts, penalize
from batond.daemon.requests.params import SamplingParams

CPU = torch.device("cpu")
VOCABULARY = 12
IN_PROMPT = 1 << 30


def counted(history: History) -> list[int]:
    row = [0] * VOCABULARY
    for token in set(history.prompt_token_ids):
        row[token] = IN_PROMPT
    for token in history.output_token_ids:
        row[token] += 1
    return row


tokens = st.integers(0, VOCABULARY - 1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=6),
    steps=st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 5), tokens), max_size=6), st.integers(0, 11)), max_size=25
    ),
)
def test_counts_equal_plain_counting(
    prompts: list[list[int]], steps: list[tuple[list[tuple[int, int]], int]]
) -> None:
    """Q4: any subset of queries a step, several new tokens at once, slots lost and taken again."""
    table = TokenCounts(VOCABULARY, CPU)
    outputs: list[list[int]] = [[] for _ in prompts]
    for new_tokens, forgotten in steps:
        for who, token in new_tokens:
            outputs[who % len(prompts)].append(token)
        asked = sorted({who % len(prompts) for who, _ in new_tokens})
        histories = [History(f"q{who}", prompts[who], outputs[who]) for who in asked]
        if histories:
            assert table.rows(histories).tolist() == [counted(one) for one in histories]
        table.forget(f"q{forgotten}")
    for who in range(len(prompts)):
        table.forget(f"q{who}")
    assert table.slots == 0


def test_slots_grow_by_doubling_and_are_used_again() -> None:
    table = TokenCounts(VOCABULARY, CPU)
    for who in range(100):
        table.rows([History(f"q{who}", [who % VOCABULARY], [])])
    assert table.slots == 128
    for who in range(50):
        table.forget(f"q{who}")
    fresh = [History(f"new{who}", [3], [4, 4]) for who in range(50)]
    assert table.rows(fresh).tolist() == [counted(one) for one in fresh]
    assert table.slots == 128


def test_rows_without_a_penalty_stay_bit_for_bit() -> None:
    torch.manual_seed(2)
    logits = torch.randn(2, VOCABULARY)
    logits[:, 0] = -torch.inf
    counts = torch.randint(0, 3, (2, VOCABULARY), dtype=torch.int32) + IN_PROMPT
    off, on = SamplingParams(), SamplingParams(repetition_penalty=1.5, presence_penalty=1.0)
    got = penalize(logits, counts, [off, on])
    assert torch.equal(got[0], logits[0])
    assert not torch.equal(got[1, 1:], logits[1, 1:])
    assert got[1, 0] == -torch.inf, "a banned token stays banned"


@pytest.mark.parametrize("count", [1, 5])
def test_openai_penalties_by_the_formula(count: int) -> None:
    table = TokenCounts(VOCABULARY, CPU)
    counts = table.rows([History("q", [7], [3] * count)])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = penalize(torch.zeros(1, VOCABULARY), counts, [params])[0]
    assert got[3].item() == -(0.5 + 0.25 * count)
    assert got[7].item() == 0.0, "the prompt does not count"
