"""What a tenant may take from one model's queue; the callers bring it, the scripts enforce it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from batond.daemon.errors import ConfigError

MIN_WEIGHT: Final = 1e-3
MAX_WEIGHT: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """A tenant's share and quotas; 0 is no limit. All daemons of a queue count together.

    Attributes:
        weight: Share of the tokens of a class, relative to the other tenants that wait in it; 0.001 to 1000.
        queued: Most waiting jobs of the tenant, in all classes; more are refused at submit.
        running: Most claimed jobs of the tenant; at the limit its waiting jobs are skipped.
        tokens_per_minute: Prompt tokens (at the first claim) and output tokens (when committed) of the last
            minute. A tenant that has used as much is skipped until time lets it go on; what runs, runs on.

    Raises:
        ConfigError: A value is out of range.
    """

    weight: float = 1.0
    queued: int = 0
    running: int = 0
    tokens_per_minute: int = 0

    def __post_init__(self) -> None:
        """Refuse what the scripts can't count with."""
        if not (math.isfinite(self.weight) and MIN_WEIGHT <= self.weight <= MAX_WEIGHT):
            raise ConfigError(
                f"a tenant's weight must be from {MIN_WEIGHT} to {MAX_WEIGHT}, not {self.weight}",
                field="weight",
            )
        for field in ("queued", "running", "tokens_per_minute"):
            if not 0 <= getattr(self, field) <= 1 << 53:
                raise ConfigError(f"a tenant's {field} must not be negative", field=field)


NO_LIMITS: Final = TenantLimits()
