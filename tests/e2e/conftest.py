"""The real daemon, as a process, with a tiny random model: gRPC, Redis, two processes, real KV copies."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from batond.bench.local_daemon import LocalDaemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batond.clients import JobStream

TENANTS = ["red", "blue"]
CONTEXT = 4096
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and the daemon wants the other core."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama and a byte tokenizer, saved as Hugging Face folders are."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: place for place, char in enumerate(alphabet)} | {"<eos>": len(alphabet)}
    raw = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=len(alphabet),
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def solo(model_folder: Path) -> Callable[[list[int], int], list[int]]:
    """Greedy tokens of transformers' own generate on the same weights, alone."""
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def run(prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return run


def _starter(model_folder: Path) -> Iterator[Callable[..., LocalDaemon]]:
    """Starts daemons; what still runs at the end is stopped."""
    started: list[LocalDaemon] = []
    # Unix socket paths are short: pytest's own folders can be too deep for them.
    # A daemon that a test has killed leaves its Redis a moment, which still writes: such a file may stay.
    with tempfile.TemporaryDirectory(prefix="bd-", ignore_cleanup_errors=True) as name:

        def start(**options: Any) -> LocalDaemon:
            folder = Path(name) / str(len(started))
            folder.mkdir()
            engine = {"rows": 2, "threads": 1, "host_pool_bytes": 1 << 26, **options.pop("engine", {})}
            model = {"path": str(model_folder), "name": "tiny", **options.pop("model", {})}
            daemon = LocalDaemon(folder, TENANTS, model=model, engine=engine, **options)
            started.append(daemon)
            return daemon

        yield start
        for daemon in started:
            daemon.stop()


@pytest.fixture(scope="module")
def start_daemon(model_folder: Path) -> Iterator[Callable[..., LocalDaemon]]:
    """Starts daemons of the module's own; what still runs at its end is stopped."""
    yield from _starter(model_folder)


@pytest.fixture(scope="session")
def _shared(model_folder: Path) -> Iterator[LocalDaemon]:
    starter = _starter(model_folder)
    daemon = next(starter)()
    daemon.wait_ready()
    yield daemon
    next(starter, None)


@pytest.fixture
def daemon(_shared: LocalDaemon) -> LocalDaemon:
    """A ready and idle daemon of two rows. All modules share it, since its start takes seconds.

    Whoever leaves tenants, dead jobs or another policy behind starts one of its own.
    """
    if _shared.process.poll() is not None:  # A test that failed took it along.
        _shared.restart()
    return _shared


@pytest.fixture
def after_tokens() -> Callable[[JobStream, int], None]:
    """Reads a stream until a token index was seen: no sleeping, no guessing."""

    def read(stream: JobStream, count: int) -> None:
        while stream.next_token_index < count:
            next(stream)

    return read
