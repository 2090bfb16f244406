"""Who may use the daemon, and how much: one schema for the file and for tenants added at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import Field, model_validator

from batond.daemon.config_base import Section, StringList
from batond.daemon.queue.limits import MAX_WEIGHT, MIN_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batond.policies.classes import SlaClasses

_TENANT_NAME: Final = r"^[a-z0-9][a-z0-9_.-]{0,62}$"


class TenantRights(Section):
    """What a tenant may do and use. A limit of 0 is no limit of the tenant's own.

    Attributes:
        classes: SLA classes the tenant may ask for; empty is all.
        highest_class: It may ask for nothing more urgent than this class; empty is no cap.
        default_class: Class if a request names none; empty: `standard` if allowed, else the least urgent.
        lower_class: Serve a request for too urgent a class under the most urgent allowed one.
        admin: May use the admin service.
        weight: Share among tenants that compete for rows.
        max_queued: Most jobs of the tenant that wait.
        max_running: Most jobs of the tenant that run at the same time, on all daemons.
        tokens_per_minute: Most tokens a minute, of prompts and outputs.
        longest_prompt_tokens: Longest prompt.
    """

    classes: StringList = Field(default_factory=list)
    highest_class: str = ""
    default_class: str = ""
    lower_class: bool = False
    admin: bool = False
    weight: float = Field(default=1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT, allow_inf_nan=False)
    max_queued: int = Field(default=0, ge=0, le=1 << 31)
    max_running: int = Field(default=0, ge=0, le=1 << 31)
    tokens_per_minute: int = Field(default=0, ge=0, le=1 << 50)
    longest_prompt_tokens: int = Field(default=0, ge=0, le=1 << 31)


class TenantConfig(TenantRights):
    """A tenant of the configuration.

    Attributes:
        name: Scope of its jobs; appears in logs and metrics.
        token_sha256: SHA-256 (hex) of the bearer token; make one with `batond hash-token`. Empty is none.
        certificate_subject: Common name or whole subject of its client certificate. Empty is none.
    """

    name: str = Field(pattern=_TENANT_NAME)
    token_sha256: str = Field(default="", pattern=r"^([0-9a-fA-F]{64})?$")
    certificate_subject: str = Field(default="", max_length=256)

    @model_validator(mode="after")
    def _check_known(self) -> TenantConfig:
        if not self.token_sha256 and not self.certificate_subject:
            raise ValueError("a tenant needs token_sha256 or certificate_subject: nobody could be it")
        return self


def check_tenants(tenants: Iterable[TenantConfig], classes: SlaClasses) -> None:
    """Check what a tenant alone can't: names and credentials are its own, and its classes exist.

    Raises:
        ValueError: The first fault.
    """
    tenants = list(tenants)
    for key in ("name", "token_sha256", "certificate_subject"):
        values = [value.lower() for tenant in tenants if (value := getattr(tenant, key))]
        if len(set(values)) < len(values):
            raise ValueError(f"two tenants have the same {key}")
    for tenant in tenants:
        check_rights(tenant, classes, who=f"tenant {tenant.name}")


def check_rights(rights: TenantRights, classes: SlaClasses, *, who: str) -> None:
    """Check the classes a tenant names.

    Raises:
        ValueError: One does not exist, nothing is left under the cap, or the default is not among the rest.
    """
    for name in [*rights.classes, *filter(None, [rights.default_class, rights.highest_class])]:
        if name not in classes:
            raise ValueError(f"{who}: unknown class {name!r}; known are {', '.join(classes.names)}")
    allowed = allowed_classes(rights, classes)
    if not allowed:
        raise ValueError(f"{who}: none of its classes is left below highest_class {rights.highest_class}")
    if rights.default_class and rights.default_class not in allowed:
        raise ValueError(f"{who}: default_class is not among its classes")


def allowed_classes(rights: TenantRights, classes: SlaClasses) -> frozenset[str]:
    """Classes a tenant may ask for: those it is given, or all, up to its highest.

    Unknown ones are left out, and under an unknown cap nothing is left: a tenant that was added before the
    classes changed must not rise by that.
    """
    if rights.highest_class and rights.highest_class not in classes:
        return frozenset()
    cap = classes.get(rights.highest_class).order if rights.highest_class else 0
    names = frozenset(rights.classes) or frozenset(classes.names)
    return frozenset(one.name for one in classes if one.name in names and one.order >= cap)
