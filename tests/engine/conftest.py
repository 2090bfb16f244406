"""Tiny random models, a byte tokenizer, and the undisturbed run everything is compared with."""

from __future__ import annotations

import ctypes
import functools
import random
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from batond.bench import families
from batond.bench.draws import LONGEST_QUERY_TOKENS, Draws
from batond.bench.draws import byte_tokenizer as bench_tokenizer
from batond.bench.solo import SoloRuns
from batond.daemon.engine import LocalEngine, local
from batond.daemon.engine.batch import card_steps, card_window, compiled, prompt_steps, prompt_window
from batond.daemon.engine.batch.graphs import CaptureLimits, StepGraphs, StepOutput, capture_steps
from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.proof import rings
from batond.daemon.engine.proof.trial import probe_layout
from batond.daemon.scheduler.planner import PlannerLimits
from batond.policies import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batond.daemon.engine.batch.ring_rule import Fresh, Ring, Rule
    from batond.daemon.engine.proof.serving import Serving
    from batond.offload.slice import KVSlice

VOCABULARY = 160


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _llama() -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def _mistral() -> Any:
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=8,
        eos_token_id=2,
    )
    return MistralForCausalLM(config)


def _gpt2() -> Any:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=2, bos_token_id=1
    )
    return GPT2LMHeadModel(config)


def _falcon() -> Any:
    config = FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        new_decoder_architecture=False,
        eos_token_id=2,
        max_position_embeddings=512,
    )
    return FalconForCausalLM(config)


def _gemma2() -> Any:
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=8,
        eos_token_id=2,
    )
    model = Gemma2ForCausalLM(config)
    model.set_attn_implementation("eager")  # Before 5.24, transformers' sdpa ignores the soft cap.
    return model


def _gpt_oss() -> Any:
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=2,
        pad_token_id=2,
    )
    return GptOssForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "gpt2": _gpt2,
    "falcon": _falcon,
    "gemma2": _gemma2,
    "gpt_oss": _gpt_oss,
}


def make_model(family: str) -> Any:
    """A random model in fp32 whose greedy output is not a single repeated token."""
    torch.manual_seed(11)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
    return model


@pytest.fixture(scope="session")
def make_family() -> Callable[[str], Any]:
    return functools.cache(make_model)


@pytest.fixture(scope="session")
def llama() -> Any:
    return make_model("llama")


