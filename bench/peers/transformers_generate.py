"""Plain `generate` of transformers as a peer: static batches, padded on the left, run to the longest output.

Who is there when a batch begins is in it, first come, first served; who comes later waits for the next one.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from batond.bench.peers.models import build, versions
from batond.bench.peers.task import PeerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.bench.peers.task import Task

_PAD: Final = 0
_NO_TOKEN: Final = -1  # Ends no row: without any, it takes the one of the model's configuration.
_WAIT_S: Final = 0.5  # Between two looks at whether its thread lives.


class GeneratePeer:
    """A model whose `generate` is called.

    Args:
        task: What it will do.

    Attributes:
        about: As `Peer.about`.
    """

    def __init__(self, task: Task) -> None:
        self._model = build(task)
        self.about = versions(task)
        self.about["attention"] = str(self._model.config._attn_implementation)  # noqa: SLF001 - as it chose

    def open(self, rows: int, *, streamed: bool) -> GenerateSession:
        """As `Peer.open`; streams in any case."""
        del streamed
        return GenerateSession(self._model, rows)

    def close(self) -> None:
        """As `Peer.close`."""


@dataclass(frozen=True, slots=True)
class _Asked:
    key: str
    prompt: list[int]
    output_tokens: int


class GenerateSession:
    """Batches one after the other, each on a thread, so that others can arrive meanwhile.

    Args:
        model: Idle.
        rows: Of a batch.
    """

    def __init__(self, model: Any, rows: int) -> None:
        self._model, self._rows = model, rows
        self._waiting: deque[_Asked] = deque()
        self._came: queue.SimpleQueue[list[tuple[str, list[int]]] | Exception | None] = queue.SimpleQueue()
        self._batch: threading.Thread | None = None
        self._given_up = threading.Event()

    def submit(self, key: str, prompt: Sequence[int], output_tokens: int, *, urgent: bool = False) -> None:
        """As `Session.submit`; urgent or not is the same to it."""
        del urgent
        self._waiting.append(_Asked(key, list(prompt), output_tokens))

    def poll(self, until_s: float | None = None) -> list[tuple[str, list[int]]]:
        """As `Session.poll`: begins a batch if none runs, and waits for the next tokens."""
        if self._batch is None and self._waiting:
            count = min(self._rows, len(self._waiting))
            asked = [self._waiting.popleft() for _ in range(count)]
            self._batch = threading.Thread(target=self._run, args=(asked,), daemon=True)
            self._batch.start()
        wait_s = _WAIT_S if until_s is None else max(0.0, min(_WAIT_S, until_s - time.perf_counter()))
        try:
            came = self._came.get(timeout=wait_s)
        except queue.Empty:
            return []
        if isinstance(came, Exception):
            raise PeerError(f"generate failed: {came!r}") from came
        if came is None:
            self._batch = None
            return []
        return came

    def close(self) -> None:
        """As `Session.close`."""
        self._given_up.set()
        if self._batch is not None:
            self._batch.join()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run(self, asked: Sequence[_Asked]) -> None:
        try:
            self._generate(asked)
            self._came.put(None)
        except Exception as error:  # noqa: BLE001 - it is raised again where somebody listens
            self._came.put(error)

    def _generate(self, asked: Sequence[_Asked]) -> None:
        longest = max(len(one.prompt) for one in asked)
        ids = [[_PAD] * (longest - len(one.prompt)) + one.prompt for one in asked]
        mask = [[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in asked]
        device = self._model.device
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(one.output_tokens for one in asked),
            eos_token_id=_NO_TOKEN,
            pad_token_id=_PAD,
        )
        self._model.generate(
            torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([_Teller(self, asked)]),
        )

    def tell(self, came: list[tuple[str, list[int]]]) -> bool:
        """Hand over the tokens of a step; gives whether to stop."""
        self._came.put(came)
        return self._given_up.is_set()


class _Teller(StoppingCriteria):  # type: ignore[misc] # transformers has no types here
    """Is asked after each step whether to stop, and tells who got which token."""

    def __init__(self, session: GenerateSession, asked: Sequence[_Asked]) -> None:
        self._session, self._asked, self._steps = session, asked, 0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Which rows are to stop, shape [rows]; all or none."""
        del scores
        newest = input_ids[:, -1].tolist()
        came = [
            (one.key, [token])
            for one, token in zip(self._asked, newest, strict=True)
            if self._steps < one.output_tokens
        ]
        self._steps += 1
        stop = self._session.tell(came)
        return torch.full((len(newest),), stop, dtype=torch.bool, device=input_ids.device)


def make(task: Task) -> GeneratePeer:
    """As `Adapter`."""
    return GeneratePeer(task)
