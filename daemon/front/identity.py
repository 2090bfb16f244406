"""Who calls: a bearer token, a client certificate or a local administrator's socket names a tenant.

Only SHA-256 hashes of tokens are kept. A token is 256 random bits, so a plain hash can't be guessed back.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from batond.daemon.config_tenants import allowed_classes
from batond.daemon.errors import PermissionDeniedError, UnauthenticatedError
from batond.daemon.queue.limits import TenantLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from batond.daemon.config_tenants import TenantConfig, TenantRights
    from batond.policies.classes import SlaClasses

DEFAULT_TENANT: Final = "default"
_PREFERRED_CLASS: Final = "standard"
_SCHEME: Final = "bearer "
#: What gRPC calls the parts of a certificate that was checked against `tls.client_ca_file`.
_SUBJECT_KEYS: Final = ("x509_subject", "x509_common_name")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who calls and what it may. A limit of 0 is no limit of the tenant's own.

    Attributes:
        name: Scope of its jobs.
        admin: May use the admin service.
        classes: Names of the classes it may use.
        default_class: Class of a request that names none.
        lower_class: Too urgent a class becomes the most urgent allowed one instead of an error.
        weight: Share among tenants that compete.
        max_queued: Most jobs that wait.
        max_running: Most jobs that run at the same time, on all daemons.
        tokens_per_minute: Most tokens a minute, of prompts and outputs.
        longest_prompt_tokens: Longest prompt.
    """

    name: str
    admin: bool
    classes: frozenset[str]
    default_class: str
    lower_class: bool = False
    weight: float = 1.0
    max_queued: int = 0
    max_running: int = 0
    tokens_per_minute: int = 0
    longest_prompt_tokens: int = 0

    @property
    def limits(self) -> TenantLimits:
        """What the queue enforces of it."""
        return TenantLimits(
            weight=self.weight,
            queued=self.max_queued,
            running=self.max_running,
            tokens_per_minute=self.tokens_per_minute,
        )


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant and how it is known.

    Attributes:
        tenant: Who.
        token_hash: SHA-256 of its token; empty if it has none.
        certificate_subject: Common name or whole subject of its client certificate; empty if it has none.
        disabled: It is known, and refused.
    """

    tenant: Tenant
    token_hash: bytes = b""
    certificate_subject: str = ""
    disabled: bool = False


class Identities:
    """Finds the tenant of a call. Where there are no tenants at all, whoever can connect is the default one.

    Args:
        tenants: As configured.
        classes: All classes.
        required: Never let anybody in without credentials, not even while there are no tenants.

    Attributes:
        configured_tenants: As given, or read again.
    """

    def __init__(
        self, tenants: Iterable[TenantConfig], classes: SlaClasses, *, required: bool = False
    ) -> None:
        self.configured_tenants = tuple(tenants)
        self._configured = tuple(account_of(config, classes) for config in self.configured_tenants)
        self._required = required
        everything = frozenset(classes.names)
        self._anybody = Tenant(DEFAULT_TENANT, True, everything, default_class(everything, classes))  # noqa: FBT003 - admin
        self._classes = classes
        self._added: tuple[Account, ...] = ()
        self._accounts: tuple[Account, ...] = self._configured

    @property
    def tenants(self) -> dict[str, Tenant]:
        """All tenants by name, disabled ones too; the default one if there is no other."""
        return {account.tenant.name: account.tenant for account in self._accounts} or {
            DEFAULT_TENANT: self._anybody
        }

    @property
    def limits(self) -> dict[str, TenantLimits]:
        """Shares and quotas by tenant, for claims."""
        return {name: tenant.limits for name, tenant in self.tenants.items()}

    def replace_added(self, accounts: Iterable[Account]) -> None:
        """Take the tenants that were added at run time; a name of the configuration goes before them."""
        self._added = tuple(accounts)
        taken = {account.tenant.name for account in self._configured}
        self._accounts = (
            *self._configured,
            *(account for account in self._added if account.tenant.name not in taken),
        )

    def replace_configured(self, tenants: Iterable[TenantConfig]) -> None:
        """Take the tenants of a configuration that was read again; they were checked against the classes."""
        self.configured_tenants = tuple(tenants)
        self._configured = tuple(account_of(config, self._classes) for config in self.configured_tenants)
        self.replace_added(self._added)

    def identify(
        self,
        metadata: Iterable[tuple[str, str | bytes]] | None,
        auth_context: Mapping[str, Iterable[bytes]] | None = None,
    ) -> Tenant:
        """Return who sent a call. A token goes before a certificate: proxies have one and pass the other on.

        Args:
            metadata: What came with the call.
            auth_context: What TLS found out about the peer, as gRPC gives it.

        Raises:
            UnauthenticatedError: No credentials, or such that nobody has.
            PermissionDeniedError: The tenant is disabled.
        """
        authorization = next((value for key, value in metadata or () if key == "authorization"), None)
        if authorization is not None and (self._accounts or self._required):
            return self._admit(self._by_token(authorization))
        if not self._accounts and not self._required:
            return self._anybody
        subjects = [
            value.decode(errors="replace")
            for key in _SUBJECT_KEYS
            for value in (auth_context or {}).get(key, ())
        ]
        if not subjects:
            raise UnauthenticatedError(
                "credentials are missing: send the metadata 'authorization: Bearer <token>'",
                reason="NO_CREDENTIALS",
            )
        return self._admit(self._by_certificate(subjects))

    def _by_token(self, authorization: Any) -> Account:
        if not isinstance(authorization, str) or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError(
                "the credentials can't be read: send the metadata 'authorization: Bearer <token>'",
                reason="BAD_TOKEN",
            )
        digest = hash_token(authorization[len(_SCHEME) :].strip())
        found = None
        # All are compared, each in constant time: the time tells nothing about the hashes.
        for account in self._accounts:
            if hmac.compare_digest(account.token_hash, digest):
                found = account
        if found is None:
            raise UnauthenticatedError("the token is not valid: ask the operator for one", reason="BAD_TOKEN")
        return found

    def _by_certificate(self, subjects: Sequence[str]) -> Account:
        for subject in subjects:
            for account in self._accounts:
                if account.certificate_subject == subject:
                    return account
        raise UnauthenticatedError(
            "the client certificate belongs to no tenant, and no token was sent", reason="BAD_CERTIFICATE"
        )

    @staticmethod
    def _admit(account: Account) -> Tenant:
        if account.disabled:
            raise PermissionDeniedError(
                f"tenant {account.tenant.name} is disabled: ask the operator",
                reason="TENANT_DISABLED",
                tenant=account.tenant.name,
            )
        return account.tenant


class LocalAdministrators:
    """Names the caller on the administrators' socket: an administrator, since the relay lets in no other."""

    def __init__(self, classes: SlaClasses) -> None:
        self._everything = frozenset(classes.names)
        self._default_class = default_class(self._everything, classes)

    def administrator(self, user_id: int) -> Tenant:
        """A user of this host, as the kernel named it."""
        return Tenant(f"local:{user_id}", True, self._everything, self._default_class)  # noqa: FBT003 - admin


def hash_token(token: str) -> bytes:
    """SHA-256 of a token: all that is kept of it."""
    return hashlib.sha256(token.encode()).digest()


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


def tenant_of(name: str, rights: TenantRights, classes: SlaClasses) -> Tenant:
    """What a tenant's rights mean here; if no class is left, since classes changed, the least urgent one."""
    allowed = allowed_classes(rights, classes) or frozenset(classes.names[-1:])
    chosen = rights.default_class
    return Tenant(
        name=name,
        admin=rights.admin,
        classes=allowed,
        default_class=chosen if chosen in allowed else default_class(allowed, classes),
        lower_class=rights.lower_class,
        weight=rights.weight,
        max_queued=rights.max_queued,
        max_running=rights.max_running,
        tokens_per_minute=rights.tokens_per_minute,
        longest_prompt_tokens=rights.longest_prompt_tokens,
    )


def account_of(config: TenantConfig, classes: SlaClasses, *, disabled: bool = False) -> Account:
    """A tenant with its credentials."""
    return Account(
        tenant=tenant_of(config.name, config, classes),
        token_hash=bytes.fromhex(config.token_sha256),
        certificate_subject=config.certificate_subject,
        disabled=disabled,
    )
