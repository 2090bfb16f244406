"""Captured prompts against those computed kernel by kernel.

On the CPU with kernels written in torch; on a card (marked `gpu`) with its own and with CUDA graphs.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batond.bench import families
from batond.daemon.engine import SamplingParams
from batond.daemon.engine.batch import prompt_batch, prompt_steps
from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.batch.prompt_batch import CapturedPrompt
from batond.daemon.engine.batch.prompt_inputs import MOST_PARTS, Part, PromptInputs
from batond.daemon.engine.batch.prompt_steps import PromptSteps, prompt_sizes
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.engine.proof.trial import probe_layout
from batond.daemon.engine.step.packing import Packer
from batond.offload.landing import empty_records

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.engine import LocalEngine

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "mistral", "gpt2", "phi3"]
ON_CPU = {"llama", "gemma2"}
SIZES = (8, 24)


def _places(names: list[str]) -> list[Any]:
    """Families on both devices: few of them on the CPU, where all kernels are torch's."""
    need = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
    on_card = [pytest.param(name, "cuda", marks=[pytest.mark.gpu, need], id=f"{name}-cuda") for name in names]
    return [pytest.param(name, "cpu", id=f"{name}-cpu") for name in names if name in ON_CPU] + on_card


ENGINES = pytest.mark.parametrize(
    ("family", "device"),
    [one for one in _places(["llama", "gemma2"]) if one.id != "gemma2-cpu"],
    indirect=["device"],
)


class Stand:
    """A model's captured prompts, and the same computed kernel by kernel."""

    def __init__(self, family: str, device: str, sizes: tuple[int, ...] = SIZES, **options: Any) -> None:
        self.model = CausalModel(families.make_family(family), device)
        self.layout = probe_layout(self.model)
        self.steps = PromptSteps(self.model, self.layout, sizes, **options)
        self.rng = random.Random(family)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 120) for _ in range(count)]

    def padded(self) -> PaddedBatch:
        return PaddedBatch(self.model, 1, self.layout)

    def check(self, found: Any, expected: Any) -> None:
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)

    def check_slices(self, found: Any, expected: Any) -> None:
        assert found.n_tokens == expected.n_tokens
        for slot in self.layout.token_slots:
            self.check(self.layout.token_part(slot, found), self.layout.token_part(slot, expected))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("family", "device"), _places(FAMILIES), indirect=["device"])
def test_chunks_equal_those_computed_kernel_by_kernel(family: str, device: str, *, compiled: bool) -> None:
    """R2: of one token, of exactly a size, longer than the largest; logits and slices, after a park, too."""
    stand = Stand(family, device, compiled=compiled)
    assert stand.steps.graphs.sizes == list(SIZES), stand.steps.graphs.why_no_more
    mine, theirs = CapturedPrompt(stand.steps), stand.padded()
    for count in (5, 1, 8, 24, 31, 3):
        tokens = stand.tokens(count)
        found, expected = (batch.step({0: tokens}) for batch in (mine, theirs))
        stand.check(found, expected)
        mine.check_integrity()
        stand.check_slices(mine.extract(0), theirs.extract(0))
        parked, mine = mine.extract(0), CapturedPrompt(stand.steps)
        kept = parked.tokens.clone()
        mine.embed(0, parked)
    tokens = stand.tokens(26)
    found, expected = (batch.step({0: tokens}, all_positions=True) for batch in (mine, theirs))
    stand.check(found, expected)
    assert torch.equal(parked.tokens, kept)


@pytest.mark.parametrize(("family", "device"), _places(["llama"]), indirect=["device"])
def test_noting_changes_no_bit(family: str, device: str) -> None:
    """R2: a prompt computed again, without the log-probabilities that were noted before, is the same."""
    stand = Stand(family, device)
    tokens = stand.tokens(30)
    plain, noting = CapturedPrompt(stand.steps), CapturedPrompt(stand.steps)
    last = plain.step({0: tokens})[0]
    stand.check(noting.step({0: tokens}, all_positions=True)[0, -1], last)
    assert torch.equal(plain.extract(0).tokens, noting.extract(0).tokens)


@pytest.mark.parametrize(("family", "device"), _places(["llama", "gemma2"]), indirect=["device"])
def test_prompts_that_share_a_forward_equal_each_alone(family: str, device: str) -> None:
    """Q8: chunks of several prompts, some behind what they have already."""
    stand = Stand(family, device)
    before = [stand.tokens(count) for count in (9, 0, 2)]
    new = [stand.tokens(count) for count in (7, 3, 14)]
    records, parts, expected = [], [], []
    for old, token_ids in zip(before, new, strict=True):
        alone = stand.padded()
        room = torch.zeros(len(old) + len(token_ids), stand.layout.record_bytes, dtype=torch.uint8)
        records.append(room.to(device))
        if old:
            alone.step({0: old})
            records[-1][: len(old)] = alone.extract(0).tokens
        parts.append(Part(token_ids, len(old), records[-1].data_ptr()))
        expected.append((alone.step({0: token_ids})[0], alone.extract(0)))
    found = stand.steps.run(parts)
    for logits, mine, (their_logits, theirs) in zip(found, records, expected, strict=True):
        stand.check(logits, their_logits)
        stand.check(mine.view(torch.float32), theirs.tokens.view(torch.float32))


