"""A neighbour takes most of the memory while queries run, and leaves: nothing fails, and no token changes.

    undisturbed    all queries, nobody beside them
    disturbed      the same queries on the same engine; the neighbour takes 30, 45, 60 % of the memory, gives
                   half of it back, and goes

On a card the neighbour is a process, and the engine is told by NVML. On a CPU both are a script, and seconds
are the script's: one reading, twenty a second, for each step.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from batond.bench.gpu.machine import require_device
from batond.bench.models import tiny_model
from batond.bench.neighbours import CardNeighbour, ScriptedNeighbour
from batond.bench.workloads import Request
from batond.daemon.engine import LocalEngine, SamplingParams
from batond.daemon.engine.governing import Governing, make_governing
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.errors import ConfigError
from batond.daemon.memory.governor import Governor, Watermarks
from batond.daemon.memory.host import read_limits
from batond.daemon.wire.messages import QueryState
from batond.daemon.wire.settings import MemorySettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from batond.bench.neighbours import Neighbour
    from batond.daemon.engine.queries.query import Query

#: Once so much of all tokens is there, the neighbour shall hold such a part of the memory.
SCRIPT: Final = ((0.08, 0.30), (0.12, 0.45), (0.16, 0.60), (0.26, 0.30), (0.30, 0.0))
#: The next part of the script waits so long for the one before.
MOST_SHRINK_S: Final = 5.0
#: For so long use stays below the high watermark when it counts as being there.
CALM_S: Final = 0.25
#: Part of the memory that the queries' KV takes when nobody is beside them.
KV_SHARE: Final = 0.55
_LAYERS, _HEADS, _HEAD_DIM = 8, 512, 128
#: Few weights and much KV, 2 MiB a token: 200 short queries fill a card, and compute hardly anything. Few
#: layers, because whatever is not captured costs the host by the layer.
CARD_CONFIG: Final = LlamaConfig(
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=_LAYERS,
    num_attention_heads=_HEADS,
    num_key_value_heads=_HEADS,
    head_dim=_HEAD_DIM,
    max_position_embeddings=4096,
)
_HIGH: Final = Watermarks().high


class Moment(NamedTuple):
    """What is there after a step.

    Attributes:
        at_s: Clock of the neighbour.
        wanted_bytes: What the neighbour is told to hold.
        neighbour_bytes: What it holds.
        used_bytes: Of the memory, by whomever, as of the governor's last reading.
        total_bytes: All there is, as of that.
        kv_bytes: That the batch has committed or pooled.
        rows: In use.
        row_limit: That may be in use.
        parked: Queries parked.
        live: Queries not ended.
        tokens: Emitted since the start, by all.
        state: Of the governor.
    """

    at_s: float
    wanted_bytes: int
    neighbour_bytes: int
    used_bytes: int
    total_bytes: int
    kv_bytes: int
    rows: int
    row_limit: int
    parked: int
    live: int
    tokens: int
    state: str


@dataclass(slots=True)
class Course:
    """One run of all queries.

    Attributes:
        outputs: Tokens of each query.
        failed: Why queries failed.
        moments: After each step.
        total_bytes: Of the memory.
        rows: Of the batch.
        parks: Queries parked, each time counted.
        dropped: Parks that kept nothing: computed again.
        recomputed_tokens: Computed again.
    """

    outputs: list[list[int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    total_bytes: int = 0
    rows: int = 0
    parks: int = 0
    dropped: int = 0
    recomputed_tokens: int = 0

    @property
    def began_s(self) -> float:
        """Clock after the first step."""
        return self.moments[0].at_s

    @property
    def seconds(self) -> float:
        """From the first step to the last."""
        return self.moments[-1].at_s - self.began_s

    def full_rate(self, since_s: float) -> tuple[float, float]:
        """Tokens a second, and for how many seconds, from the first full batch to the end of the line.

        Args:
            since_s: Clock; what came before does not count.
        """
        full = [one for one in self.moments if one.at_s >= since_s and one.live >= self.rows]
        start = next((place for place, one in enumerate(full) if one.rows == self.rows), None)
        if start is None or len(full) - start < 2:  # noqa: PLR2004 - a rate is between two
            return 0.0, 0.0
        first, last = full[start], full[-1]
        seconds = last.at_s - first.at_s
        return (last.tokens - first.tokens) / seconds, seconds


@dataclass(frozen=True, slots=True)
class Take:
    """The neighbour wanted more.

    Attributes:
        at_s: When it was told.
        part: Of the memory, that it shall hold.
        pressed: Whether use rose above the high watermark.
        relieved_s: Until it had it, and use was below the high watermark and stayed there; None is never.
        kv_before_bytes: Of the batch when it was told.
        kv_after_bytes: Of the batch when it was relieved, or at the end.
    """

    at_s: float
    part: float
    pressed: bool
    relieved_s: float | None
    kv_before_bytes: int
    kv_after_bytes: int


@dataclass(frozen=True, slots=True)
class Stand:
    """What a run needs.

    Attributes:
        engine: With nothing in it, and a governor.
        neighbour: Beside it.
        requests: The queries.
        total_bytes: Of the memory.
    """

    engine: LocalEngine
    neighbour: Neighbour
    requests: Sequence[Request]
    total_bytes: int

    def close(self) -> None:
        """Give all back."""
        self.engine.close()
        self.neighbour.close()


def make_stand(device_name: str, queries: int, seed: int) -> Stand:
    """What a run needs, on a card or on the CPU.

    Args:
        device_name: As torch has it.
        queries: Number of queries.
        seed: Of lengths, tokens and weights.

    Raises:
        ConfigError: There is no such device, or its memory can't be followed.
    """
    device = require_device(device_name)
    return on_cpu(queries, seed) if device.type == "cpu" else on_card(device, queries, seed)


def on_card(device: torch.device, queries: int, seed: int) -> Stand:
    """An engine that fills half of a card, and a process beside it.

    Raises:
        ConfigError: The card's memory can't be read by NVML.
    """
    governor = make_governing(MemorySettings(governor="on"), str(device), arena="elastic")
    neighbour = CardNeighbour(device)  # Not before: it would come while the context is measured.
    try:
        torch.manual_seed(seed)
        with device:
            model = AutoModelForCausalLM.from_config(copy.deepcopy(CARD_CONFIG), dtype=torch.bfloat16)
        requests = make_requests(CARD_CONFIG.vocab_size, queries, (128, 768), (128, 384), seed)
        lengths = [len(request.prompt_token_ids) + request.output_tokens for request in requests]
        token_bytes = 2 * _LAYERS * _HEADS * _HEAD_DIM * torch.bfloat16.itemsize
        mean_tokens = (
            sum(lengths) / queries - sum(request.output_tokens for request in requests) / queries / 2
        )
        total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        pool_bytes = min(read_limits().tightest(pin=False, fraction=0.4)[0], int(0.3 * total_bytes))
        engine = LocalEngine(
            CausalModel(model, device),
            rows=int(KV_SHARE * total_bytes / (mean_tokens * token_bytes)),
            batch="ring",
            max_query_tokens=max(lengths),
            host_pool_bytes=pool_bytes,
            deterministic=True,  # Bits depend on no mate: tokens can be compared in half precision.
            compiled=False,
            arena="elastic",
            session_bytes=0,
            governor=governor,
        )
        neighbour.wait_ready()
    except BaseException:
        neighbour.close()
        raise
    if not engine.residency.batch.memory.elastic:
        raise ConfigError(f"the batch does not follow memory here: {engine.batch_reason}")
    return Stand(engine, neighbour, requests, total_bytes)


def on_cpu(queries: int, seed: int) -> Stand:
    """A small engine in float32, and a script beside it."""
    neighbour = ScriptedNeighbour(total_tokens=1000, name="a scripted memory")
    governor = Governing(
        neighbour, Governor(), threaded=False, own_use=neighbour.own_use, clock=neighbour.clock
    )
    model = tiny_model()
    requests = make_requests(model.config.vocab_size, queries, (8, 48), (16, 48), seed)
    mean_tokens = 28 + 16
    engine = LocalEngine(
        model,
        rows=int(KV_SHARE * neighbour.total_tokens / mean_tokens),
        batch="ring",
        max_query_tokens=96,
        arena="elastic",
        session_bytes=0,
        governor=governor,
    )
    record_bytes = engine.residency.batch.layout.record_bytes
    return Stand(engine, neighbour, requests, neighbour.total_tokens * record_bytes)


def make_requests(
    vocab_size: int, queries: int, prompt: tuple[int, int], output: tuple[int, int], seed: int
) -> list[Request]:
    """Queries of random lengths, of which any few in a row are about as long as all: rates can be compared.

    Args:
        vocab_size: Token ids are drawn below it.
        queries: Number of queries.
        prompt: Fewest and most tokens.
        output: Likewise.
        seed: Of lengths and token ids.
    """
    rng = random.Random(seed)  # noqa: S311 - a repeatable workload, not a secret
    lengths = zip(_spread(rng, queries, *prompt), _spread(rng, queries, *output), strict=True)
    return [
        Request(tuple(rng.randrange(3, vocab_size) for _ in range(tokens)), output_tokens)
        for tokens, output_tokens in lengths
    ]


def _spread(rng: random.Random, count: int, low: int, high: int) -> Iterator[int]:
    """Numbers from low to high, of which each eight in a row have one in each eighth of the range."""
    eighths: list[int] = []
    for _ in range(count):
        eighths = eighths or rng.sample(range(8), 8)
        yield low + int((eighths.pop() + rng.random()) / 8 * (high - low + 1))


def run(stand: Stand, script: Sequence[tuple[float, float]] = ()) -> Course:
    """Run all queries, submitted at once, every other one greedy, while the neighbour follows its script.

    Args:
        stand: Engine, neighbour and queries.
        script: After which part of all tokens the neighbour shall hold which part of the memory.
    """
    engine, neighbour = stand.engine, stand.neighbour
    before = dict(engine.counters)
    queries = [
        engine.submit(
            request.prompt_token_ids,
            SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0.8 * (place % 2)),
            seed=place,
        )
        for place, request in enumerate(stand.requests)
    ]
    course = Course(total_bytes=stand.total_bytes, rows=engine.rows)
    cue, told_s = 0, -MOST_SHRINK_S
    due = [part * sum(request.output_tokens for request in stand.requests) for part, _ in script]
    while engine.queries or cue < len(script):
        engine.step()
        course.moments.append(moment := _look(stand, queries, before.get("output_tokens", 0)))
        settled = _relieved(moment) or moment.at_s - told_s > MOST_SHRINK_S
        if cue < len(script) and settled and (moment.tokens >= due[cue] or not engine.queries):
            neighbour.want(int(script[cue][1] * stand.total_bytes))
            cue, told_s = cue + 1, moment.at_s
    course.outputs = [list(query.output_token_ids) for query in queries]
    course.failed = [f"{query.query_id}: {query.error}" for query in queries if query.error is not None]
    course.parks, course.dropped, course.recomputed_tokens = (
        engine.counters[name] - before.get(name, 0)
        for name in ("parks", "parks_dropped", "recomputed_tokens")
    )
    return course


def _look(stand: Stand, queries: Sequence[Query], tokens_before: int) -> Moment:
    engine, neighbour = stand.engine, stand.neighbour
    use, status = engine.residency.batch.memory, engine.memory_status
    return Moment(
        at_s=neighbour.clock(),
        wanted_bytes=neighbour.wanted_bytes,
        neighbour_bytes=neighbour.held_bytes,
        used_bytes=0 if status is None else status.total_bytes - status.free_bytes,
        total_bytes=stand.total_bytes if status is None else status.total_bytes,
        kv_bytes=use.committed_bytes + use.pooled_bytes,
        rows=len(engine.residency.occupied),
        row_limit=engine.rows if status is None else status.limits.rows,
        parked=sum(query.state is QueryState.PARKED for query in queries),
        live=len(engine.queries),
        tokens=engine.counters["output_tokens"] - tokens_before,
        state="off" if status is None else str(status.limits.state),
    )


def _pressed(moment: Moment) -> bool:
    """Whether use is above the high watermark."""
    return moment.used_bytes > _HIGH * moment.total_bytes


def _relieved(moment: Moment) -> bool:
    """Whether the neighbour has what it wants, and use is below the high watermark."""
    return moment.neighbour_bytes >= moment.wanted_bytes and not _pressed(moment)


def takes(course: Course) -> list[Take]:
    """What came of each time that the neighbour wanted more."""
    found: list[Take] = []
    moments = course.moments
    for place in range(1, len(moments)):
        before, told = moments[place - 1], moments[place]
        if told.wanted_bytes <= before.wanted_bytes:
            continue
        span = _until_told_again(moments[place:])
        calm = _first_calm(span)
        found.append(
            Take(
                at_s=before.at_s - course.began_s,
                part=told.wanted_bytes / course.total_bytes,
                pressed=any(map(_pressed, span)),
                relieved_s=None if calm is None else calm.at_s - before.at_s,
                kv_before_bytes=before.kv_bytes,
                kv_after_bytes=(calm or span[-1]).kv_bytes,
            )
        )
    return found


def _until_told_again(moments: Sequence[Moment]) -> list[Moment]:
    wanted_bytes = moments[0].wanted_bytes
    return list(itertools.takewhile(lambda one: one.wanted_bytes == wanted_bytes, moments))


def _first_calm(span: Sequence[Moment]) -> Moment | None:
    """The first moment from which on all is well for a while: a reading is of a little before."""
    calm = None
    for moment in span:
        if not _relieved(moment):
            calm = None
        elif calm is None:
            calm = moment
        elif moment.at_s - calm.at_s >= CALM_S:
            return calm
    return calm


def left_at_s(course: Course) -> float | None:
    """When the neighbour held nothing any more, having held something; None is never."""
    held = [place for place, one in enumerate(course.moments) if one.neighbour_bytes]
    if not held or held[-1] + 1 >= len(course.moments):
        return None
    return course.moments[held[-1] + 1].at_s


def measure(stand: Stand, tell: Callable[[str], object] = str) -> tuple[Course, Course, float]:
    """Both runs; returns them and the seconds that they took.

    Args:
        stand: Is closed afterwards.
        tell: Is told what was done, in words.
    """
    began_s = time.monotonic()
    try:
        tell(f"an engine of {stand.engine.rows} rows: {stand.engine.batch_reason}")
        alone = run(stand)
        tell(f"undisturbed: {alone.seconds:.1f} s, {alone.parks} parks")
        beside = run(stand, SCRIPT)
        tell(f"beside the neighbour: {beside.seconds:.1f} s, {beside.parks} parks")
    finally:
        stand.close()
    return alone, beside, time.monotonic() - began_s
