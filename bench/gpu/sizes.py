"""What a model must read and compute, from its configuration: bytes, operations, floors, and what fits.

    decode step    weights that every token needs + each row's own KV,           at the copy bandwidth
    prompt         2 operations a weight and token + attention of each pair,     at the rate of a large matmul
                   or, for few tokens, all weights once,                         at the copy bandwidth

Written for dense models: of a mixture of experts a token reads and computes only a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PretrainedConfig

GIB: Final = 1 << 30
#: What a step needs beside weights, ring and logits: activations, workspaces of libraries, captured graphs.
SPARE_BYTES: Final = 1 * GIB

#: The shapes, as published with the models.
SHAPES: Final[dict[str, LlamaConfig]] = {
    "llama-2-7b": LlamaConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
    ),
    "llama-3-8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    ),
    "tiny": LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes and operations of a model in one dtype.

    Attributes:
        weight_bytes: All weights; tied ones count once.
        step_weight_bytes: Those that a forward reads whatever it computes: all but the table of input
            embeddings, of which it reads a row a token; tied to the output, the table is read as that.
        kv_token_bytes: Keys and values of a token, all layers.
        logit_bytes: Logits of a row: in the model's dtype, and in float32.
        token_ops: Operations a token of a prompt in the layers' matrices.
        pair_ops: Operations of attention for a token and one that it sees.
        prompt_ops: Operations a prompt in the output matrix: the newest token's logits.
        context_tokens: Positions the model was made for.
        vocab_size: Token ids.
    """

    weight_bytes: int
    step_weight_bytes: int
    kv_token_bytes: int
    logit_bytes: int
    token_ops: int
    pair_ops: int
    prompt_ops: int
    context_tokens: int
    vocab_size: int

    def step_bytes(self, cached_tokens: float) -> float:
        """Bytes that a decode step must read.

        Args:
            cached_tokens: Of all rows together.
        """
        return self.step_weight_bytes + cached_tokens * self.kv_token_bytes

    def prefill_ops(self, tokens: int) -> int:
        """Operations of a prompt: every matrix, causal attention, the newest token's logits."""
        pairs = tokens * (tokens + 1) // 2
        return tokens * self.token_ops + pairs * self.pair_ops + self.prompt_ops


def sizes_of(config: PretrainedConfig, dtype: torch.dtype) -> Sizes:
    """Count a model's bytes and operations without making its weights.

    Args:
        config: Of a dense causal language model.
        dtype: Of weights and KV.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    text = config.get_text_config(decoder=True)
    table, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = list(model.parameters())  # A tied weight is listed once.
    weight_bytes = sum(weight.numel() for weight in weights) * dtype.itemsize
    tied = table is output
    matrices = [w for w in weights if w.ndim > 1 and w is not table and w is not output]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    layers = text.num_hidden_layers
    return Sizes(
        weight_bytes=weight_bytes,
        step_weight_bytes=weight_bytes - (0 if tied else table.numel() * dtype.itemsize),
        kv_token_bytes=layers * 2 * kv_heads * head_dim * dtype.itemsize,
        logit_bytes=text.vocab_size * (dtype.itemsize + torch.float32.itemsize),
        token_ops=2 * sum(matrix.numel() for matrix in matrices),
        pair_ops=layers * 4 * text.num_attention_heads * head_dim,
        prompt_ops=2 * output.numel(),
        context_tokens=text.max_position_embeddings,
        vocab_size=text.vocab_size,
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of the decode step: so many rows, each of so many tokens."""

    rows: int
    context: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.context}"

    def ring_bytes(self, sizes: Sizes, spare_columns: int) -> int:
        """Bytes of the cell's ring."""
        return self.rows * (self.context + spare_columns) * sizes.kv_token_bytes

    def needed_bytes(self, sizes: Sizes, spare_columns: int) -> int:
        """Bytes beside the weights: ring, a slice to fill it from, logits, and what a step takes."""
        kv = self.ring_bytes(sizes, spare_columns) + self.context * sizes.kv_token_bytes
        return kv + self.rows * sizes.logit_bytes + SPARE_BYTES


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What can't be measured here, and why."""

    what: str
    why: str


def cells(batches: Iterable[int], contexts: Iterable[int]) -> list[Cell]:
    """Every combination, by context."""
    batches = list(batches)
    return [Cell(rows, context) for context in contexts for rows in batches]


def choose_cells(
    wanted: Iterable[Cell], sizes: Sizes, *, free_bytes: int, spare_columns: int
) -> tuple[list[Cell], list[LeftOut]]:
    """Divide cells into those that fit and those that don't.

    Args:
        wanted: In the order in which they are measured.
        sizes: Of the model, whose weights are on the device already.
        free_bytes: Free on the device.
        spare_columns: Columns of the ring beyond the context.
    """
    fitting, left_out = [], []
    for cell in wanted:
        needed = cell.needed_bytes(sizes, spare_columns)
        if cell.context + spare_columns > sizes.context_tokens:
            left_out.append(LeftOut(str(cell), f"the model has {sizes.context_tokens} positions"))
        elif needed > free_bytes:
            left_out.append(LeftOut(str(cell), f"needs {gib(needed)}, {gib(free_bytes)} are free"))
        else:
            fitting.append(cell)
    return fitting, left_out


def most_rows(batches: Sequence[int], sizes: Sizes, *, columns: int, room_bytes: float, limit: int) -> int:
    """The most of these rows, up to a limit, whose ring fits into the room; 0 if none does."""
    row_bytes = columns * sizes.kv_token_bytes
    return max((rows for rows in batches if rows <= limit and rows * row_bytes <= room_bytes), default=0)


def require_room(shape: str, sizes: Sizes, *, free_bytes: int, device: str) -> None:
    """Refuse a model whose weights leave no room to work.

    Raises:
        ConfigError: With the bytes needed and free.
    """
    needed = sizes.weight_bytes + SPARE_BYTES
    if needed > free_bytes:
        raise ConfigError(
            f"{shape} needs {gib(needed)} for weights and work, {device} has {gib(free_bytes)} free: free the"
            " device, or choose another --shape",
            shape=shape,
            needed=needed,
            free=free_bytes,
        )


def gib(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / GIB:.1f} GiB"
