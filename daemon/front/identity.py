"""Who calls: a bearer token names a tenant. Only SHA-256 hashes of tokens are kept."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batond.daemon.errors import PermissionDeniedError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batond.daemon.config import TenantConfig
    from batond.policies.classes import SlaClasses

DEFAULT_TENANT: Final = "default"
_PREFERRED_CLASS: Final = "standard"
_SCHEME: Final = "bearer "


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who calls and what it may.

    Attributes:
        name: Scope of its jobs.
        admin: May use the admin service.
        classes: Names of the classes it may use.
        default_class: Class of a request that names none.
        lower_class: A forbidden class becomes `default_class` instead of an error.
        max_queued: Most jobs that wait; 0 is no limit of its own. Not enforced yet.
        longest_prompt_tokens: Longest prompt; 0 is no limit of its own.
    """

    name: str
    admin: bool
    classes: frozenset[str]
    default_class: str
    lower_class: bool = False
    max_queued: int = 0
    longest_prompt_tokens: int = 0


class Identities:
    """Finds the tenant of a call. Without configured tenants, whoever can connect is the one default tenant.

    Args:
        tenants: As configured.
        classes: All classes.
    """

    def __init__(self, tenants: Iterable[TenantConfig], classes: SlaClasses) -> None:
        self._by_hash = [(bytes.fromhex(t.token_sha256), _tenant(t, classes)) for t in tenants]
        everything = frozenset(classes.names)
        self._anybody = Tenant(DEFAULT_TENANT, True, everything, default_class(everything, classes))  # noqa: FBT003 - admin

    @property
    def names(self) -> list[str]:
        """Names of all tenants."""
        return [tenant.name for _, tenant in self._by_hash] or [DEFAULT_TENANT]

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """Return who sent the metadata of a call.

        Raises:
            UnauthenticatedError: No token, or one that nobody has.
        """
        if not self._by_hash:
            return self._anybody
        token = next((value for key, value in metadata or () if key == "authorization"), "")
        if not isinstance(token, str) or not token[: len(_SCHEME)].lower() == _SCHEME:
            raise UnauthenticatedError(
                "credentials are missing: send the metadata 'authorization: Bearer <token>'",
                reason="NO_CREDENTIALS",
            )
        digest = hashlib.sha256(token[len(_SCHEME) :].strip().encode()).digest()
        found = None
        # All are compared, each in constant time: the time tells nothing about the hashes.
        for known, tenant in self._by_hash:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise UnauthenticatedError("the token is not valid: ask the operator for one", reason="BAD_TOKEN")
        return found


def require_admin(tenant: Tenant) -> None:
    """Let administrators pass.

    Raises:
        PermissionDeniedError: The tenant is none.
    """
    if not tenant.admin:
        raise PermissionDeniedError(
            f"tenant {tenant.name} is no administrator", reason="NOT_ADMIN", tenant=tenant.name
        )


def default_class(allowed: frozenset[str], classes: SlaClasses) -> str:
    """`standard` where it is allowed, else the least urgent allowed class."""
    if _PREFERRED_CLASS in allowed:
        return _PREFERRED_CLASS
    return [name for name in classes.names if name in allowed][-1]


def _tenant(config: TenantConfig, classes: SlaClasses) -> Tenant:
    allowed = frozenset(config.classes or classes.names)
    return Tenant(
        name=config.name,
        admin=config.admin,
        classes=allowed,
        default_class=config.default_class or default_class(allowed, classes),
        lower_class=config.lower_class,
        max_queued=config.max_queued,
        longest_prompt_tokens=config.longest_prompt_tokens,
    )
