"""What the gateway is told at its start. Plain values: the extra `gateway` brings no pydantic."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from batond.clients.transport import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, ClientTLS

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Empty is the tenant's own default class.
DEFAULT_TIERS: Final = {"auto": "", "default": "standard", "flex": "batch", "priority": "interactive"}
_LISTEN: Final = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])?:(?P<port>\d{1,5})")
_TIER: Final = re.compile(r"(?P<tier>[^=\s]+)=(?P<sla_class>[^=\s]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What the gateway does, and for whom.

    Attributes:
        daemons: Addresses of the daemons, as clients give them; several share a queue.
        tls: TLS to the daemons; None is plain text.
        allow_plaintext_token: Send callers' tokens without TLS to other hosts.
        timeout_s: Longest time of a call to a daemon that answers once.
        tiers: SLA class by `service_tier`; an empty class is the tenant's default.
        default_temperature: Where a request names none; OpenAI's API says 1, the daemon 0.
        max_body_bytes: Largest JSON body.
        keepalive_s: A silent stream gets a comment so often, which keeps proxies from closing it.
    """

    daemons: tuple[str, ...] = (DEFAULT_TARGET,)
    tls: ClientTLS | None = None
    allow_plaintext_token: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    tiers: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_TIERS))
    default_temperature: float = 1.0
    max_body_bytes: int = 16 << 20
    keepalive_s: float = 15.0

    @property
    def needs_token(self) -> bool:
        """Whether callers without a token are refused here: the daemon would take the gateway's own name."""
        return self.tls is not None and self.tls.certificate is not None


def read_listen(text: str) -> tuple[str, int]:
    """Splits `host:port`; an empty host is the loopback.

    Raises:
        ValueError: It is no such thing.
    """
    found = _LISTEN.fullmatch(text)
    if found is None or int(found["port"]) >= 1 << 16:
        raise ValueError(f"{text!r} is not host:port")
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


def read_tiers(pairs: list[str]) -> dict[str, str]:
    """Reads `tier=class` pairs over the defaults.

    Raises:
        ValueError: One is no such pair.
    """
    tiers = dict(DEFAULT_TIERS)
    for pair in pairs:
        found = _TIER.fullmatch(pair)
        if found is None:
            raise ValueError(f"{pair!r} is not tier=class, such as flex=batch")
        tiers[found["tier"]] = found["sla_class"]
    return tiers
