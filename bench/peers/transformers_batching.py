"""Continuous batching as transformers brings it (`transformers/generation/continuous_batching`), as a peer.

It runs on a thread of its own; tokens are heard as it streams them. It knows no priorities: first come, first
served. Prefix sharing is off, as in the other peers, since random prompts share nothing.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from batond.bench.peers.models import build, require_device, versions
from batond.bench.peers.task import PeerError, PeerMissingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.bench.peers.task import Task

PLAIN: Final = "transformers"
GRAPHS: Final = "transformers-graphs"
OFFLOAD: Final = "transformers-offload"

#: On a card it sizes its pages' memory itself. On a CPU it would have to be told how much to take anyway.
_CPU_PAGE_TOKENS: Final = 32
_CPU_BATCH_TOKENS: Final = 2048
_NO_TOKEN: Final = -1  # Ends no request.
_WAIT_S: Final = 0.5  # Between two looks at whether its thread lives.
_GIB: Final = 1 << 30


class BatchingPeer:
    """A model that batches by itself.

    Args:
        task: What it will do; its name chooses graphs and offload.

    Attributes:
        about: As `Peer.about`.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        on_card = require_device(task).type == "cuda"
        if task.peer == GRAPHS and not on_card:
            raise PeerMissingError("CUDA graphs need a card")
        if task.peer == OFFLOAD and not on_card:
            raise PeerMissingError("its offload locks host memory for a card, and there is none")
        self._model = build(task)
        self.about = versions(task)

    def open(self, rows: int, *, streamed: bool) -> BatchingSession:
        """As `Peer.open`."""
        generation = GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0)
        manager = self._model.init_continuous_batching(generation, self._config(rows))
        manager.warmup()
        manager.start()
        self.about["attention"] = str(self._model.config._attn_implementation)  # noqa: SLF001 - as it chose
        return BatchingSession(manager, streamed=streamed)

    def close(self) -> None:
        """As `Peer.close`."""

    def _config(self, rows: int) -> ContinuousBatchingConfig:
        task = self._task
        on_card = torch.device(task.device).type == "cuda"
        options: dict[str, Any] = {
            "max_requests_per_batch": rows,
            "allow_block_sharing": False,
            "use_cuda_graph": on_card and task.peer in {GRAPHS, OFFLOAD},
        }
        if task.peer == OFFLOAD:
            options["cpu_offload_space"] = task.host_bytes / _GIB
        if on_card:
            options["max_memory_percent"] = task.memory_share
        else:
            known = {field.name for field in fields(ContinuousBatchingConfig)}
            # Renamed in transformers 5.18.
            options["page_size" if "page_size" in known else "block_size"] = _CPU_PAGE_TOKENS
            options["num_blocks"] = rows * (math.ceil(task.longest_tokens / _CPU_PAGE_TOKENS) + 1)
            options["max_batch_tokens"] = _CPU_BATCH_TOKENS
        return ContinuousBatchingConfig(**(options | task.options))


class BatchingSession:
    """Its manager at work.

    Args:
        manager: Started.
        streamed: Hear each token: that copies a request's tokens each time, so not where nobody listens.
    """

    def __init__(self, manager: Any, *, streamed: bool) -> None:
        self._manager, self._streamed = manager, streamed
        self._seen: dict[str, int] = {}

    def submit(self, key: str, prompt: Sequence[int], output_tokens: int, *, urgent: bool = False) -> None:
        """As `Session.submit`; urgent or not is the same to it."""
        del urgent
        self._seen[key] = 0
        self._manager.add_request(
            list(prompt),
            request_id=key,
            max_new_tokens=output_tokens,
            streaming=self._streamed,
            eos_token_id=_NO_TOKEN,
        )

    def poll(self, until_s: float | None = None) -> list[tuple[str, list[int]]]:
        """As `Session.poll`: waits for the next tokens."""
        wait_s = _WAIT_S if until_s is None else max(0.0, min(_WAIT_S, until_s - time.perf_counter()))
        output = self._manager.get_result(timeout=wait_s)
        if output is None and not self._manager.is_running():
            raise PeerError("its thread has ended")
        came = []
        while output is not None:
            came.append(self._taken(output))
            output = self._manager.get_result(timeout=0.0)
        return came

    def close(self) -> None:
        """As `Session.close`."""
        self._manager.stop(block=True, hard_stop=True)
        self._manager.destroy()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _taken(self, output: Any) -> tuple[str, list[int]]:
        if output.error is not None:
            raise PeerError(f"request {output.request_id} failed: {output.error}")
        seen = self._seen[output.request_id]
        tokens = list(output.generated_tokens)
        self._seen[output.request_id] = len(tokens)
        return output.request_id, tokens[seen:]


def make(task: Task) -> BatchingPeer:
    """As `Adapter`."""
    return BatchingPeer(task)
