"""A vLLM that computes nothing, and batches as the real one: first come or by priority, no row is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

FAKE_VLLM = '''
"""Stands in for vLLM: the calls that the adapter makes, and nothing else."""
from types import SimpleNamespace

__version__ = "0.25.0+fake"

class SamplingParams:
    def __init__(self, *, max_tokens, ignore_eos, detokenize, temperature):
        assert ignore_eos and not detokenize and temperature == 0
        self.max_tokens = max_tokens

class _Scheduler:
    def __init__(self, rows):
        self.max_num_running_reqs, self.running, self.waiting = rows, [], []

class _Engine:
    def __init__(self, rows, priority):
        self.scheduler, self.priority = _Scheduler(rows), priority
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))

    def add_request(self, request_id, prompt, params, priority=0):
        assert self.priority or not priority
        one = SimpleNamespace(id=request_id + "-1", left=params.max_tokens, tokens=[], priority=priority)
        assert prompt["prompt_token_ids"]
        self.scheduler.waiting.append(one)

    def has_unfinished_requests(self):
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self):
        s = self.scheduler
        s.waiting.sort(key=lambda one: one.priority)
        while s.waiting and len(s.running) < s.max_num_running_reqs:
            s.running.append(s.waiting.pop(0))
        outputs = []
        for one in s.running:
            one.tokens.append(7)
            first = SimpleNamespace(token_ids=one.tokens)
            outputs.append(SimpleNamespace(request_id=one.id, outputs=[first]))
        s.running = [one for one in s.running if len(one.tokens) < one.left]
        return outputs

class LLM:
    def __init__(self, *, model, load_format, skip_tokenizer_init, dtype, max_model_len,
                 gpu_memory_utilization, max_num_seqs, enable_prefix_caching, scheduling_policy,
                 seed, **options):
        import json, os, sys
        assert "torch" not in sys.modules
        config = json.load(open(os.path.join(model, "config.json")))
        assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
        assert (load_format, skip_tokenizer_init, enable_prefix_caching) == ("dummy", True, False)
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        if options.get("hang"):
            import time
            time.sleep(600)
        if options.get("broken"):
            raise RuntimeError("no kernel for this card")
        if options.get("die"):
            os._exit(7)
        self.llm_engine = _Engine(max_num_seqs, scheduling_policy == "priority")
'''


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gives a folder for the Python path of a peer's process, with the stand-in in it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "vllm.py").write_text(FAKE_VLLM, encoding="utf-8")
    return folder