@pytest.fixture(scope="session")
def mistral() -> Any:
    """Every layer attends to a window of 8 tokens."""
    return make_model("mistral")


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def any_model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture(scope="session")
def solo() -> Callable[..., list[int]]:
    """Greedy tokens of transformers' own generate, alone; those of a model and a prompt are computed once."""

    @functools.cache
    def run_once(model: Any, prompt: tuple[int, ...], max_tokens: int, *, ignore_eos: bool) -> list[int]:
        ids = torch.tensor([prompt])
        eos = {"eos_token_id": None} if ignore_eos else {}
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **eos,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def run(model: Any, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
        return list(run_once(model, tuple(prompt), max_tokens, ignore_eos=ignore_eos))

    return run


class Bench:
    """One model, its layout, and batches and slices of it."""

    def __init__(self, model: Any) -> None:
        self.model = CausalModel(model, "cpu")
        self.layout = probe_layout(self.model)

    def batch(self, rows: int) -> PaddedBatch:
        return PaddedBatch(self.model, rows, self.layout)

    def ring(self, rows: int, capacity: int) -> RingBatch:
        return RingBatch(self.model, rows, self.layout, capacity)

    def prefilled(self, tokens: list[int]) -> KVSlice:
        single = self.batch(1)
        single.step({0: tokens})
        return single.extract(0)

    def alone(self, tokens: list[int]) -> torch.Tensor:
        """Logits after the tokens, computed at once, float32 of shape [vocabulary]."""
        return self.batch(1).step({0: tokens})[0]


@pytest.fixture(scope="session")
def make_bench() -> Callable[[Any], Bench]:
    return Bench


@pytest.fixture(autouse=True)
def books(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Engines and batches that the test makes; the books of each are checked when it is over."""
    made: list[Any] = []
    for kind in (LocalEngine, PaddedBatch, RingBatch):
        monkeypatch.setattr(kind, "__init__", _noting(kind.__init__, made))
    yield made
    for one in made:
        one.check_integrity()


def _noting(init: Callable[..., None], made: list[Any]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    return wrapped


@pytest.fixture(scope="session")
def findings() -> dict[Any, Any]:
    """What the probes at load found out, by model and question."""
    return {}


@pytest.fixture(autouse=True)
def _ask_once(monkeypatch: pytest.MonkeyPatch, findings: dict[Any, Any]) -> None:
    """Probing a model takes longer than most tests: what an engine found out holds for the next one."""
    choose = local.choose_batch

    def choose_once(kind: str, model: CausalModel, rows: int, **options: Any) -> Serving:
        key = (model.model, str(model.device), kind, rows, *options.values())
        if key not in findings:
            serving = choose(kind, model, rows, **options)
            if serving.batch.kind == "uncached":
                return serving
            findings[key] = serving
        serving = findings[key]
        return replace(serving, batch=_empty_again(serving.batch))

    monkeypatch.setattr(local, "choose_batch", choose_once)


_entry_points = functools.cache(entry_points)


@pytest.fixture(autouse=True)
def _list_policies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine looks for its policy in all installed packages."""
    monkeypatch.setattr(registry, "entry_points", _entry_points)


def _empty_again(batch: Any) -> Any:
    if isinstance(batch, RingBatch):
        return batch.empty_again()
    if isinstance(batch, PaddedBatch):
        return PaddedBatch(batch._model, batch.rows, batch.layout)
    raise TypeError(f"{type(batch).__name__} is not known here")


@pytest.fixture
def make_engine() -> Callable[..., LocalEngine]:
    """Engines as tests want them: host memory that was given back is poisoned."""

    def make(model: Any, tokenizer: Any = None, **options: Any) -> LocalEngine:
        return LocalEngine(model, tokenizer, **{"poison": True, "host_pool_bytes": 1 << 24, **options})

    return make


@pytest.fixture(params=["padded", "ring"])
def batch_kind(request: pytest.FixtureRequest) -> str:
    """Both batches that serve every model of these tests."""
    return str(request.param)


@dataclass
class Stand:
    """An idle engine with a tokenizer, and what requests give alone on another one of one row."""

    model: Any
    engine: LocalEngine
    solo: SoloRuns
    draws: Draws


@pytest.fixture(scope="session")
def make_stand() -> Callable[[str, str], Stand]:
    """The stand of a family and a kind of batch; a new one if a test that failed has left queries behind."""

    def new_engine(model: Any, batch: str, **options: Any) -> LocalEngine:
        return LocalEngine(
            model,
            bench_tokenizer(),
            batch=batch,
            max_query_tokens=LONGEST_QUERY_TOKENS,  # A small ring wraps often.
            host_pool_bytes=1 << 22,
            limits=PlannerLimits(quantum_tokens=1, max_parks=1000),
            poison=True,
            **options,
        )

    made: dict[tuple[str, str], Stand] = {}

    def make(family: str, batch: str) -> Stand:
        if (family, batch) not in made or made[family, batch].engine.queries:
            model = families.make_family(family)
            engine = new_engine(model, batch, rows=3, chunk_tokens=5)
            alone = SoloRuns(new_engine(model, batch, rows=1, chunk_tokens=None))
            made[family, batch] = Stand(model, engine, alone, Draws(engine))
        return made[family, batch]

    return make


@pytest.fixture
def rng() -> random.Random:
    return random.Random(5)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """One token per byte: every character beyond ASCII is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class TorchKernels:
    """What the card's kernels do, in torch, row by row: reads what a row owns and nothing else."""

    @staticmethod
    def write_column(new_key: torch.Tensor, new_value: torch.Tensor, ring: Ring) -> None:
        rows = ring.lengths > 0
        ring.key[rows, int(ring.cursor)] = new_key[rows]
        ring.value[rows, int(ring.cursor)] = new_value[rows]

    @staticmethod
    def decode_attention(
        query: torch.Tensor,
        ring: Ring,
        rule: Rule,
        *,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if new is not None:
            TorchKernels.write_column(*new, ring)
        capacity, kv_heads = ring.key.shape[1:3]
        out = torch.zeros(*query.shape[:2], ring.value.shape[3], dtype=query.dtype)
        for row, length in enumerate(ring.lengths.tolist()):
            seen = min(length, rule.window or length)
            if not seen:
                continue
            columns = [(int(ring.cursor) - age) % capacity for age in range(seen)]
            group = query.shape[1] // kv_heads
            keys, values = (
                store[row, columns].repeat_interleave(group, dim=1) for store in (ring.key, ring.value)
            )
            scores = torch.einsum("nhd,hd->hn", keys, query[row]) * rule.scale
            if rule.softcap is not None:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            if rule.sinks is not None:
                scores = torch.cat([scores, rule.sinks[:, None]], dim=1)
            out[row] = torch.einsum("hn,nhd->hd", scores.softmax(1)[:, :seen], values)
        return out

    @staticmethod
    def write_tokens(fresh: Fresh, places: torch.Tensor) -> None:
        for token, place in enumerate(places.tolist()):
            if place:
                for new, anchor in ((fresh.key, fresh.key_anchor), (fresh.value, fresh.value_anchor)):
                    _records_at(anchor, place, 1, fresh.record_bytes)[0] = new[:, token]

    @staticmethod
    def prompt_attention(
        query: torch.Tensor, fresh: Fresh, blocks: torch.Tensor, tile: int, rule: Rule
    ) -> torch.Tensor:
        group = query.shape[0] // fresh.key.shape[0]
        out = torch.full((*query.shape[1::-1], fresh.value.shape[2]), torch.nan, dtype=query.dtype)
        for token, count, position, past, place in blocks.T.tolist():
            if not count:
                continue
            assert count <= tile
            own = slice(token - (position - past), token + count)
            keys, values = (
                torch.cat([_records_at(anchor, place, past, fresh.record_bytes), new[:, own].transpose(0, 1)])
                for new, anchor in ((fresh.key, fresh.key_anchor), (fresh.value, fresh.value_anchor))
            )
            keys, values = (one.repeat_interleave(group, dim=1) for one in (keys, values))
            mine = slice(token, token + count)
            scores = torch.einsum("nhd,hqd->hqn", keys, query[:, mine]) * rule.scale
            if rule.softcap is not None:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            column = torch.arange(position + count)
            at = torch.arange(position, position + count)[:, None]
            seen = (column <= at) & (column > at - (rule.window or position + count))
            scores = scores.masked_fill(~seen, -torch.inf)
            if rule.sinks is not None:
                sinks = rule.sinks[:, None, None].expand(-1, count, 1)
                scores = torch.cat([scores, sinks], dim=2)
            weights = scores.softmax(-1)[..., : position + count]
            out[mine] = torch.einsum("hqn,nhd->qhd", weights, values)
        return out


def _records_at(anchor: torch.Tensor, place: int, count: int, record_bytes: int) -> torch.Tensor:
    """A layer's keys or values in records at a distance from the anchor, [count, heads, dim]; no copy."""
    if not count:
        return anchor.new_empty(0, *anchor.shape)
    nbytes = (count - 1) * record_bytes + anchor.nbytes
    raw = (ctypes.c_uint8 * nbytes).from_address(anchor.data_ptr() + place)
    numbers = torch.frombuffer(raw, dtype=anchor.dtype)
    return numbers.as_strided(
        (count, *anchor.shape), (record_bytes // anchor.element_size(), *anchor.stride())
    )


class Rerun:
    """A step that is run again where a card would replay it; its tensors stay where they are."""

    def __init__(self, run: Callable[[], StepOutput]) -> None:
        self._run = run
        self.replays = 0
        self.output = StepOutput(*(tensor.clone() for tensor in run()))

    def replay(self) -> None:
        self.replays += 1
        for kept, new in zip(self.output, self._run(), strict=True):
            kept.copy_(new)


@pytest.fixture
def card_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Rerun]:
    """Let the CPU pass for a card with kernels and graphs; returns the steps that are captured."""
    captured: list[Rerun] = []

    def capture_all(run_of: Callable[[int], Any], sizes: Sequence[int], _device: torch.device) -> StepGraphs:
        def capture(rows: int) -> Rerun:
            captured.append(Rerun(run_of(rows)))
            return captured[-1]

        return capture_steps(sizes, capture, CaptureLimits(nbytes=1), free_bytes=lambda: 0)

    monkeypatch.setattr(rings, "why_no_kernels", lambda *_: "")
    monkeypatch.setattr(card_window, "_kernels", lambda: TorchKernels)
    monkeypatch.setattr(card_steps, "capture_on_card", capture_all)
    monkeypatch.setattr(prompt_window, "_kernels", lambda: TorchKernels)
    monkeypatch.setattr(prompt_steps, "capture_on_card", capture_all)
    monkeypatch.setattr(compiled, "compile_function", lambda function: function)
    return captured
