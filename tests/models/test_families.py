"""Every causal-LM family of transformers: exact, or refused with the reason; never served otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from batond.bench.families import family_names, make_family
from batond.bench.family_sizes import NO_MODEL
from batond.bench.model_support import PROMPT_TOKENS, check_family, solo_tokens
from batond.bench.support_table import read, row

PAGE = Path(__file__).parents[2] / "docs" / "model-support.md"
LEAST_SHARED = 180
FEWEST_DIFFERENT_TOKENS = 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


@pytest.mark.parametrize("family", family_names())
def test_family_is_exact_or_refused(family: str, page: str) -> None:
    """R2, R8: staggered queries, parked into other rows, give solo `generate`'s tokens, or are refused."""
    support = check_family(family)
    assert support.outcome in {"exact", "refused"}, support
    if support.outcome == "refused":
        assert support.reason
    else:
        assert support.fewest_parks > 0
    if f"transformers {transformers.__version__}," in page:
        assert row(support) == read(page)[family], "docs/model-support.md is out of date"


def test_the_page_covers_the_whole_mapping(page: str) -> None:
    """The page can't leave a family out, and holds the promised number."""
    rows = read(page)
    if f"transformers {transformers.__version__}," in page:
        assert set(rows) | NO_MODEL == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {cells[1] for cells in rows.values()} == {"yes", "refused"}
    assert sum(cells[3] == "shared" for cells in rows.values()) >= LEAST_SHARED


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba2", "bert", "deepseek_v3", "whisper"])
def test_the_tiny_models_are_not_dull(family: str) -> None:
    """A model that repeats one token would hide most mistakes."""
    model = make_family(family)
    prompts = ([5 + place, *range(9, 9 + length)] for place, length in enumerate(PROMPT_TOKENS))
    outputs = [tuple(solo_tokens(model, prompt, 14)) for prompt in prompts]
    assert len(set(outputs)) == len(outputs)
    assert all(len(set(tokens)) >= FEWEST_DIFFERENT_TOKENS for tokens in outputs)
