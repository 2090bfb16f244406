"""How long a step takes: a straight line through what the bench measured."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: `step_s + row_s * rows + cached_token_s * cached tokens`, and of prompts and parks.

    Attributes:
        step_s: Of a decode step, whatever is in it.
        row_s: Added by each row.
        cached_token_s: Added by each token in the KV of the rows.
        prefill_s: Of the prompts computed before a step, whatever their length.
        prefill_token_s: Added by each of their tokens.
        park_byte_s: For each byte parked or brought back, as far as the step waits for it.
        kv_token_bytes: KV of a token.
        kv_bytes: KV the batch may hold; 0 is no bound.

    Raises:
        ConfigError: A value is negative or no number, or steps or prompts take no time.
    """

    step_s: float
    row_s: float
    cached_token_s: float
    prefill_s: float
    prefill_token_s: float
    park_byte_s: float
    kv_token_bytes: int
    kv_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what would stop the clock."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"cost {field.name} must be a number from 0 on, not {value!r}")
        if not (self.step_s > 0 and self.prefill_token_s > 0):
            raise ConfigError("the costs step_s and prefill_token_s must be above 0")
        for name in ("kv_token_bytes", "kv_bytes"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"cost {name} must be a whole number, not {getattr(self, name)!r}")

    def decode_s(self, rows: int, cached_tokens: int, steps: int = 1) -> float:
        """Seconds of decode steps one after the other; every row grows by a token a step."""
        grown = rows * steps * (steps - 1) // 2
        flat_s = self.step_s + self.row_s * rows + self.cached_token_s * cached_tokens
        return steps * flat_s + self.cached_token_s * grown

    def prompts_s(self, tokens: int) -> float:
        """Seconds that prompt tokens take before a step."""
        return self.prefill_s + self.prefill_token_s * tokens if tokens else 0.0


#: `h100`: Llama-2-7B shapes in bfloat16, fitted within 4 % to decode steps of a prototype with CUDA graphs on
#: one H100 SXM (batch 1 to 64, 512 and 2048 tokens), prompts of 128 to 2048 tokens within 25 %; parks copy
#: beside the steps, only the gather counts. `cpu`: a 135M model in float32 on two cores, 75 tokens/s with one
#: row; the share of rows and prompts is an estimate. Measure your own for sizing.
PRESETS: Final = {
    "h100": StepCosts(
        step_s=6.4e-3,
        row_s=5e-6,
        cached_token_s=1.7e-7,
        prefill_s=3e-3,
        prefill_token_s=2e-5,
        park_byte_s=1.5e-12,
        kv_token_bytes=1 << 19,
        kv_bytes=48 << 30,
    ),
    "cpu": StepCosts(
        step_s=12e-3,
        row_s=1e-3,
        cached_token_s=2e-6,
        prefill_s=12e-3,
        prefill_token_s=1e-3,
        park_byte_s=3e-10,
        kv_token_bytes=45 << 10,
    ),
}


def load_costs(name: str, changes: Sequence[str] = ()) -> StepCosts:
    """Costs of a preset or a JSON file, with single values changed.

    Args:
        name: `h100`, `cpu`, or the path of a JSON object with the fields of `StepCosts`; fields it lacks are
            those of `h100`.
        changes: `field=value`.

    Raises:
        ConfigError: There is no such preset or file, or a field is unknown or makes no sense.
    """
    costs = PRESETS.get(name)
    given: dict[str, object] = {}
    if costs is None:
        costs, given = PRESETS["h100"], _read(Path(name))
    for change in changes:
        key, equals, value = change.partition("=")
        try:
            given[key.strip()] = json.loads(value) if equals else None
        except ValueError as error:
            raise ConfigError(f"cost {change!r} is not of the form step_s=0.01") from error
    known = [field.name for field in fields(StepCosts)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"unknown costs {', '.join(unknown)}; known are {', '.join(known)}")
    return replace(costs, **given)  # type: ignore[arg-type] # checked by __post_init__


def _read(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        presets = ", ".join(PRESETS)
        raise ConfigError(f"costs {path} are neither a preset ({presets}) nor JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"costs in {path} must be a JSON object")
    return values
