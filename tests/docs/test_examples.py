"""The README's examples run as they stand."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import batond.clients
from batond.bench.local_daemon import LocalDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.clients import Client


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LocalDaemon]:
    """Starts the real daemon with one tenant and a small random model that speaks in bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    no_end = {"bos_token_id": None, "eos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(alphabet), **size, **no_end)).save_pretrained(tmp_path)
    # Unix socket paths are short: pytest's own folders can be too deep for them.
    with tempfile.TemporaryDirectory(prefix="bd-") as folder:
        engine = {"rows": 2, "threads": 1, "host_pool_bytes": 1 << 26}
        one = LocalDaemon(Path(folder), ["docs"], model={"path": str(tmp_path)}, engine=engine)
        try:
            one.wait_ready()
            yield one
        finally:
            one.stop()


def test_there_is_one_example_of_each_kind(readme_examples: list[str]) -> None:
    clients, engine = readme_examples
    assert "batond.clients" in clients
    assert "LocalEngine" in engine


def test_the_engine_example_shows_what_its_comment_says(
    readme_examples: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(readme_examples[1], "README.md", "exec"), {})
    tokens, counts = capsys.readouterr().out.splitlines()
    assert tokens.count("[") == 2
    assert f"# {counts}\n" in readme_examples[1]


@pytest.mark.redis
@pytest.mark.slow
def test_the_client_example_runs_against_a_daemon(
    readme_examples: list[str],
    daemon: LocalDaemon,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def connect(target: str) -> Client:
        assert target == batond.clients.DEFAULT_TARGET
        return daemon.client("docs")

    monkeypatch.setattr(batond.clients, "Client", connect)
    exec(compile(readme_examples[0], "README.md", "exec"), {})
    said = capsys.readouterr().out
    with daemon.client("docs") as client:
        jobs = list(client.list())
        texts = {job.effective_sla_class: client.get(job.job_id).text for job in jobs}
    assert all(job.state == "succeeded" for job in jobs)
    assert said == f"{texts['interactive']}{texts['batch']}\n"
    assert [job.output_tokens for job in jobs] == [32, 200]
