"""Bytes and operations against models that were really made, floors against arithmetic by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from batond.bench.gpu.ceilings import Ceilings
from batond.bench.gpu.sizes import (
    GIB,
    SHAPES,
    SPARE_BYTES,
    Cell,
    Sizes,
    cells,
    choose_cells,
    most_rows,
    require_room,
    sizes_of,
)
from batond.bench.gpu.timing import Spread
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.proof.trial import probe_layout
from batond.daemon.errors import ConfigError

BF16 = torch.bfloat16


def small_config(**changes: int | bool) -> LlamaConfig:
    plain: dict[str, int | bool] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    }
    return LlamaConfig(**(plain | changes))


def made_sizes(**changes: int) -> Sizes:
    plain = {
        "weight_bytes": 1000,
        "step_weight_bytes": 800,
        "kv_token_bytes": 10,
        "logit_bytes": 6,
        "token_ops": 7,
        "pair_ops": 3,
        "prompt_ops": 11,
        "context_tokens": 4096,
        "vocab_size": 100,
    }
    return Sizes(**(plain | changes))


def rate(value: float) -> Spread:
    return Spread.of([value])


def test_published_sizes_of_the_shapes() -> None:
    two, three = sizes_of(SHAPES["llama-2-7b"], BF16), sizes_of(SHAPES["llama-3-8b"], BF16)
    assert two.weight_bytes == 2 * 6_738_415_616
    assert three.weight_bytes == 2 * 8_030_261_248
    assert two.kv_token_bytes == 512 * 1024
    assert three.kv_token_bytes == 128 * 1024, "8 of 32 heads have keys"
    assert two.weight_bytes - two.step_weight_bytes == 2 * 32_000 * 4096


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_bytes_are_those_of_a_model_that_is_made(dtype: torch.dtype, kv_heads: int) -> None:
    config = small_config(num_key_value_heads=kv_heads)
    sizes = sizes_of(config, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert sizes.weight_bytes == sum(weight.nbytes for weight in model.parameters())
    assert sizes.kv_token_bytes == probe_layout(CausalModel(model, "cpu")).record_bytes


def test_a_head_dim_of_its_own_counts() -> None:
    sizes = sizes_of(small_config(head_dim=16, num_key_value_heads=2), BF16)
    assert sizes.kv_token_bytes == 3 * 2 * 2 * 16 * 2
    assert sizes.pair_ops == 3 * 4 * 4 * 16


def test_tied_weights_count_once_and_are_read_whole() -> None:
    apart = sizes_of(small_config(tie_word_embeddings=False), BF16)
    tied = sizes_of(small_config(tie_word_embeddings=True), BF16)
    table_bytes = 100 * 32 * 2
    assert apart.weight_bytes - tied.weight_bytes == table_bytes
    assert tied.step_weight_bytes == tied.weight_bytes
    assert apart.step_weight_bytes == tied.step_weight_bytes
    assert (apart.token_ops, apart.prompt_ops) == (tied.token_ops, tied.prompt_ops)


def test_operations_by_hand() -> None:
    sizes = sizes_of(small_config(num_key_value_heads=2), BF16)
    per_layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # q, k and v, o, MLP; no norms
    assert sizes.token_ops == 2 * 3 * per_layer
    assert sizes.prompt_ops == 2 * 100 * 32
    assert sizes.pair_ops == 3 * 4 * 32
    assert sizes.prefill_ops(5) == 5 * sizes.token_ops + 15 * sizes.pair_ops + sizes.prompt_ops


def test_floors() -> None:
    ceilings = Ceilings(
        copy_gb_s=rate(2.0),
        to_host_gb_s=rate(1.0),
        to_device_gb_s=rate(1.0),
        matmul_tflop_s=rate(4.0),
        copy_bytes=1,
        host_copy_bytes=1,
        matmul_side=1,
    )
    sizes = made_sizes(step_weight_bytes=4 * 10**9, kv_token_bytes=10**6, token_ops=10**12)
    assert ceilings.step_floor_s(sizes, 0) == pytest.approx(2.0)
    assert ceilings.step_floor_s(sizes, 2000.0) == pytest.approx(3.0)
    assert ceilings.prefill_floor_s(sizes, 4) == pytest.approx(2.0), "few tokens: the weights are read"
    assert ceilings.prefill_floor_s(sizes, 400) == pytest.approx(100.0)


def test_cells_are_chosen_by_memory_and_context() -> None:
    sizes = made_sizes(kv_token_bytes=1 << 20, logit_bytes=0, context_tokens=1100)
    wanted = cells([1, 2, 4], [512, 1024, 2048])
    assert [str(cell) for cell in wanted[:4]] == ["1 x 512", "2 x 512", "4 x 512", "1 x 1024"]
    fitting, left_out = choose_cells(
        wanted, sizes, free_bytes=SPARE_BYTES + 1700 * (1 << 20), spare_columns=16
    )
    # A ring of 2 x 528 columns and a slice of 512; one of 1 x 1040 would need 2064 with its slice.
    assert [str(cell) for cell in fitting] == ["1 x 512", "2 x 512"]
    reasons = {one.what: one.why for one in left_out}
    assert reasons["4 x 512"] == "needs 3.6 GiB, 2.7 GiB are free"
    assert reasons["1 x 2048"] == "the model has 1100 positions"
    assert len(fitting) + len(left_out) == len(wanted)


def test_a_cell_needs_what_it_says_to_the_byte() -> None:
    sizes = made_sizes(kv_token_bytes=1000, logit_bytes=7)
    cell = Cell(rows=3, context=100)
    needed = 3 * 110 * 1000 + 100 * 1000 + 3 * 7 + SPARE_BYTES
    assert cell.needed_bytes(sizes, 10) == needed
    assert choose_cells([cell], sizes, free_bytes=needed, spare_columns=10)[0] == [cell]
    assert choose_cells([cell], sizes, free_bytes=needed - 1, spare_columns=10)[0] == []


def test_rows_of_the_engine() -> None:
    sizes = made_sizes(kv_token_bytes=100)
    assert most_rows([1, 8, 64], sizes, columns=10, room_bytes=8000, limit=32) == 8
    assert most_rows([1, 8, 64], sizes, columns=10, room_bytes=7999, limit=32) == 1
    assert most_rows([8], sizes, columns=10, room_bytes=7999, limit=32) == 0
    assert most_rows([64], sizes, columns=10, room_bytes=10**9, limit=32) == 0


def test_too_little_memory_is_said_with_its_bytes() -> None:
    sizes = made_sizes(weight_bytes=15 * GIB)
    require_room("big", sizes, free_bytes=16 * GIB, device="cuda:0")
    with pytest.raises(
        ConfigError, match=r"big needs 16.0 GiB for weights and work, cuda:0 has 12.0 GiB free"
    ):
        require_room("big", sizes, free_bytes=12 * GIB, device="cuda:0")
