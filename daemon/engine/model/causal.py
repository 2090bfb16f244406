"""One door to unmodified Hugging Face models; absorbs what differs between transformers' releases."""

# pyright: reportAttributeAccessIssue=false
# transformers' cache layers grow attributes as they are used.

from __future__ import annotations

import contextlib
import copy
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from batond.daemon.devices import numbered
from batond.daemon.engine.model.columns import put, use_column_layers
from batond.daemon.engine.model.positions import RowPositions, position_limit
from batond.daemon.engine.model.recipe import Recipe, make_mask
from batond.daemon.errors import ConfigError, UnsupportedModelError
from batond.daemon.weights import pretrained_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.daemon.engine.model.layout import RecordLayout
    from batond.offload.slice import KVSlice

#: What transformers' models raise when they are asked for what they can't do.
MODEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    AssertionError,
    KeyError,
    NotImplementedError,
)
DEFAULT_MAX_QUERY_TOKENS = 2048  # For models that name no longest context.
# From 5.24 on "cache" everywhere; before, recurrent families had a name of their own.
_CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")
_LENGTH_ATTRIBUTES = (
    "max_position_embeddings",
    "max_target_positions",
    "n_positions",
    "max_seq_len",
    "n_ctx",
    "seq_length",
)


class CausalModel:
    """A causal language model as the engine uses it.

    Attributes:
        model: The model, in evaluation mode, untouched otherwise.
        device: Where its weights are; a card by its number.
        dtype: Of its weights.
        vocab_size: Width of the logits.
        eos_token_ids: Ids that end a generation.
        max_context_tokens: Longest context the model was made for, or can be served exactly.
        limit_reason: Why it is shorter than the model's own, "" if it isn't.
        has_windows: Whether some layer attends to a sliding window only.
        window_tokens: The widest sliding window, 0 without one.
        takes_cache: Whether it continues from a cache.
        takes_logits_to_keep: Whether it can be told which columns' logits to compute.
        recipe: How a forward is asked of this model; chosen by probing.
    """

    def __init__(self, model: Any, device: str | torch.device) -> None:
        if not all(hasattr(model, name) for name in ("forward", "config", "to", "dtype")):
            raise UnsupportedModelError(f"{type(model).__name__} is no Hugging Face causal language model")
        self.device = numbered(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton and graphs use the current one.
        self.model = model.to(self.device).eval()
        self.config = model.config
        self.dtype: torch.dtype = model.dtype
        parameters = inspect.signature(model.forward).parameters
        self._cache_keyword = next((name for name in _CACHE_KEYWORDS if name in parameters), "")
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self.takes_cache = bool(self._cache_keyword)
        self._takes_mask = "attention_mask" in parameters
        self._takes_positions = "position_ids" in parameters or takes_any
        self.takes_logits_to_keep = "logits_to_keep" in parameters
        self._row_positions = RowPositions(model) if "position_ids" not in parameters else None
        self.recipe = Recipe()
        self._template: Cache | None = None
        text_config = self.config.get_text_config(decoder=True)
        self.vocab_size = int(text_config.vocab_size)
        self.eos_token_ids = _eos_token_ids(model)
        self.max_context_tokens = next(
            (int(n) for name in _LENGTH_ATTRIBUTES if isinstance(n := getattr(text_config, name, None), int)),
            DEFAULT_MAX_QUERY_TOKENS,
        )

        limit = position_limit(self.model)
        self.limit_reason = ""
        if limit is not None and limit.tokens < self.max_context_tokens:
            self.max_context_tokens, self.limit_reason = limit.tokens, limit.reason
        self.window_tokens = self._widest_window()
        self.has_windows = self.window_tokens > 0

    @property
    def name(self) -> str:
        """The model's own name, or its family."""
        return str(getattr(self.config, "_name_or_path", "") or self.config.model_type)

    @property
    def attention_name(self) -> str:
        """Name of the attention function that forwards run with."""
        return str(self.config._attn_implementation)  # noqa: SLF001 - there is no public getter

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

    def use_template(self, cache: Cache) -> None:
        """Take a cache that has seen a forward as the pattern of `blank_cache`."""
        self._template = copy.deepcopy(cache)

    def blank_cache(self, layout: RecordLayout, rows: int, columns: int) -> Cache:
        """A cache as if it had seen `columns` columns, with everything zero.

        Args:
            layout: Says which of its tensors to make.
            rows: Rows of the new cache.
            columns: Columns of the new cache.
        """
        if self._template is None:
            raise RuntimeError("the layout was not probed")
        cache = use_column_layers(copy.deepcopy(self._template))
        for slot in (*layout.token_slots, *layout.state_slots):
            put(cache, slot, slot.zeros(rows, columns, self.device))
        for layer in getattr(cache, "layers", ()):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                note_states(layer)
        return cache

    def transformers_cache(self, layout: RecordLayout, kv: KVSlice) -> Cache:
        """Transformers' own cache of one row, as if it had seen the slice's tokens."""
        cache = self._dynamic_cache()
        parts = {(slot.layer, slot.attribute): layout.token_part(slot, kv) for slot in layout.token_slots}
        for (number, attribute), part in parts.items():
            if attribute == "keys":
                keys, values = (one.transpose(0, 1)[None] for one in (part, parts[number, "values"]))
                cache.update(keys, values, number)
            elif attribute == "indexer_keys":
                cache.update_indexer(part[None], number)
        for slot in layout.state_slots:
            put(cache, slot, layout.state_part(slot, kv)[None].clone())
        for layer in cache.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                note_states(layer)
        return cache

    def _dynamic_cache(self) -> Cache:
        try:
            return DynamicCache(config=self.config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedModelError(f"transformers can't make a cache for this model: {error}") from error

    def _widest_window(self) -> int:
        try:
            layers = self._dynamic_cache().layers
        except UnsupportedModelError:
            return 0
        return max(
            (int(layer.sliding_window) for layer in layers if getattr(layer, "is_sliding", False)), default=0
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache,
        *,
        logits_to_keep: int | torch.Tensor | None = 1,
        recipe: Recipe | None = None,
    ) -> torch.Tensor:
        """Run the model over new tokens and return the logits of each row's newest column.

        Args:
            input_ids: int64, shape [rows, new columns].
            attention_mask: int64, shape [rows, cached + new columns]; 1 where a token is.
            position_ids: int64, shape [rows, new columns]; each row counts its own tokens from 0.
            cache: Extended by the new columns.
            logits_to_keep: 1 is the newest column, None every new one; or these new columns alone, int64 of
                shape [wanted]: over a large vocabulary logits cost as much as some layers. The last needs
                `takes_logits_to_keep`.
            recipe: Instead of the model's own.

        Returns:
            float32, shape [rows, vocabulary], [rows, new columns, vocabulary] or [rows, wanted, vocabulary].
        """
        output = self.run(
            input_ids,
            attention_mask,
            position_ids,
            cache,
            logits_to_keep=logits_to_keep,
            recipe=recipe,
        )
        logits: torch.Tensor = output.logits
        return (logits[:, -1] if isinstance(logits_to_keep, int) else logits).float()

    def run(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache | None,
        *,
        logits_to_keep: int | torch.Tensor | None = 1,
        recipe: Recipe | None = None,
    ) -> Any:
        """As `forward`, but returns the model's whole output; `cache_of` finds the cache in it."""
        arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": self.takes_cache}
        if self._takes_mask:
            form = (recipe or self.recipe).mask
            mask = make_mask(form, attention_mask, input_ids.shape[1], self.window_tokens, self.dtype)
            arguments["attention_mask"] = mask
        if cache is not None:
            arguments[self._cache_keyword] = cache
        if self._takes_positions:
            arguments["position_ids"] = position_ids
        if self.takes_logits_to_keep and logits_to_keep is not None:
            arguments["logits_to_keep"] = logits_to_keep
        own = self._row_positions.given(position_ids) if self._row_positions else contextlib.nullcontext()
        with torch.no_grad(), own:
            return self.model(**arguments)

    def cache_of(self, output: Any) -> Cache:
        """The cache in a model's output.

        Raises:
            UnsupportedModelError: There is none.
        """
        found = (getattr(output, name, None) for name in _CACHE_KEYWORDS)
        cache: Cache | None = next((one for one in found if one is not None), None)
        if cache is None:
            raise UnsupportedModelError("the model returns no cache")
        return cache


def first_line(error: BaseException) -> str:
    """An exception's message without what follows its first line: CUDA's and Triton's advice is long."""
    return str(error).strip().partition("\n")[0]


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
    source = pretrained_source(place)
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


def note_states(layer: Any) -> None:
    """Mark a recurrent layer's states as present and as this cache's own."""
    for index, state in layer.conv_states.items():
        if state is not None:
            layer.conv_kernel_size[index] = state.shape[-1]
            layer.device, layer.dtype = state.device, state.dtype
    for index, state in layer.recurrent_states.items():
        if state is not None:
            layer.device, layer.dtype = state.device, state.dtype
        layer.has_previous_state[index] = True
        layer.is_conv_states_initialized[index] = layer.conv_states[index] is not None
        layer.is_recurrent_states_initialized[index] = state is not None
