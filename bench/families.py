"""A tiny random model of every causal-LM family of transformers.

Every default configuration is shrunk by the names of its fields; only what that can't reach is named by
family. All weights are drawn anew with a spread that makes greedy output lively: a default initialisation
answers every prompt with one repeated token, which would hide most mistakes.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from batond.bench.family_sizes import FAMILY_SIZES, GAINS, NO_MODEL, SIZES, SIZES_IF_UNSET

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 128
_LAYER_COUNT_FIELDS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_blocks",
)
_MIN_LAYERS, _MAX_LAYERS = 2, 4
_GAIN = 1.6
_EMBEDDINGS = ("embed", "wte", "wpe", "lm_head", "shared.weight")


def family_names() -> list[str]:
    """Every `model_type` of the causal-LM mapping that has a model of its own."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in NO_MODEL)


def make_family(name: str, *, seed: int = 11, **overrides: Any) -> Any:
    """A random model of a family, float32, in evaluation mode.

    Args:
        name: Its `model_type`.
        seed: Of the weights.
        overrides: Fields of the (text) configuration set to other values.
    """
    with _quiet():
        config = make_config(name, **overrides)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _enliven(model, seed, GAINS.get(name, _GAIN))
    generation = model.generation_config
    for field in ("forced_eos_token_id", "forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        if getattr(generation, field, None) is not None:
            setattr(generation, field, None)
    generation.no_repeat_ngram_size = 0
    return model


def make_config(name: str, **overrides: Any) -> Any:
    """The family's default configuration, shrunk."""
    fields = _shrink(CONFIG_MAPPING[name](), {**FAMILY_SIZES.get(name, {}), **overrides})
    return CONFIG_MAPPING[name](**fields)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Shrunk configurations draw warnings about ids beyond the vocabulary and the like."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _shrink(default: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a small configuration of the same class."""
    known = default.to_dict()
    fields: dict[str, Any] = {}
    for key, value in known.items():
        sub = getattr(default, key) if key in default.sub_configs else None
        if isinstance(sub, transformers.PretrainedConfig):
            fields[key] = {"model_type": sub.model_type, **_shrink(sub, extra)}
            continue
        if key in SIZES and (key in SIZES_IF_UNSET if value is None else type(value) is int):
            fields[key] = SIZES[key]
        elif key == "is_decoder":
            fields[key] = True
        elif key == "tie_word_embeddings":
            fields[key] = False
        elif key.endswith("_token_id") and isinstance(value, int) and not isinstance(value, bool):
            fields[key] = min(value, VOCABULARY - 1 - len(key) % 7)
    _shrink_heads(known, fields)
    known = {**known, **{key: value for key, value in extra.items() if key in known}}
    _shrink_layers(known, fields)
    for key, value in extra.items():
        if key in known or key in fields:
            fields[key] = copy.deepcopy(value)
    return fields


def _shrink_heads(known: dict[str, Any], fields: dict[str, Any]) -> None:
    """Grouped heads stay grouped, equal ones equal."""
    for heads, kv_heads in (("num_attention_heads", "num_key_value_heads"), ("n_head", "num_kv_heads")):
        if isinstance(known.get(heads), int) and isinstance(known.get(kv_heads), int):
            fields[kv_heads] = 4 if known[heads] == known[kv_heads] else min(2, known[kv_heads])


def _shrink_layers(known: dict[str, Any], fields: dict[str, Any]) -> None:
    """Few layers, but at least one of each kind."""
    counts = [known[key] for key in _LAYER_COUNT_FIELDS if isinstance(known.get(key), int)]
    if not counts:
        return
    count = counts[0]
    lists = {
        key: value
        for key, value in known.items()
        if isinstance(value, (list, tuple)) and len(value) == count and count > 1
    }
    kept = list(range(min(count, _MIN_LAYERS)))
    if lists:
        rows = list(zip(*lists.values(), strict=True))
        kept = [place for place, row in enumerate(rows) if row not in rows[:place]][:_MAX_LAYERS]
        kept += [place for place in range(count) if place not in kept][: max(0, _MIN_LAYERS - len(kept))]
        kept.sort()
        for key, value in lists.items():
            fields[key] = [value[place] for place in kept]
            if isinstance(value[0], int) and "size" in key:
                fields[key] = [48] * len(kept)
    for key in _LAYER_COUNT_FIELDS:
        if isinstance(known.get(key), int):
            fields[key] = len(kept)
    if isinstance(known.get("per_layer_config"), dict):
        own = {int(place): values for place, values in known["per_layer_config"].items()}
        fields["per_layer_config"] = {
            str(new): {
                key: SIZES.get(key, value) * (2 if key == "head_dim" else 1)
                for key, value in own[old].items()
            }
            for new, old in enumerate(kept)
            if old in own
        }


def _enliven(model: Any, seed: int, gain: float) -> None:
    """Draw all weights so that every layer changes its input by as much as it carries."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if "A_log" in key or "dt_" in key or key.endswith(".D"):
                continue
            fan = parameter.shape[-1] if parameter.ndim > 1 else 0
            if parameter.ndim > 1 and any(part in key for part in _EMBEDDINGS):
                parameter.copy_(
                    torch.randn(parameter.shape, generator=noise)
                    * (1.0 if "pos" in key or "wpe" in key else 0.3)
                )
            elif parameter.ndim > 1:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=noise) * (gain / math.sqrt(max(fan, 1)))
                )
            elif key.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.1)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
