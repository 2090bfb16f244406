"""What is replayed, and on which daemon."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - typed fields that others look at
from typing import TYPE_CHECKING, Any, Literal

from batond.bench.local_daemon import DAEMON_PROGRAM, OPERATOR
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOST_POOL_BYTES = 1 << 29
DEFAULT_LOAD = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDaemon:
    """A daemon that is started for the replay and stopped after it.

    Attributes:
        rows: Of the batch.
        chunk_tokens: Prompt tokens between two decode steps, or "auto" as in `[engine]`.
        quantum_tokens: Tokens before a row may be taken; 16 is for lengths that were not divided.
        host_pool_bytes: Host RAM for parked KV.
        model: As in `[model] path`.
        device: As in `[model]`.
        dtype: As in `[model]`.
        threads: Of torch in the engine; 0 is its own choice.
        settings: Further keys of the configuration, by section.
        program: What Python runs, as `LocalDaemon` takes it.
        environment: Variables added to its environment.
    """

    rows: int = 4
    chunk_tokens: Literal["auto"] | int = 128
    quantum_tokens: int = 2
    host_pool_bytes: int = HOST_POOL_BYTES
    model: str = "smollm2"
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    program: Sequence[str] = DAEMON_PROGRAM
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDaemon:
    """A daemon that runs already, for others too perhaps.

    Attributes:
        address: As `batonctl --server` takes it.
        token: Of all tenants that `tokens` does not name, and of who exchanges the policy; empty is none.
        tokens: By tenant of the trace.
        root_ca: PEM file that vouches for it; None is no TLS.
        allow_plaintext_token: Send tokens to another host without TLS.
    """

    address: str
    token: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict)
    root_ca: Path | None = None
    allow_plaintext_token: bool = False

    def token_of(self, tenant: str) -> str | None:
        """What a tenant of the trace shows the daemon; None is nothing.

        Raises:
            ConfigError: Others have tokens, and it has none.
        """
        token = self.tokens.get(tenant, self.token)
        if self.tokens and not token:
            raise ConfigError(
                f"there is no token for the tenant {tenant!r}: name it in the file of tokens, or give a token"
                " for all others",
                field="tokens",
            )
        return token or None

    @property
    def operator_token(self) -> str | None:
        """Of who looks at the batch and exchanges the policy."""
        return self.tokens.get(OPERATOR, self.token) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is replayed.

    At most one of `rate`, `load` and `saturate` says when requests come; without any it is a load of
    1.1 where there are step times to tell the capacity from, else the trace's own rate.

    Attributes:
        trace: CSV as for `batond simulate`.
        policies: Registered policies, one after the other; none is the one a running daemon has.
        classes: Class by tenant of the trace.
        share: Class by lot: parts of the requests by class; they need not sum to 1.
        fit_tokens: Rows with more prompt and output tokens are left out; 0 leaves none out.
        start_s: When the window begins in the trace; None is where most requests arrive.
        window_s: Only so many seconds of the trace; 0 is all.
        requests: Kept of them, evenly; 0 is all.
        shrink: Prompt and output lengths are divided by it.
        rate: Arrivals come so many times as fast as in the trace.
        load: Arrivals over capacity.
        saturate: All requests are there at once.
        ttft_s: Targets that take the place of the classes' own, by class.
        tpot_s: The same for the time of a token.
        simulate: Also say what the simulator predicts; needs a daemon of one's own.
        alone: Also replay the most urgent class alone, where there are several.
        costs: Step times as for `batond simulate`, to repeat a run with; "" measures them.
        seed: Of prompts and lots.
        daemon: Where.

    Raises:
        ConfigError: A value has no meaning, or two contradict each other; `field` names one.
    """

    trace: Path
    policies: tuple[str, ...] = ("priority", "fcfs")
    classes: Mapping[str, str] = field(default_factory=dict)
    share: Mapping[str, float] = field(default_factory=dict)
    fit_tokens: int = 0
    start_s: float | None = None
    window_s: float = 600.0
    requests: int = 240
    shrink: float = 1.0
    rate: float | None = None
    load: float | None = None
    saturate: bool = False
    ttft_s: Mapping[str, float] = field(default_factory=dict)
    tpot_s: Mapping[str, float] = field(default_factory=dict)
    simulate: bool = True
    alone: bool = True
    costs: str = ""
    seed: int = 0
    daemon: OwnDaemon | RunningDaemon = field(default_factory=OwnDaemon)

    def __post_init__(self) -> None:
        """Refuse what can't be replayed."""
        self._check_numbers()
        given = [name for name in ("rate", "load") if getattr(self, name) is not None]
        given += ["saturate"] if self.saturate else []
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other: give one", field=given[1])
        if self.classes and self.share:
            raise ConfigError("classes and share exclude each other: give one", field="share")
        if isinstance(self.daemon, RunningDaemon) and (self.simulate or self.costs):
            raise ConfigError(
                "a running daemon is not simulated: its step times and settings are not known",
                field="simulate",
            )
        if self.load is not None and not self.simulate:
            raise ConfigError(
                "load needs the capacity, which the simulator gives for a daemon of one's own: give a rate",
                field="load",
            )
        if not self.policies and isinstance(self.daemon, OwnDaemon):
            raise ConfigError("no policy is named", field="policies")

    def _check_numbers(self) -> None:
        least = {"shrink": 1, "requests": 0, "fit_tokens": 0, "window_s": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= lowest):
                raise ConfigError(f"{name} must be at least {lowest}, not {value:g}", field=name)
        for name in ("rate", "load"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be above 0, not {value:g}", field=name)
        if self.start_s is not None and not (math.isfinite(self.start_s) and self.start_s >= 0):
            raise ConfigError(f"the window must begin at 0 s or later, not {self.start_s:g}", field="start_s")

    @property
    def effective_load(self) -> float | None:
        """Arrivals over capacity; None where something else says when requests come."""
        if self.saturate or self.rate is not None or not self.simulate:
            return None
        return DEFAULT_LOAD if self.load is None else self.load

    def about(self) -> dict[str, Any]:
        """What to tell of it in a file: no credentials, no folders."""
        words = {name: getattr(self, name) for name in self.__slots__ if name not in {"trace", "daemon"}}
        daemon = self.daemon
        if isinstance(daemon, RunningDaemon):
            where: dict[str, Any] = {"address": daemon.address}
        else:
            names = (
                "rows",
                "chunk_tokens",
                "quantum_tokens",
                "host_pool_bytes",
                "device",
                "dtype",
                "threads",
            )
            where = {name: getattr(daemon, name) for name in names}
            where |= {"model": daemon.model.rpartition("/")[2], "settings": dict(daemon.settings)}
        return {"trace": self.trace.name, **words, "load": self.effective_load, "daemon": where}