@pytest.mark.parametrize(("family", "device"), _places(["llama", "gemma2"]), indirect=["device"])
def test_packs_of_captured_prompts_equal_each_alone(family: str, device: str) -> None:
    """Q8: prompts wider than a window, too; no pack has more prompts than a forward takes."""
    stand = Stand(family, device, sizes=(64, 128))
    packer = Packer(stand.model, stand.layout, 128, sparing=True, steps=stand.steps)
    prompts = [stand.tokens(count) for count in (40, 2, 31, 1)]
    packed = packer.run(prompts)
    for prompt, logits, kv in zip(prompts, packed.logits, packed.slices, strict=True):
        alone = stand.padded()
        stand.check(logits, alone.step({0: prompt})[0])
        stand.check_slices(kv, alone.extract(0))
    packs = packer.packs([1] * 40 + [100] + [60] * 3)
    assert [len(pack) for pack in packs] == [MOST_PARTS, MOST_PARTS, 8, 1, 2, 1]


@ENGINES
def test_an_engine_with_captured_prompts_emits_the_tokens_of_one_without(
    family: str, device: str, make_engine: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2: chunks, prompts parked half done, sessions, log-probabilities; the reason says what is captured."""
    monkeypatch.setattr(prompt_steps, "SIZES", (8, 16, 32))

    def tokens(*, graphs: bool) -> list[Any]:
        engine = make_engine(
            families.make_family(family),
            rows=3,
            batch="ring",
            chunk_tokens=12,
            device=device,
            max_query_tokens=64,
            graphs=graphs,
        )
        assert ("prompts as graphs of 8, 16 tokens" in engine.batch_reason) == graphs, engine.batch_reason
        rng = random.Random(2)
        queries = []
        for number in range(7):
            prompt = [3 + (3 + number) * place % 110 for place in range(rng.randrange(1, 40))]
            wanted = 3 if number == 4 else None
            params = SamplingParams(max_tokens=rng.randrange(2, 9), ignore_eos=True, prompt_logprobs=wanted)
            session = None if wanted else f"s{number % 2}"
            queries.append(engine.submit(prompt, params, seed=number, session_id=session))
        while any(query.live for query in queries):
            engine.step()
            for query in queries:
                if query.live and not query.held and rng.random() < 0.1:
                    engine.park(query)
                elif query.held and rng.random() < 0.5:
                    engine.resume(query)
        engine.check_integrity()
        return [query.output_token_ids for query in queries]

    assert tokens(graphs=True) == tokens(graphs=False)


@pytest.mark.usefixtures("card_on_cpu")
def test_chunks_fill_their_forwards_but_for_the_last(
    make_engine: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward takes as long as if it were full."""
    monkeypatch.setattr(prompt_steps, "SIZES", (8, 16, 32))
    engine = make_engine(
        families.make_family("llama"), rows=2, batch="ring", chunk_tokens=12, max_query_tokens=64
    )
    chunks, run = [], PromptSteps.run

    def noting(steps: PromptSteps, parts: list[Part]) -> torch.Tensor:
        chunks.append([len(part.token_ids) for part in parts])
        return run(steps, parts)

    monkeypatch.setattr(PromptSteps, "run", noting)
    query = engine.submit([5 + place for place in range(34)], SamplingParams(max_tokens=2, ignore_eos=True))
    while query.live:
        engine.step()
    assert chunks == [[8], [8], [8], [10]]


_NEW = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.clone.default)


class Room(TorchDispatchMode):
    """Memory in which no new block of bytes may be larger than the room that is left.

    Attributes:
        refused: Bytes of the blocks there was no room for.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self.refused: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _NEW and found.dtype == torch.uint8 and found.nbytes > self._most_bytes:
            self.refused.append(found.nbytes)
            raise torch.OutOfMemoryError("CUDA out of memory, in a test")
        return found


@pytest.mark.usefixtures("card_on_cpu")
def test_a_prompt_takes_no_more_than_it_needs_where_memory_is_short() -> None:
    """M6: room for later chunks is a wish; without room for the chunk itself nothing has changed."""
    stand = Stand("llama", "cpu")
    plain, short, tokens = CapturedPrompt(stand.steps), CapturedPrompt(stand.steps), stand.tokens(60)
    nbytes = stand.layout.record_bytes
    with Room(59 * nbytes) as room:
        for first in range(0, 56, 8):
            short.step({0: tokens[first : first + 8]})
        assert room.refused == [64 * nbytes, 80 * nbytes, 96 * nbytes]
        with pytest.raises(torch.OutOfMemoryError):
            short.step({0: tokens[56:]})
    assert room.refused[3:] == [112 * nbytes, 60 * nbytes]
    short.check_integrity()
    plain.step({0: tokens[:56]})
    stand.check(short.step({0: tokens[56:]}), plain.step({0: tokens[56:]}))
    stand.check_slices(short.extract(0), plain.extract(0))


@pytest.mark.usefixtures("card_on_cpu")
def test_records_and_copies_of_them_take_blocks_of_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one prompt takes the block that another has left."""
    stand, taken = Stand("llama", "cpu"), []

    def noting(n_tokens: int, *rest: Any) -> torch.Tensor:
        taken.append(n_tokens)
        return empty_records(n_tokens, *rest)

    monkeypatch.setattr(prompt_batch, "empty_records", noting)
    prompt = CapturedPrompt(stand.steps)
    for count in (8, 1):
        prompt.step({0: stand.tokens(count)})
    assert prompt.extract(0).n_tokens == 9
    assert taken == [8, 16, 9]


