"""What is simulated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from batond.daemon.errors import ConfigError
from batond.daemon.queue.limits import NO_LIMITS, TenantLimits
from batond.daemon.scheduler.planner import PlannerLimits
from batond.policies.classes import SlaClasses

if TYPE_CHECKING:
    from batond.daemon.simulator.costs import StepCosts
    from batond.policies.registry import PolicyOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A fleet of equal daemons on one queue.

    Attributes:
        costs: Of their steps.
        daemons: How many.
        rows: Of each batch.
        chunk_tokens: Prompt tokens computed between two decode steps; "auto" follows the inter-token target
            of the most urgent class that runs, as in a daemon.
        ready_limit: Prefilled queries kept ahead of free rows.
        claim_ahead: Jobs of a class claimed beyond the rows.
        host_pool_bytes: For parked KV, of each daemon.
        max_tokens: Output tokens that every request asks for, if it emits fewer; 0 asks for exactly those.
        overcommit: Reserve KV for the output expected of a class, not for all that is asked for. Where just
            what is emitted is asked for, there is nothing to expect.
        classes: SLA classes.
        limits: Quantum and park cap.
        policy_options: Options of policies by name, as `[policy_options]` has them for a daemon.
        tenants: Shares and quotas; weight 1 and no quota where none is named.
        max_queued: Jobs that may wait; more are refused. 0 is no bound.
        noise: Steps take up to this part longer or shorter, evenly drawn; 0 is exact.
        seed: Of the noise, and of who is first of daemons that are free at the same time.

    Raises:
        ConfigError: A value has no meaning.
    """

    costs: StepCosts
    daemons: int = 1
    rows: int = 64
    chunk_tokens: Literal["auto"] | int = "auto"
    ready_limit: int = 1
    claim_ahead: int = 2
    host_pool_bytes: int = 64 << 30
    max_tokens: int = 0
    overcommit: bool = True
    classes: SlaClasses = field(default_factory=SlaClasses)
    limits: PlannerLimits = field(default_factory=PlannerLimits)
    policy_options: PolicyOptions = field(default_factory=dict)
    tenants: dict[str, TenantLimits] = field(default_factory=dict)
    max_queued: int = 10_000
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what can't be simulated."""
        least = {
            "daemons": 1,
            "rows": 1,
            "ready_limit": 0,
            "host_pool_bytes": 0,
            "max_tokens": 0,
            "max_queued": 0,
        }
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} must be at least {lowest}, not {getattr(self, name)}", field=name)
        if self.chunk_tokens != "auto" and self.chunk_tokens < 1:
            raise ConfigError(
                f'chunk_tokens must be "auto" or at least 1, not {self.chunk_tokens}', field="chunk_tokens"
            )
        if not 0 <= self.noise < 1:
            raise ConfigError(f"noise must be from 0 to below 1, not {self.noise}", field="noise")

    def weight(self, tenant: str) -> float:
        """Share of a tenant."""
        return self.tenants.get(tenant, NO_LIMITS).weight

    def unbounded(self) -> Setup:
        """The same fleet without quotas and bounds on waiting."""
        tenants = {name: TenantLimits(weight=one.weight) for name, one in self.tenants.items()}
        classes = SlaClasses(replace(sla, longest_queue_s=None) for sla in self.classes)
        return replace(self, tenants=tenants, max_queued=0, classes=classes)
