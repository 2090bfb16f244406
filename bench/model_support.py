"""What the engine makes of a model: served exactly in a shared batch, another way, or refused."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from batond.bench.families import make_family
from batond.daemon.engine.local import LocalEngine
from batond.daemon.errors import BatondError, UnsupportedModelError
from batond.daemon.requests.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batond.daemon.engine.queries.query import Query

PROMPT_TOKENS = (3, 17, 9, 1)  # Shorter and longer than the windows of the tiny models.
OUTPUT_TOKENS = 10  # Enough to cross windows of 8 and blocks of 4, also behind the prompt of one token.
ROWS = 3
CHUNK_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Support:
    """How one model is served.

    Attributes:
        family: Its `model_type`.
        outcome: "exact", "refused", "wrong" (other tokens than alone) or "failed" (a query died).
        batch: "padded", "ring", or "" where refused.
        preemption: "offload", "recompute", or "".
        one_at_a_time: Whether queries share no batch.
        chunkable: Whether prompts may be computed in parts.
        reason: Why the engine chose so, or refused.
        fewest_parks: Of the four queries; nothing is shown of one that was not parked.
        seconds: Time spent.
    """

    family: str
    outcome: str
    batch: str = ""
    preemption: str = ""
    one_at_a_time: bool = False
    chunkable: bool = True
    reason: str = ""
    fewest_parks: int = 0
    seconds: float = 0.0


#: What was found, by all that a model is: some families are names of another's, down to the last weight.
_found: dict[str, Support] = {}


def check_family(name: str) -> Support:
    """Build a family's tiny model and serve it: in a shared batch, else in turns."""
    model = make_family(name)
    identity = _identity(model)
    if identity not in _found:
        support = check_model(name, model)
        if support.outcome == "refused":
            support = check_model(name, model, one_at_a_time=True)
        _found[identity] = support
    return replace(_found[identity], family=name)


def _identity(model: Any) -> str:
    """Class, configuration and weights of a model, in short; its family's name is none of it."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "model_type"}
    digest = hashlib.sha256(json.dumps([type(model).__name__, config], sort_keys=True, default=str).encode())
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.double().numpy().tobytes())
    return digest.hexdigest()


def check_model(name: str, model: Any, *, batch: str = "auto", **options: Any) -> Support:
    """Serve staggered queries with forced parks and compare their tokens with solo `generate`.

    Args:
        name: What to call it in the result.
        model: A Hugging Face causal model.
        batch: As for `LocalEngine`.
        options: Further arguments of `LocalEngine`.
    """
    began_s = time.monotonic()
    try:
        engine = LocalEngine(model, rows=ROWS, batch=batch, chunk_tokens=CHUNK_TOKENS, poison=True, **options)
    except UnsupportedModelError as error:
        return Support(name, "refused", reason=error.message, seconds=time.monotonic() - began_s)
    prompts = [_prompt(length, place, engine.model.vocab_size) for place, length in enumerate(PROMPT_TOKENS)]
    queries = _run_staggered(engine, prompts)
    outcome, reason = "exact", engine.batch_reason
    for query, prompt in zip(queries, prompts, strict=True):
        if query.error is not None:
            outcome, reason = "failed", query.error[1]
            break
        expected = solo_tokens(model, prompt, OUTPUT_TOKENS)
        if query.output_token_ids != expected:
            outcome = "wrong"
            reason = f"prompt of {len(prompt)}: {query.output_token_ids} != {expected}; {reason}"
            break
    return Support(
        family=name,
        outcome=outcome,
        batch=engine.batch_kind,
        preemption=engine.preemption_mode,
        one_at_a_time=engine.rows == 1,
        chunkable=engine.chunkable,
        reason=reason,
        fewest_parks=min(query.parks for query in queries),
        seconds=time.monotonic() - began_s,
    )


def solo_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of transformers' own `generate`, alone."""
    ids = torch.tensor([list(prompt)], device=model.device)
    generated = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


def _run_staggered(engine: LocalEngine, prompts: Sequence[Sequence[int]]) -> list[Query]:
    """Queries arrive one after another; each is parked at least once, some twice, one half prefilled."""
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    queries: list[Query] = []
    parked: list[Query] = []
    for number, prompt in enumerate(prompts):
        queries.append(engine.submit(prompt, sampling))
        engine.step()
        engine.check_integrity()
        _park_one(engine, queries[number // 2], parked)
        engine.step()
        if len(parked) > 1:
            _resume(engine, parked.pop(0))
    while engine.queries:
        # In turns, so that the last to come is parked, too, before the first are done.
        waiting = [query for query in engine.queries.values() if query not in parked]
        for query in sorted(waiting, key=lambda one: one.parks)[:1]:
            _park_one(engine, query, parked)
        engine.step()
        engine.check_integrity()
        while parked:
            _resume(engine, parked.pop(0))
        engine.step()
    return queries


def _park_one(engine: LocalEngine, query: Query, parked: list[Query]) -> None:
    if query.live and query.query_id in engine.queries and query not in parked:
        try:
            engine.park(query)
        except BatondError:
            return
        parked.append(query)


def _resume(engine: LocalEngine, query: Query) -> None:
    if query.query_id in engine.queries:
        engine.resume(query)


def _prompt(length: int, place: int, vocab_size: int) -> list[int]:
    return [
        3 + (7 * step * (place + 1) + 11 * place + step * step) % (vocab_size - 8) for step in range(length)
    ]
