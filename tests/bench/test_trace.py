"""`python -m batond.bench trace`: a trace on the real daemon with a tiny random model; step times."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from batond.bench.step_costs import fit
from batond.bench.trace import Options, workload
from batond.daemon.errors import ConfigError, StateError
from batond.daemon.simulator.costs import StepCosts

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "arrival_s,prompt_tokens,output_tokens,tenant"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A short trace of two tenants, its busiest seconds in the middle."""
    path = tmp_path / "trace.csv"
    rows = [f"{number * 10},160,32,conv" for number in range(4)]
    rows += [
        f"{50 + number * 0.1:.1f},{160 + 16 * (number % 5)},{32 + 16 * (number % 3)},"
        f"{'code' if number % 3 == 0 else 'conv'}"
        for number in range(30)
    ]
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama and a byte tokenizer, saved as Hugging Face folders are."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(600)
def test_a_trace_is_replayed_beside_its_prediction(trace: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """With given step times: those of a busy machine can't always be fitted, and are no matter of a test."""
    output, costs = tmp_path / "figures.json", tmp_path / "costs.json"
    costs.write_text('{"step_s": 0.01, "row_s": 0.001, "prefill_s": 0.005, "prefill_token_s": 0.0002}')
    arguments = [trace, "--classes", "code=interactive,conv=batch", "--policies", "priority,fcfs"]
    arguments += ["--window", 10, "--requests", 24, "--shrink", 16, "--rows", 2, "--chunk-tokens", 16]
    arguments += ["--threads", 1, "--model", tiny_folder, "--output", output, "--costs", costs]
    command = [sys.executable, "-m", "batond.bench", "trace", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for said in ("TTFT p99 s", "daemon: interactive TTFT p99", "simulated: interactive TTFT p99"):
        assert said in done.stdout
    figures = json.loads(output.read_text())
    assert [one["policy"] for one in figures["policies"]] == [
        "priority alone, daemon",
        "priority alone, simulated",
        "priority, daemon",
        "priority, simulated",
        "fcfs, daemon",
        "fcfs, simulated",
    ]
    for real, predicted in zip(figures["policies"][2::2], figures["policies"][3::2], strict=True):
        groups = zip(real["groups"], predicted["groups"], strict=True)
        assert [(one["sla_class"], one["requests"]) for one, _ in groups] == [
            ("interactive", 8),
            ("batch", 16),
        ]
        # Both computed the same tokens, and nobody was lost.
        assert real["late"] == real["refused"] == 0
        tokens = [one["tokens_per_s"] * one["duration_s"] for one in (real, predicted)]
        assert tokens[0] == pytest.approx(tokens[1])
        assert real["rows_taken"] is None
        assert 0 < predicted["rows_taken"] <= 1
        assert 0 < real["groups"][0]["ttft_s"]["p50"] <= real["groups"][0]["ttft_s"]["p99"]
    assert set(figures["drift"]) == {"priority alone", "priority", "fcfs"}
    assert StepCosts(**figures["costs"]).step_s > 0


def test_the_workload_is_thinned_and_shrunk(trace: Path) -> None:
    options = Options(
        trace=trace,
        policies=("priority",),
        classes={"code": "interactive", "conv": "batch"},
        window_s=10,
        requests=15,
        shrink=16,
    )
    requests = workload(options)
    assert len(requests) == 15
    assert requests[0].arrival_s == 0.0
    assert requests[-1].arrival_s == pytest.approx(2.8)
    assert {request.prompt_tokens for request in requests} <= {10, 11, 12, 13, 14}
    assert {request.output_tokens for request in requests} <= {2, 3, 4}
    assert {request.sla_class for request in requests} == {"interactive", "batch"}
    with pytest.raises(ConfigError, match="shrink"):
        workload(Options(trace=trace, policies=("fcfs",), classes={}, shrink=0.5))


def decode_steps(costs: StepCosts) -> list[tuple[int, int, float]]:
    return [
        (rows, rows * length, costs.decode_s(rows, rows * length))
        for rows in (1, 2, 4)
        for length in (30, 300)
    ]


def test_costs_that_made_the_times_are_found_again() -> None:
    costs = StepCosts(
        step_s=0.02,
        row_s=0.003,
        cached_token_s=2e-6,
        prefill_s=0.01,
        prefill_token_s=1e-4,
        park_byte_s=3e-10,
        kv_token_bytes=4096,
    )
    alone = [(tokens, 0.005 + costs.prompts_s(tokens)) for tokens in (1, 40, 80, 128)]
    found = fit(decode_steps(costs), alone, (128, costs.prompts_s(128)), 4096)
    for name in ("step_s", "row_s", "cached_token_s", "prefill_s", "prefill_token_s"):
        assert getattr(found.costs, name) == pytest.approx(getattr(costs, name))
    assert found.overhead_s == pytest.approx(0.005)
    assert found.error == pytest.approx(0, abs=1e-6)


def test_noise_makes_no_negative_costs_and_nonsense_is_refused() -> None:
    faster_with_more = [(1, 30, 0.020), (1, 300, 0.021), (4, 120, 0.019), (4, 1200, 0.018)]
    found = fit(faster_with_more, [(1, 0.01), (100, 0.02)], (100, 0.012), 4096)
    assert found.costs.row_s == 0.0
    assert 0.018 <= found.costs.step_s <= 0.021
    with pytest.raises(StateError, match="quiet machine"):
        fit([(1, 30, 0.02), (2, 60, 0.04)], [(1, 0.01), (100, 0.02)], (100, 0.0), 4096)
