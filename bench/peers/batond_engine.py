"""batond's own engine as a peer: the whole step, the policy `priority`, parks through the host pool.

The engine alone, as the other peers are: no daemon, no gRPC, no Redis around it.
"""

from __future__ import annotations

import gc
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import torch

from batond.bench.gpu.sizes import SPARE_BYTES, sizes_of
from batond.bench.peers.models import build, config_of, require_device, versions
from batond.bench.peers.task import PeerError
from batond.daemon.engine.batch.ring_size import RING_FRACTION
from batond.daemon.engine.governing import make_governing
from batond.daemon.engine.local import LocalEngine
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.requests.params import SamplingParams
from batond.daemon.wire.messages import Finished, FinishReason, QueryFailed, Tokens
from batond.daemon.wire.settings import MemorySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.bench.peers.task import Task
    from batond.daemon.engine.governing import Governing
    from batond.daemon.wire.messages import QueryEvent

#: Prompt tokens between two decode steps: bounded, as the other peers' are, but an urgent prompt is whole.
CHUNK_TOKENS: Final = 2048
#: Prompts that are computed before their row is free; each holds its KV on the card beside the ring.
READY_LIMIT: Final = 4
_URGENT: Final = "interactive"
_OTHERS: Final = "batch"
#: The governor's marks lie so far from each other and from full.
_BELOW_HIGH: Final = 0.05


class BatondPeer:
    """The engine with its model.

    Args:
        task: What it will do.

    Attributes:
        about: As `Peer.about`.
    """

    def __init__(self, task: Task) -> None:
        self._task, device = task, require_device(task)
        self._governors: list[Governing] = []
        if device.type == "cuda" and needs_elastic(
            task, torch.cuda.get_device_properties(device).total_memory
        ):
            made = [_governor(task) for _ in range(len(task.rows) + 1)]
            self._governors = [one for one in made if one is not None]
        self._model = CausalModel(build(task), device)
        self.about = {"batond": version("batond"), **versions(task)}

    def open(self, rows: int, *, streamed: bool) -> BatondSession:
        """As `Peer.open`; streams in any case."""
        del streamed
        task = self._task
        options: dict[str, Any] = {
            "rows": rows,
            "policy": "priority",
            "host_pool_bytes": task.host_bytes,
            "chunk_tokens": CHUNK_TOKENS,
            "ready_limit": min(rows, READY_LIMIT),
            "max_query_tokens": task.longest_tokens,
            "session_bytes": 0,
        }
        if self._governors:
            options |= {"arena": "elastic", "governor": self._governors.pop()}
        engine = LocalEngine(self._model, **(options | task.options))
        self.about["batch"] = f"{engine.batch_kind}: {engine.batch_reason}"
        engine.residency.store.pool.warm_up().join()
        return BatondSession(engine)

    def close(self) -> None:
        """As `Peer.close`."""
        for governor in self._governors:
            governor.close()


class BatondSession:
    """The engine at work, stepped by `poll`.

    Args:
        engine: Idle, and this one's from now on.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine: LocalEngine | None = engine
        self._came: list[tuple[str, list[int]]] = []
        self._wrong = ""
        engine.on_event = self._note

    def submit(self, key: str, prompt: Sequence[int], output_tokens: int, *, urgent: bool = False) -> None:
        """As `Session.submit`."""
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        self._own.submit(prompt, sampling, sla_class=_URGENT if urgent else _OTHERS, query_id=key)

    def poll(self, until_s: float | None = None) -> list[tuple[str, list[int]]]:
        """As `Session.poll`: one step of the engine."""
        engine, self._came = self._own, []
        # As in the daemon: no step is begun ahead that a query which has come would have to wait for.
        engine.arrivals = None if until_s is None else lambda: time.perf_counter() >= until_s
        engine.step()
        if self._wrong:
            raise PeerError(self._wrong)
        return self._came

    def close(self) -> None:
        """As `Session.close`."""
        self._own.close()
        self._engine = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def _own(self) -> LocalEngine:
        if self._engine is None:
            raise PeerError("the session is closed")
        return self._engine

    def _note(self, event: QueryEvent) -> None:
        match event:
            case Tokens():
                self._came.append((event.query_id, event.token_ids))
            case Finished() if event.finish_reason is not FinishReason.LENGTH:
                self._wrong = f"request {event.query_id} ended by {event.finish_reason}"
            case QueryFailed():
                self._wrong = f"request {event.query_id} failed: {event.message}"
            case _:
                pass


def needs_elastic(task: Task, total_bytes: int) -> bool:
    """Whether all rows at their longest need more than a plain ring takes: then it must follow its rows.

    Args:
        task: Gives rows and lengths.
        total_bytes: Memory of the card.
    """
    sizes = sizes_of(config_of(task), getattr(torch, task.dtype))
    ring_bytes = task.most_rows * task.longest_tokens * sizes.kv_token_bytes
    return ring_bytes > RING_FRACTION * (total_bytes - sizes.weight_bytes - SPARE_BYTES)


def _governor(task: Task) -> Governing | None:
    """Keeps the ring within the task's share of the card; made before anything is loaded there."""
    high = task.memory_share
    marks = MemorySettings(
        governor="on",
        low_watermark=high - _BELOW_HIGH,
        high_watermark=high,
        critical_watermark=min(0.99, high + _BELOW_HIGH),
    )
    return make_governing(marks, task.device, arena="elastic")


def make(task: Task) -> BatondPeer:
    """As `Adapter`."""
    return BatondPeer(task)
