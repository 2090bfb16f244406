"""How many columns a ring gets: as many as the longest query has tokens, and as memory holds."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batond.daemon.errors import ConfigError
from batond.daemon.memory.host import read_limits

if TYPE_CHECKING:
    from batond.daemon.engine.model.causal import CausalModel
    from batond.daemon.engine.model.layout import RecordLayout

#: Part of the memory free at start that a ring may take; prompts, activations and host pool need the rest.
RING_FRACTION = 0.5
FEWEST_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class RingSize:
    """Size of a ring.

    Attributes:
        columns: Its columns, which bound a query's tokens.
        remark: What an operator should know, in words; "" if there is nothing.
    """

    columns: int
    remark: str = ""


def plan_ring(
    model: CausalModel,
    layout: RecordLayout,
    rows: int,
    max_query_tokens: int | None,
    *,
    elastic: bool = False,
) -> RingSize:
    """Size a ring.

    Args:
        model: The model; its context bounds every query.
        layout: Byte layout of a token.
        rows: Rows of the ring.
        max_query_tokens: Tokens a query must be allowed; None takes as many as fit.
        elastic: Memory follows the rows, and somebody sees to it that they hold no more than there is: one
            query must fit, not all of them at their longest.

    Raises:
        ConfigError: It can't be had; the message holds the largest number that can.
    """
    context = model.max_context_tokens
    filled_rows = 1 if elastic else rows
    column_bytes = filled_rows * layout.record_bytes
    room_bytes = ring_room_bytes(model.device)
    fitting = room_bytes // column_bytes
    wanted = min(max_query_tokens or context, context)
    if wanted <= fitting:
        return RingSize(wanted)
    if max_query_tokens is not None or fitting < FEWEST_COLUMNS:
        raise ConfigError(
            f"a ring of {filled_rows} rows for queries of {wanted} tokens needs {wanted * column_bytes}"
            f" bytes; {room_bytes}, half of what is free, may be taken: use max_query_tokens={fitting}"
            " or less, fewer rows, or the padded batch",
            max_query_tokens=wanted,
            largest=fitting,
        )
    return RingSize(fitting, f"; queries end at {fitting} of {context} tokens: memory holds no more columns")


def ring_room_bytes(device: torch.device) -> int:
    """What a ring may take of the memory that is free now."""
    if device.type == "cuda":
        gc.collect()  # What the probes leave behind counts as taken otherwise.
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0] * RING_FRACTION)
    return read_limits().tightest(pin=False, fraction=RING_FRACTION)[0]
