"""vLLM as a peer, with its policy "fcfs" or "priority": its engine in this process, stepped by `poll`.

Written against vLLM 0.25. Imports nothing of batond but the task: vLLM may need a Python path of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batond.bench.peers.task import PeerError, PeerMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batond.bench.peers.task import Task

FCFS: Final = "vllm"
PRIORITY: Final = "vllm-priority"

#: Before it is imported; what is set already stays. Its engine runs in this process, which is what can be
#: stepped, and no address, hub or statistics server is asked for.
ENVIRONMENT: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_HOST_IP": "127.0.0.1",
}
#: The smaller is the more urgent.
_URGENT, _OTHERS = 0, 10
#: Beyond the longest request, so that none ends by its length.
_SPARE_TOKENS: Final = 16


class VllmPeer:
    """vLLM with its model.

    Args:
        task: What it will do; its name chooses the policy.

    Attributes:
        about: As `Peer.about`.
    """

    def __init__(self, task: Task) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            self._vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise PeerMissingError(f"vllm can't be imported: {error}") from error
        self._task, self._priority = task, task.peer == PRIORITY
        self._folder = tempfile.TemporaryDirectory(prefix="peer-model-")
        config = dict(task.model)
        most_tokens = task.longest_tokens + _SPARE_TOKENS
        config["max_position_embeddings"] = max(config["max_position_embeddings"], most_tokens)
        Path(self._folder.name, "config.json").write_text(json.dumps(config), encoding="utf-8")
        options: dict[str, Any] = {
            "model": self._folder.name,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": task.dtype,
            "max_model_len": most_tokens,
            "gpu_memory_utilization": task.memory_share,
            "max_num_seqs": task.most_rows,
            "enable_prefix_caching": False,
            "scheduling_policy": "priority" if self._priority else "fcfs",
            "seed": task.seed,
        }
        self._rows = task.most_rows
        self._llm = self._vllm.LLM(**(options | task.options))
        self.about = {"vllm": str(self._vllm.__version__), **self._facts()}

    def open(self, rows: int, *, streamed: bool) -> VllmSession:
        """As `Peer.open`; streams in any case.

        One engine serves all bounds: its scheduler's is lowered, as a start takes more than a minute.
        """
        del streamed
        engine = self._llm.llm_engine
        if rows != self._rows:
            _scheduler(engine).max_num_running_reqs = rows
            self._rows = rows
        return VllmSession(engine, self._vllm.SamplingParams, priority=self._priority)

    def close(self) -> None:
        """As `Peer.close`; its memory goes with the process."""
        self._folder.cleanup()

    def _facts(self) -> dict[str, str]:
        """What it chose, as far as it can be asked."""
        facts = {}
        config = getattr(self._llm.llm_engine, "vllm_config", None)
        for name, path in {
            "graphs": "compilation_config.cudagraph_mode",
            "blocks": "cache_config.num_gpu_blocks",
            "block tokens": "cache_config.block_size",
            "step tokens": "scheduler_config.max_num_batched_tokens",
        }.items():
            value = config
            for part in path.split("."):
                value = getattr(value, part, None)
            if value is not None:
                facts[name] = str(value)
        return facts


class VllmSession:
    """Its engine at work.

    Args:
        engine: Idle.
        sampling: Its `SamplingParams`.
        priority: Requests have one.
    """

    def __init__(self, engine: Any, sampling: Any, *, priority: bool) -> None:
        self._engine, self._sampling, self._priority = engine, sampling, priority
        self._seen: dict[str, int] = {}

    def submit(self, key: str, prompt: Sequence[int], output_tokens: int, *, urgent: bool = False) -> None:
        """As `Session.submit`."""
        sampling = self._sampling(
            max_tokens=output_tokens, ignore_eos=True, detokenize=False, temperature=0.0
        )
        options = {"priority": _URGENT if urgent else _OTHERS} if self._priority else {}
        self._seen[key] = 0
        self._engine.add_request(key, {"prompt_token_ids": list(prompt)}, sampling, **options)

    def poll(self, until_s: float | None = None) -> list[tuple[str, list[int]]]:
        """As `Session.poll`: one step of its engine."""
        del until_s
        came = []
        for output in self._engine.step():
            key = output.request_id.partition("-")[0]  # It may have put a suffix behind it.
            tokens = output.outputs[0].token_ids
            came.append((key, list(tokens[self._seen[key] :])))
            self._seen[key] = len(tokens)
        return came

    def close(self) -> None:
        """As `Session.close`."""
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _scheduler(engine: Any) -> Any:
    """Its scheduler, where the engine is in this process.

    Raises:
        PeerError: It isn't.
    """
    scheduler = engine
    for name in ("engine_core", "engine_core", "scheduler"):
        scheduler = getattr(scheduler, name, None)
    if not isinstance(getattr(scheduler, "max_num_running_reqs", None), int):
        raise PeerError("this vLLM's bound on running requests can't be reached")
    return scheduler


def make(task: Task) -> VllmPeer:
    """As `Adapter`."""
    return VllmPeer(task)