@pytest.mark.usefixtures("card_on_cpu")
def test_a_half_done_prompt_is_kept_where_there_is_memory_for_just_the_whole_prompt(
    make_engine: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: it is parked without memory for a copy, and goes on without more than its own tokens need."""
    monkeypatch.setattr(prompt_steps, "SIZES", (8, 16))
    engine = make_engine(
        families.make_family("llama"), rows=2, batch="ring", chunk_tokens=8, max_query_tokens=128
    )
    nbytes = engine.residency.batch.layout.record_bytes
    prompt = [3 + 7 * place % 90 for place in range(90)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    undisturbed = engine.submit(prompt, params)
    engine.run_until_idle()
    query = engine.submit(prompt, params)
    with Room(90 * nbytes) as room:
        for _ in range(5):
            engine.step()
        with Room(39 * nbytes) as none:
            engine.park(query)
        assert len(none.refused) == 1
        assert query.on_host_tokens == 40
        engine.resume(query)
        engine.run_until_idle()
    assert room.refused == []
    assert engine.counters["out_of_memory"] == 0
    assert query.output_token_ids == undisturbed.output_token_ids


@pytest.mark.parametrize("most", [1, 64, 65, 256, 2048, 10**6])
def test_sizes_hold_every_chunk_or_end_at_the_largest(most: int) -> None:
    sizes = prompt_sizes(most)
    assert sizes[-1] >= min(most, prompt_steps.SIZES[-1])
    assert len(sizes) == 1 or sizes[-2] < most


def test_too_many_prompts_or_tokens_are_refused(card_on_cpu: list[Any]) -> None:
    stand = Stand("llama", "cpu")
    for parts in ([Part([5], 0, 0)] * (MOST_PARTS + 1), [Part([5] * 25, 0, 0)], []):
        with pytest.raises(ValueError, match="don't fit"):
            stand.steps.run(parts)
    assert len(card_on_cpu) == len(SIZES)


@pytest.mark.parametrize("family", ["deepseek_v3", "llama4_text", "bloom"])
def test_what_the_kernel_can_not_do_is_refused(family: str, card_on_cpu: list[Any]) -> None:
    """Keys computed from latents, chunked masks, a bias by position: nothing is captured, and why is said."""
    model = CausalModel(families.make_family(family), "cpu")
    steps = PromptSteps(model, probe_layout(model), SIZES)
    assert not steps.graphs.sizes
    assert steps.graphs.why_no_more
    assert not card_on_cpu


def test_blocks_tell_every_token_once_and_the_longest_ranges_first() -> None:
    anchor = torch.zeros(64, dtype=torch.uint8)
    inputs = PromptInputs(64, 16, anchor)
    start = anchor.data_ptr()
    for parts in ([(40, 0)], [(17, 100), (1, 3), (30, 0)], [(1, 0)] * MOST_PARTS, [(64, 7)]):
        inputs.fill([Part([9] * count, past, start + 640 * n) for n, (count, past) in enumerate(parts)])
        table = [block for block in inputs.blocks.T.tolist() if block[1]]
        told = sorted(token + at for token, count, *_ in table for at in range(count))
        assert told == list(range(64))
        assert [block[2] for block in table] == sorted((block[2] for block in table), reverse=True)
        lengths = [count for count, _ in parts]
        ends = [sum(lengths[: n + 1]) - 1 for n in range(len(lengths))]
        assert inputs.last.tolist() == ends + [ends[-1]] * (MOST_PARTS - len(ends))
        used = sum(lengths)
        assert inputs.position_ids[0, :used].tolist() == [
            past + at for count, past in parts for at in range(count)
        ]
        expected = [
            640 * n + 64 * (past + at) for n, (count, past) in enumerate(parts) for at in range(count)
        ]
        assert inputs.places[:used].tolist() == expected
        assert not inputs.places[used:].any()
