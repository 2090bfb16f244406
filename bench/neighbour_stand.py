"""What stands beside each other when memory is shared: an engine that follows it, and a neighbour."""

from __future__ import annotations

import copy
import random
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from batond.bench.gpu.machine import require_device
from batond.bench.models import tiny_model
from batond.bench.neighbours import CardNeighbour, ScriptedNeighbour
from batond.bench.workloads import Request
from batond.daemon.engine import LocalEngine
from batond.daemon.engine.governing import Governing, make_governing
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.errors import ConfigError
from batond.daemon.memory.governor import Governor
from batond.daemon.memory.host import read_limits
from batond.daemon.wire.settings import MemorySettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batond.bench.neighbours import Neighbour

#: Part of the memory that the queries' KV takes when nobody is beside them.
KV_SHARE: Final = 0.55
_LAYERS, _HEADS, _HEAD_DIM = 8, 512, 128
#: Few weights and much KV, 2 MiB a token: 200 short queries fill a card, and compute hardly anything. Few
#: layers, because whatever is not captured costs the host by the layer.
CARD_CONFIG: Final = LlamaConfig(
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=_LAYERS,
    num_attention_heads=_HEADS,
    num_key_value_heads=_HEADS,
    head_dim=_HEAD_DIM,
    max_position_embeddings=4096,
)


@dataclass(frozen=True, slots=True)
class Stand:
    """What a run needs.

    Attributes:
        engine: With nothing in it, and a governor.
        neighbour: Beside it.
        requests: The queries.
        total_bytes: Of the memory.
    """

    engine: LocalEngine
    neighbour: Neighbour
    requests: Sequence[Request]
    total_bytes: int

    def close(self) -> None:
        """Give all back."""
        self.engine.close()
        self.neighbour.close()


def make_stand(device_name: str, queries: int, seed: int) -> Stand:
    """What a run needs, on a card or on the CPU.

    Args:
        device_name: As torch has it.
        queries: Number of queries.
        seed: Of lengths, tokens and weights.

    Raises:
        ConfigError: There is no such device, or its memory can't be followed.
    """
    device = require_device(device_name)
    return on_cpu(queries, seed) if device.type == "cpu" else on_card(device, queries, seed)


def on_card(device: torch.device, queries: int, seed: int) -> Stand:
    """An engine that fills half of a card, and a process beside it.

    Raises:
        ConfigError: The card's memory can't be read by NVML.
    """
    governor = make_governing(MemorySettings(governor="on"), str(device), arena="elastic")
    neighbour = CardNeighbour(device)  # Not before: it would come while the context is measured.
    with ExitStack() as undo:
        undo.callback(neighbour.close)
        torch.manual_seed(seed)
        with device:
            model = AutoModelForCausalLM.from_config(copy.deepcopy(CARD_CONFIG), dtype=torch.bfloat16)
        requests = make_requests(CARD_CONFIG.vocab_size, queries, (128, 768), (128, 384), seed)
        lengths = [len(request.prompt_token_ids) + request.output_tokens for request in requests]
        token_bytes = 2 * _LAYERS * _HEADS * _HEAD_DIM * torch.bfloat16.itemsize
        mean_tokens = (
            sum(lengths) / queries - sum(request.output_tokens for request in requests) / queries / 2
        )
        total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        pool_bytes = min(read_limits().tightest(pin=False, fraction=0.4)[0], int(0.3 * total_bytes))
        engine = LocalEngine(
            CausalModel(model, device),
            rows=int(KV_SHARE * total_bytes / (mean_tokens * token_bytes)),
            batch="ring",
            max_query_tokens=max(lengths),
            host_pool_bytes=pool_bytes,
            deterministic=True,  # Bits depend on no mate: tokens can be compared in half precision.
            compiled=False,
            arena="elastic",
            session_bytes=0,
            governor=governor,
        )
        undo.callback(engine.close)
        if not engine.residency.batch.memory.elastic:
            raise ConfigError(f"the batch does not follow memory here: {engine.batch_reason}")
        neighbour.wait_ready()
        undo.pop_all()
    return Stand(engine, neighbour, requests, total_bytes)


def on_cpu(queries: int, seed: int) -> Stand:
    """A small engine in float32, and a script beside it."""
    neighbour = ScriptedNeighbour(total_tokens=1000, name="a scripted memory")
    governor = Governing(
        neighbour, Governor(), threaded=False, own_use=neighbour.own_use, clock=neighbour.clock
    )
    model = tiny_model()
    requests = make_requests(model.config.vocab_size, queries, (8, 48), (16, 48), seed)
    mean_tokens = 28 + 16
    engine = LocalEngine(
        model,
        rows=int(KV_SHARE * neighbour.total_tokens / mean_tokens),
        batch="ring",
        max_query_tokens=96,
        arena="elastic",
        session_bytes=0,
        governor=governor,
    )
    record_bytes = engine.residency.batch.layout.record_bytes
    return Stand(engine, neighbour, requests, neighbour.total_tokens * record_bytes)


def make_requests(
    vocab_size: int, queries: int, prompt: tuple[int, int], output: tuple[int, int], seed: int
) -> list[Request]:
    """Queries of random lengths, of which any few in a row are about as long as all: rates can be compared.

    Args:
        vocab_size: Token ids are drawn below it.
        queries: Number of queries.
        prompt: Fewest and most tokens.
        output: Likewise.
        seed: Of lengths and token ids.
    """
    rng = random.Random(seed)  # noqa: S311 - a repeatable workload, not a secret
    lengths = zip(_spread(rng, queries, *prompt), _spread(rng, queries, *output), strict=True)
    return [
        Request(tuple(rng.randrange(3, vocab_size) for _ in range(tokens)), output_tokens)
        for tokens, output_tokens in lengths
    ]


def _spread(rng: random.Random, count: int, low: int, high: int) -> Iterator[int]:
    """Numbers from low to high, of which each eight in a row have one in each eighth of the range."""
    eighths: list[int] = []
    for _ in range(count):
        eighths = eighths or rng.sample(range(8), 8)
        yield low + int((eighths.pop() + rng.random()) / 8 * (high - low + 1))
