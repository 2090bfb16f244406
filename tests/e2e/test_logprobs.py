"""Log-probabilities over the API: streamed, read, and kept through the death of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from batond.clients import Chunk, Finished, JobInfo, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from batond.bench.local_daemon import LocalDaemon
    from batond.clients import JobStream

    AfterTokens = Callable[[JobStream, int], None]

pytestmark = [pytest.mark.redis]
PROMPT = [(3 + 7 * place) % 250 for place in range(17)]
ASKED: dict[str, Any] = {
    "token_ids": PROMPT,
    "ignore_eos": True,
    "temperature": 0.8,
    "seed": 11,
    "logprobs": 3,
    "prompt_logprobs": 2,
}


def chunks_of(events: Iterable[object]) -> list[Chunk]:
    return [event for event in events if isinstance(event, Chunk)]


def close(ours: Iterable[TokenLogprobs], theirs: Iterable[TokenLogprobs]) -> bool:
    """Same tokens, numbers within what another order of float32 sums may change."""
    pairs = list(zip(ours, theirs, strict=True))
    return all(
        one.token_id == other.token_id
        and (one.logprob is None) == (other.logprob is None)
        and (one.logprob or 0.0) == pytest.approx(other.logprob or 0.0, abs=1e-4)
        and [top.logprob for top in one.top] == pytest.approx([top.logprob for top in other.top], abs=1e-4)
        for one, other in pairs
    )


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> Callable[[list[int]], torch.Tensor]:
    """The model's own log-probabilities, by transformers alone: [place, token]."""
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def run(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return logits.double().log_softmax(-1)

    return run


def test_streamed_read_and_computed_are_the_same(
    daemon: LocalDaemon, expected: Callable[[list[int]], torch.Tensor]
) -> None:
    """R7: what the stream said is what GetJob says, bit for bit, and what the model says."""
    with daemon.client("red") as red, red.generate(max_tokens=40, **ASKED) as stream:
        events = list(stream)
        job = red.get(stream.job_id)
    streamed = chunks_of(events)
    assert isinstance(events[-1], Finished)
    assert events[-1].job == job
    assert tuple(one for chunk in streamed for one in chunk.logprobs) == job.logprobs
    assert [chunk.prompt_logprobs for chunk in streamed if chunk.prompt_logprobs] == [job.prompt_logprobs]
    assert tuple(one.token_id for one in job.logprobs) == job.output_token_ids
    assert [one.token_id for one in job.prompt_logprobs] == PROMPT
    assert job.prompt_logprobs[0].logprob is None
    whole = [*PROMPT, *job.output_token_ids]
    table = expected(whole)
    for place, one in enumerate([*job.prompt_logprobs[1:], *job.logprobs]):
        assert one.logprob == pytest.approx(float(table[place, one.token_id]), abs=1e-4)
        best = table[place].topk(len(one.top))
        assert [top.logprob for top in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert len(one.top) == (2 if place < len(PROMPT) - 1 else 3)


def test_a_job_that_did_not_ask_gets_none(daemon: LocalDaemon) -> None:
    with daemon.client("red") as red, red.generate(token_ids=PROMPT, max_tokens=5) as stream:
        events = list(stream)
    assert not any(chunk.logprobs or chunk.prompt_logprobs for chunk in chunks_of(events))


def test_a_watch_brings_them_from_its_index_on(daemon: LocalDaemon, after_tokens: AfterTokens) -> None:
    """C4: live and from the past."""
    with daemon.client("red") as red:
        job = red.submit(max_tokens=120, **ASKED)
        with red.watch(job.job_id) as stream:
            after_tokens(stream, 50)
            live = chunks_of(red.watch(job.job_id, 23))
        whole = red.result(job.job_id)
        past = chunks_of(red.watch(job.job_id, 23))
    for seen in (live, past):
        assert tuple(one for chunk in seen for one in chunk.logprobs) == whole.logprobs[23:]
        assert not any(chunk.prompt_logprobs for chunk in seen)


def test_the_engines_death_changes_nothing(daemon: LocalDaemon, after_tokens: AfterTokens) -> None:
    """D3: what was committed stays bit for bit, nothing comes twice, the rest is as undisturbed."""

    def run(client: Any, *, kill: bool) -> tuple[JobInfo, list[Chunk], list[Chunk]]:
        before: list[Chunk] = []
        with client.generate(max_tokens=200, detached=True, **ASKED) as stream:
            while stream.next_token_index < 60:
                before += chunks_of([next(stream)])
            if kill:
                engine = next(
                    child
                    for child in psutil.Process(daemon.process.pid).children(recursive=True)
                    if "batond.daemon.engine.process" in " ".join(child.cmdline())
                )
                engine.kill()
            after = chunks_of(stream)
            return client.get(stream.job_id), before, after

    with daemon.client("red") as red:
        undisturbed, _, _ = run(red, kill=False)
        killed, before, after = run(red, kill=True)
    assert killed.output_token_ids == undisturbed.output_token_ids
    assert close(killed.logprobs, undisturbed.logprobs)
    assert close(killed.prompt_logprobs, undisturbed.prompt_logprobs)
    streamed = tuple(one for chunk in [*before, *after] for one in chunk.logprobs)
    assert streamed == killed.logprobs, "each token's once, those before the death included"
    assert [chunk.prompt_logprobs for chunk in [*before, *after] if chunk.prompt_logprobs] == [
        killed.prompt_logprobs
    ]
