"""SLA classes: what a tenant names instead of a number, and what the operator promises for it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaClass:
    """One class of service.

    Attributes:
        name: What clients say; lower case, at most 32 characters.
        order: 0 is the most urgent.
        preemptible: Whether a running query of the class may be parked for a more urgent one.
        ttft_target_s: Time from arrival to the first token that the operator aims at.
        tpot_target_s: Time from one token to the next that the operator aims at.
        longest_queue_s: A job that waited longer for its first row fails; None lets it wait.
        share: Weight of the class where a policy divides capacity; relative, above 0.

    Raises:
        ConfigError: A value has no meaning.
    """

    name: str
    order: int
    preemptible: bool
    ttft_target_s: float
    tpot_target_s: float
    longest_queue_s: float | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what has no meaning, naming the class and the field."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"SLA class name {self.name!r} must match {_NAME.pattern}", field="name")
        if self.order < 0:
            raise ConfigError(f"SLA class {self.name}: order must not be negative", field="order")
        for field in ("ttft_target_s", "tpot_target_s", "longest_queue_s", "share"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"SLA class {self.name}: {field} must be above 0, not {value}", field=field)

    @property
    def longest_queue_ms(self) -> int:
        """`longest_queue_s` for the queue, rounded up: 0 lets a job wait, and nothing else is 0."""
        return math.ceil((self.longest_queue_s or 0.0) * 1000)


DEFAULT_CLASSES: Final = (
    SlaClass(name="interactive", order=0, preemptible=False, ttft_target_s=1.0, tpot_target_s=0.1),
    SlaClass(name="standard", order=1, preemptible=True, ttft_target_s=5.0, tpot_target_s=0.25),
    SlaClass(name="batch", order=2, preemptible=True, ttft_target_s=60.0, tpot_target_s=1.0),
)


class SlaClasses:
    """The configured classes, found by name and iterated from the most urgent on.

    Raises:
        ConfigError: There is no class, or two share a name.
    """

    def __init__(self, classes: Iterable[SlaClass] = DEFAULT_CLASSES) -> None:
        ordered = sorted(classes, key=lambda sla: (sla.order, sla.name))
        self._by_name = {sla.name: sla for sla in ordered}
        if not ordered:
            raise ConfigError("at least one SLA class must be configured", field="classes")
        if len(self._by_name) != len(ordered):
            names = ", ".join(sla.name for sla in ordered)
            raise ConfigError(f"SLA class names must differ, got {names}", field="classes")

    def __iter__(self) -> Iterator[SlaClass]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def names(self) -> tuple[str, ...]:
        """Names, most urgent class first."""
        return tuple(self._by_name)

    def get(self, name: str) -> SlaClass:
        """Return the class of that name.

        Raises:
            InvalidRequestError: There is none; the message names those there are.
        """
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(self._by_name)
            raise InvalidRequestError(
                f"unknown SLA class {name!r}; known are {known}",
                reason="UNKNOWN_CLASS",
                sla_class=name,
                known=known,
            ) from None
