"""Models to measure with: a tiny random one, and the small real one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batond.daemon.config_load import resolve_model_path
from batond.daemon.engine.model.causal import CausalModel, load_model

SMALL_MODEL = "smollm2"


def tiny_model() -> Any:
    """A random Llama of 1.3 million weights: scheduling without waiting for arithmetic."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval()


def load(name: str) -> CausalModel:
    """Load a model by its name in the benchmarks, "tiny" or "small", or by its path."""
    if name == "tiny":
        return CausalModel(tiny_model(), "cpu")
    return load_model(resolve_model_path(SMALL_MODEL) if name == "small" else name)[0]
