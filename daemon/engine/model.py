"""One door to unmodified Hugging Face models; absorbs what differs between transformers' releases."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache

from batond.daemon.engine.columns import use_column_layers
from batond.daemon.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_MAX_QUERY_TOKENS = 2048  # For models that name no longest context.
_LENGTH_ATTRIBUTES = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")


class CausalModel:
    """A causal language model as the engine uses it.

    Attributes:
        model: The model, in evaluation mode, untouched otherwise.
        device: Where its weights are.
        dtype: Of its weights.
        vocab_size: Width of the logits.
        eos_token_ids: Ids that end a generation.
        max_context_tokens: Longest context the model was made for.
        has_windows: Whether some layer attends to a sliding window only.
    """

    def __init__(self, model: Any, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device).eval()
        self.config = model.config
        self.dtype: torch.dtype = model.dtype
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the keyword.
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if self._cache_keyword not in parameters and not takes_any:
            raise UnsupportedModelError(f"{type(model).__name__} takes no cache")
        self._takes_positions = "position_ids" in parameters or takes_any
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        text_config = self.config.get_text_config(decoder=True)
        self.vocab_size = int(text_config.vocab_size)
        self.eos_token_ids = _eos_token_ids(model)
        self.max_context_tokens = next(
            (int(n) for name in _LENGTH_ATTRIBUTES if isinstance(n := getattr(text_config, name, None), int)),
            DEFAULT_MAX_QUERY_TOKENS,
        )

        self.has_windows = any(getattr(layer, "is_sliding", False) for layer in self._dynamic_cache().layers)

    @property
    def name(self) -> str:
        """The model's own name, or its family."""
        return str(getattr(self.config, "_name_or_path", "") or self.config.model_type)

    @contextlib.contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Run forwards inside with another registered attention function."""
        usual = self.config._attn_implementation  # noqa: SLF001 - the public setter walks all modules
        self.config._attn_implementation = name  # noqa: SLF001
        try:
            yield
        finally:
            self.config._attn_implementation = usual  # noqa: SLF001

    def new_cache(self) -> Cache:
        """An empty cache whose attention layers keep every column."""
        return use_column_layers(self._dynamic_cache())

    def _dynamic_cache(self) -> Cache:
        try:
            return DynamicCache(config=self.config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedModelError(f"transformers can't make a cache for this model: {error}") from error

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache,
        *,
        all_positions: bool = False,
    ) -> torch.Tensor:
        """Run the model over new tokens and return the logits of each row's newest column.

        Args:
            input_ids: int64, shape [rows, new columns].
            attention_mask: int64, shape [rows, cached + new columns]; 1 where a token is.
            position_ids: int64, shape [rows, new columns]; each row counts its own tokens from 0.
            cache: Extended by the new columns.
            all_positions: Return every new column's logits.

        Returns:
            float32, shape [rows, vocabulary], or [rows, new columns, vocabulary].
        """
        arguments: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            self._cache_keyword: cache,
            "use_cache": True,
        }
        if self._takes_positions:
            arguments["position_ids"] = position_ids
        if self._takes_logits_to_keep and not all_positions:
            arguments["logits_to_keep"] = 1
        with torch.no_grad():
            logits: torch.Tensor = self.model(**arguments).logits
        return (logits if all_positions else logits[:, -1]).float()


def load_model(
    path: str | Path, *, dtype: str = "auto", device: str = "cpu", threads: int | None = None
) -> tuple[CausalModel, Any]:
    """Load a model and its tokenizer from a local folder or a GGUF file.

    Args:
        path: Folder with config and weights, or one `.gguf` file.
        dtype: A torch dtype's name, or "auto" (the weights' own on a GPU, float32 on a CPU).
        device: "cpu", "cuda" or "cuda:N".
        threads: CPU threads for torch; None keeps torch's choice.

    Raises:
        ConfigError: Nothing loadable is there.
    """
    place = Path(path)
    if not place.exists():
        raise ConfigError(f"no model at {place}: give a local folder or a .gguf file", path=place)
    if threads:
        torch.set_num_threads(threads)
    wanted: Any = (
        (torch.float32 if device == "cpu" else "auto") if dtype == "auto" else getattr(torch, dtype, None)
    )
    if wanted is None:
        raise ConfigError(f"unknown dtype {dtype!r}", dtype=dtype)
    source: dict[str, Any] = {"pretrained_model_name_or_path": place, "local_files_only": True}
    if place.is_file():
        source = {"pretrained_model_name_or_path": place.parent, "gguf_file": place.name}
    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=wanted)
            tokenizer = AutoTokenizer.from_pretrained(**source)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"can't load the model at {place}: {error}", path=place) from error
    return CausalModel(model, device), tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars out of the daemon's log."""
    from transformers.utils import logging  # noqa: PLC0415 - heavy, and only needed here

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _eos_token_ids(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(int(i) for i in found) if isinstance(found, (list, tuple)) else frozenset({int(found)})
