"""Everything in one run: ceilings of the device, then for each shape engine, parks, prompts and decode steps.

device    copies, matrix product                              -> Ceilings
shape     weights made on the device from the configuration
          the engine chooses its batch and proves it exact    -> Urgent (the whole engine), PromptTime
          its batch, filled with made-up KV                   -> Parking, DecodeStep, Attention
"""

from __future__ import annotations

import copy
import gc
import json
import time
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoModelForCausalLM

from batond.bench.gpu import ceilings as ceilings_of
from batond.bench.gpu import decode, machine, parking, prompts
from batond.bench.gpu.sizes import (
    SHAPES,
    Cell,
    LeftOut,
    cells,
    choose_cells,
    gib,
    most_rows,
    require_room,
    sizes_of,
)
from batond.bench.gpu.urgent import URGENT_TOKENS, EngineBench, Urgent
from batond.daemon.engine.batch.padded import PaddedBatch
from batond.daemon.engine.batch.ring import RingBatch
from batond.daemon.engine.batch.ring_size import RING_FRACTION
from batond.daemon.engine.local import LocalEngine
from batond.daemon.engine.model.causal import CausalModel
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batond.bench.gpu.ceilings import Ceilings
    from batond.bench.gpu.decode import Attention, DecodeStep, NewBatch
    from batond.bench.gpu.machine import CardState
    from batond.bench.gpu.parking import Parking
    from batond.bench.gpu.prompts import PromptTime
    from batond.bench.gpu.sizes import Sizes
    from batond.daemon.engine.batch.prefill import PromptBatch

DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: Rows of the engine that is asked for urgent answers, if they fit.
ENGINE_ROWS: Final = 32
#: Steps that a full engine makes from its filling to its last urgent answer, and more.
_ENGINE_SPARE_COLUMNS: Final = 512
_POOL_SLICES: Final = 4
_ROUNDS: Final = 20
_QUICK_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        shapes: Names of `sizes.SHAPES`.
        dtype: Of weights and KV.
        batches: Rows.
        contexts: Tokens of each row.
        prompt_tokens: Lengths of prompts.
        rounds: Of each measurement.
        device: "cuda", "cuda:1", ... or "cpu", where times mean nothing.
    """

    shapes: tuple[str, ...] = ("llama-2-7b", "llama-3-8b")
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    contexts: tuple[int, ...] = (512, 2048)
    prompt_tokens: tuple[int, ...] = prompts.PROMPT_TOKENS
    rounds: int = _ROUNDS
    device: str = "cuda"

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        unknown = [name for name in self.shapes if name not in SHAPES]
        if unknown or not self.shapes:
            raise ConfigError(
                f"--shape must be of {', '.join(SHAPES)}, not {', '.join(unknown) or 'nothing'}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        for name in ("batches", "contexts", "prompt_tokens"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ConfigError(f"{name} must be numbers of at least 1, not {values}")

    def quick(self) -> Options:
        """Fewer of everything that was not asked for: a look at whether something has changed."""

        def fewer(name: str, some: Any) -> Any:
            given = getattr(self, name)
            return some if given == getattr(DEFAULTS, name) else given

        return Options(
            shapes=fewer("shapes", ("llama-3-8b",)),
            dtype=self.dtype,
            batches=fewer("batches", (1, 32)),
            contexts=fewer("contexts", (512,)),
            prompt_tokens=(128, 1024),
            rounds=_QUICK_ROUNDS,
            device=self.device,
        )


DEFAULTS: Final = Options()


@dataclass(slots=True, kw_only=True)
class ShapeReport:
    """One shape.

    Attributes:
        shape: Its name.
        sizes: Bytes and operations.
        build_s: Time in which its weights were made.
        engine_s: Time in which the engine chose its batch and proved it.
        batch: What it chose, and why.
        steps: Decode steps, a cell each.
        attention: Decode attention alone, a cell each.
        prompts: A length each.
        parking: Copies of a row.
        urgent: Answers of the engine.
        left_out: What could not be measured.
        seconds: All of it.
    """

    shape: str
    sizes: Sizes
    build_s: float = 0.0
    engine_s: float = 0.0
    batch: str = ""
    steps: list[DecodeStep] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    prompts: list[PromptTime] = field(default_factory=list)
    parking: Parking | None = None
    urgent: Urgent | None = None
    left_out: list[LeftOut] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """Everything that was measured.

    Attributes:
        options: What was asked for.
        machine: Card, driver, versions.
        before: The card before the run.
        after: The card at the end of its last measurement.
        ceilings: Of the device.
        shapes: A model each.
    """

    options: Options
    machine: dict[str, str]
    before: CardState | None
    after: CardState | None
    ceilings: Ceilings
    shapes: list[ShapeReport]


def run(options: Options, tell: Callable[[str], None]) -> GpuReport:
    """Measure everything, one after the other; interrupted, it returns what it has.

    Args:
        options: What to measure.
        tell: Hears what is being done.

    Raises:
        ConfigError: There is no such device, or a shape's weights don't fit into it.
    """
    device = machine.require_device(options.device)
    dtype = DTYPES[options.dtype]
    sizes = {name: sizes_of(SHAPES[name], dtype) for name in options.shapes}
    for name, one in sizes.items():
        require_room(name, one, free_bytes=machine.free_bytes(device), device=options.device)
    about, before = machine.describe(device), machine.card_state(device)
    tell("copies and matrix product")
    ceilings = ceilings_of.measure(device, dtype)
    shapes: list[ShapeReport] = []
    for name in options.shapes:
        shape = _Shape(name, sizes=sizes[name], options=options, ceilings=ceilings, device=device, tell=tell)
        shapes.append(shape.report)
        try:
            shape.measure()
        except KeyboardInterrupt:  # What was measured is worth minutes of a card.
            shape.report.left_out.append(LeftOut("the rest", "interrupted"))
            break
    return GpuReport(
        options=options,
        machine=about,
        before=before,
        after=machine.card_state(device),
        ceilings=ceilings,
        shapes=shapes,
    )


class _Shape:
    """Measures one shape.

    Attributes:
        report: Filled in as it is measured.
    """

    def __init__(
        self,
        name: str,
        *,
        sizes: Sizes,
        options: Options,
        ceilings: Ceilings,
        device: torch.device,
        tell: Callable[[str], None],
    ) -> None:
        self._options, self._ceilings, self._device = options, ceilings, device
        self._sizes = sizes
        self._tell: Callable[[str], None] = lambda what: tell(f"{name}: {what}")
        self.report = ShapeReport(shape=name, sizes=sizes)

    def measure(self) -> None:
        """All of it; the device is as empty afterwards as before."""
        began_s = time.perf_counter()
        self._tell(f"making {gib(self._sizes.weight_bytes)} of weights")
        model = build(self.report.shape, DTYPES[self._options.dtype], self._device)
        self.report.build_s = time.perf_counter() - began_s
        rows = self._engine_rows()
        new_batch, heads = self._measure_engine(model, rows), model.config.num_attention_heads
        self._measure_parking(new_batch, rows)
        for cell in self._fitting():
            self._measure_cell(new_batch, cell, heads)
        del model, new_batch
        _give_back()
        self.report.seconds = time.perf_counter() - began_s

    def _engine_rows(self) -> int:
        """Rows of the engine: as many as asked for, up to `ENGINE_ROWS`, whose ring it would take."""
        room_bytes = machine.free_bytes(self._device) * RING_FRACTION
        columns = parking.PARKED_TOKENS + _ENGINE_SPARE_COLUMNS
        limit = ENGINE_ROWS
        rows = most_rows(
            self._options.batches, self._sizes, columns=columns, room_bytes=room_bytes, limit=limit
        )
        if not rows:
            raise ConfigError(
                f"{self.report.shape}: {gib(room_bytes)}, half of what is free, holds no ring of {columns}"
                f" columns for {min(self._options.batches)} row(s): free the device, or take fewer rows"
                " (--batch) or another --shape"
            )
        return rows

    def _measure_engine(self, model: CausalModel, rows: int) -> NewBatch:
        """Let the engine choose its batch, and measure what needs all of it; it is closed afterwards."""
        self._tell(f"engine of {rows} rows: choosing and proving its batch")
        began_s, sizes = time.perf_counter(), self._sizes
        columns = parking.PARKED_TOKENS + _ENGINE_SPARE_COLUMNS
        engine = LocalEngine(
            model,
            rows=rows,
            policy="priority",
            host_pool_bytes=_POOL_SLICES * columns * sizes.kv_token_bytes,
            chunk_tokens="auto",
            max_query_tokens=columns,
            session_bytes=0,
        )
        engine.residency.store.pool.warm_up().join()
        self.report.engine_s = time.perf_counter() - began_s
        self.report.batch = f"{engine.batch_kind}: {engine.batch_reason}"
        try:
            self._measure_prompts(engine.residency._new_prefill_batch)  # noqa: SLF001 - nobody else asks
            bench = EngineBench(engine, sizes.vocab_size, self._options.rounds)
            self.report.urgent = bench.run(URGENT_TOKENS, parking.PARKED_TOKENS, self._tell)
        finally:
            engine.close()
        batch = engine.residency.batch
        layout, card = batch.layout, batch.card if isinstance(batch, RingBatch) else None
        del engine, bench, batch
        _give_back()
        if card is not None:  # All rows are in use: one captured step will do.
            use = replace(card, one_size=True)
            return lambda count, capacity: RingBatch(model, count, layout, capacity, card=use)
        return lambda count, _: PaddedBatch(model, count, layout)

    def _measure_prompts(self, new_batch: Callable[[], PromptBatch]) -> None:
        for tokens in self._options.prompt_tokens:
            self._tell(f"prompts of {tokens} tokens")
            self.report.prompts.append(
                prompts.measure(
                    new_batch,
                    tokens,
                    self._sizes,
                    self._ceilings,
                    self._device,
                    rounds=self._options.rounds,
                )
            )

    def _measure_parking(self, new_batch: NewBatch, rows: int) -> None:
        self._tell(f"copies of a row of {parking.PARKED_TOKENS} tokens")
        self.report.parking = parking.measure(
            new_batch, rows, parking.PARKED_TOKENS, self._ceilings, rounds=self._options.rounds
        )
        _give_back()

    def _fitting(self) -> list[Cell]:
        """The cells that fit; the others are noted."""
        fitting, left_out = choose_cells(
            cells(self._options.batches, self._options.contexts),
            self._sizes,
            free_bytes=machine.free_bytes(self._device),
            spare_columns=decode.spare_columns(self._options.rounds),
        )
        self.report.left_out += left_out
        return fitting

    def _measure_cell(self, new_batch: NewBatch, cell: Cell, heads: int) -> None:
        self._tell(f"decode {cell}")
        rounds = self._options.rounds
        step = decode.measure_step(new_batch, cell, self._sizes, self._ceilings, rounds=rounds)
        self.report.steps.append(step)
        layout = new_batch(1, 1).layout
        _give_back()
        if self._device.type != "cuda":
            return
        try:
            attention = decode.measure_attention(
                layout, heads, cell, self._ceilings, self._device, rounds=rounds
            )
        except ImportError:
            self.report.left_out.append(LeftOut(f"attention of {cell}", "Triton is not installed"))
        else:
            self.report.attention.append(attention)
        _give_back()


def build(shape: str, dtype: torch.dtype, device: torch.device) -> CausalModel:
    """A model of random weights, made on the device: nothing is loaded and nothing fetched."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[shape]), dtype=dtype)
    return CausalModel(model, device)


def _give_back() -> None:
    """Let memory of what was dropped be taken again."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write(path: Path, report: Any) -> None:
    """Write a report, a dataclass, as JSON."""
    path.write_text(json.dumps(plain(report), indent=2) + "\n")


def plain(value: Any) -> Any:
    """A dataclass as JSON has it; what it works out from its fields stands beside them."""
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        names += [name for name, kind in vars(type(value)).items() if isinstance(kind, property)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return value
