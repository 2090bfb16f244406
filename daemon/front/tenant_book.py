"""Tenants added at run time: kept in Redis beside the queue, so that all daemons know the same ones.

One hash for all models of the server, field: name, value: `AddedTenant` as JSON. A change compares and sets,
and tells every daemon on a channel; a daemon that missed it looks again within `REFRESH_S`. While Redis is
away the tenants known last stay as they are. The ADR "tenants in Redis" has the reasons.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

from pydantic import ConfigDict, ValidationError
from redis.exceptions import RedisError

from batond.daemon.config_tenants import TenantConfig, TenantRights, check_rights
from batond.daemon.errors import (
    BatondError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    StateError,
)
from batond.daemon.front.identity import Account, account_of, hash_token, tenant_of
from batond.daemon.queue.connection import domain_error
from batond.daemon.queue.keys import TENANTS_CHANNEL, TENANTS_KEY
from batond.daemon.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import redis.asyncio

    from batond.daemon.front.identity import Identities
    from batond.policies.classes import SlaClasses

TOKEN_BYTES: Final = 32
#: A lost notice costs no more than this.
REFRESH_S: Final = 5.0
RETRY_S: Final = 0.5
#: Writers that meet on one tenant try again.
MOST_TRIES: Final = 5

# A repeated call finds its own value there and has succeeded.
_SET: Final = """
local old = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if old == ARGV[3] then
  return 1
elseif old ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[1])
return 1
"""

_log = get_logger(__name__)


class AddedTenant(TenantConfig):
    """A tenant as it lies in Redis. What a newer release adds is passed over: its tenants get in here too.

    Attributes:
        disabled: Its calls are refused.
        created_ms: When it was added, Unix time.
        token_ms: When its token was made.
    """

    model_config = ConfigDict(extra="ignore")

    disabled: bool = False
    created_ms: int = 0
    token_ms: int = 0


class TenantBook:
    """Reads and changes the tenants in Redis and keeps `identities` up to date.

    Every method raises `UnavailableError` while Redis is away; the same call can be made again.

    Args:
        client: Of the queue's Redis.
        identities: Is given the tenants; its configured ones can't be changed here.
        classes: All classes.
        on_change: Called after every change of `identities`.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        identities: Identities,
        classes: SlaClasses,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_change = on_change
        self._client, self._identities, self._classes = client, identities, classes
        self._loading = asyncio.Lock()
        self._raw: dict[str, bytes] = {}
        self._added: dict[str, AddedTenant] = {}

    @property
    def added(self) -> Mapping[str, AddedTenant]:
        """Tenants added at run time, as known last."""
        return self._added

    @property
    def tenants(self) -> list[TenantConfig]:
        """All tenants, configured ones first; an added one whose name is configured meanwhile is left out."""
        added = (one for name, one in self._added.items() if name not in self._configured)
        return [*self._identities.configured_tenants, *added]

    async def load(self) -> None:
        """Read all tenants."""
        async with self._loading:  # An older answer must not come after a newer one.
            await self._load()

    async def _load(self) -> None:
        raw: dict[bytes, bytes] = await self._ask(self._client.hgetall(TENANTS_KEY))
        named = {name.decode(errors="replace"): value for name, value in raw.items()}
        if named == self._raw:
            return
        self._raw, self._added = named, {}
        accounts = []
        for name, value in named.items():
            try:
                tenant = AddedTenant.model_validate_json(value)
                check_name(tenant, name)
            except ValueError as error:
                # Nobody gets in by it, its name stays taken, and it does not count as no tenant at all.
                _log.error("tenant_unreadable", tenant=name, error=_first_line(error))
                accounts.append(Account(tenant_of(name, TenantRights(), self._classes), disabled=True))
                continue
            self._added[name] = tenant
            accounts.append(account_of(tenant, self._classes, disabled=tenant.disabled))
            try:
                check_rights(tenant, self._classes, who=f"tenant {name}")
            except ValueError as error:
                _log.warning("tenant_classes", tenant=name, error=str(error))
        self._identities.replace_added(accounts)
        self._on_change()

    async def run(self) -> None:
        """Follow changes until cancelled."""
        while True:
            try:
                async with self._client.pubsub() as pubsub:
                    await pubsub.subscribe(TENANTS_CHANNEL)
                    while True:
                        await self.load()
                        await pubsub.get_message(ignore_subscribe_messages=True, timeout=REFRESH_S)
            except (RedisError, OSError, BatondError) as error:
                _log.warning("tenants_not_followed", error=str(error))
            await asyncio.sleep(RETRY_S)

    async def create(
        self, name: str, rights: TenantRights, certificate_subject: str = ""
    ) -> tuple[AddedTenant, str]:
        """Add a tenant; returns it and its token, which is kept nowhere.

        Raises:
            ConflictError: The name is taken, or the certificate is another tenant's.
            InvalidRequestError: The name or a class can't be.
        """
        await self.load()
        if name in self._configured or name in self._raw:
            raise ConflictError(f"there is a tenant {name!r} already", tenant=name)
        others = (*self._identities.configured_tenants, *self._added.values())
        if certificate_subject and any(one.certificate_subject == certificate_subject for one in others):
            raise ConflictError(
                "another tenant has this certificate_subject", certificate_subject=certificate_subject
            )
        self._check(rights, name)
        token, now_ms = secrets.token_urlsafe(TOKEN_BYTES), _now_ms()
        try:
            tenant = AddedTenant(
                **rights.model_dump(),
                name=name,
                token_sha256=hash_token(token).hex(),
                certificate_subject=certificate_subject,
                created_ms=now_ms,
                token_ms=now_ms,
            )
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(str(part) for part in fault["loc"])
            raise InvalidRequestError(f"{field}: {fault['msg']}", field=field) from error
        if not await self._set(name, b"", tenant):
            raise ConflictError(f"there is a tenant {name!r} already", tenant=name)
        return tenant, token

    async def update(self, name: str, rights: TenantRights) -> AddedTenant:
        """Replace what a tenant may do and use; raises as `rotate`, and InvalidRequestError."""
        self._check(rights, name)
        return await self._change(name, **rights.model_dump())

    async def rotate(self, name: str) -> tuple[AddedTenant, str]:
        """Give a tenant a new token; the old one is refused from now on.

        Raises:
            NotFoundError: There is no such tenant.
            StateError: It stands in the configuration.
        """
        token = secrets.token_urlsafe(TOKEN_BYTES)
        changed = await self._change(name, token_sha256=hash_token(token).hex(), token_ms=_now_ms())
        return changed, token

    async def set_disabled(self, name: str, *, disabled: bool) -> AddedTenant:
        """Refuse a tenant's calls, or let it in again; raises as `rotate`."""
        return await self._change(name, disabled=disabled)

    @property
    def _configured(self) -> set[str]:
        return {one.name for one in self._identities.configured_tenants}

    def _check(self, rights: TenantRights, name: str) -> None:
        try:
            check_rights(rights, self._classes, who=f"tenant {name[:63]}")
        except ValueError as error:
            raise InvalidRequestError(str(error), reason="BAD_TENANT", field="limits") from error

    async def _change(self, name: str, **fields: Any) -> AddedTenant:
        if name in self._configured:
            raise StateError(
                f"tenant {name} stands in the configuration file: change it there and reload",
                reason="TENANT_CONFIGURED",
                tenant=name,
            )
        for _ in range(MOST_TRIES):
            await self.load()
            old = self._added.get(name)
            if old is None:
                raise NotFoundError(f"there is no tenant {name[:63]!r}", reason="UNKNOWN_TENANT", tenant=name)
            changed = old.model_copy(update=fields)
            if await self._set(name, self._raw[name], changed):
                return changed
        raise StateError(f"tenant {name} is being changed by somebody else: try again", tenant=name)

    async def _set(self, name: str, expected: bytes, tenant: AddedTenant) -> bool:
        """Compare and set; on success it holds here at once, elsewhere when the notice arrives."""
        value = tenant.model_dump_json().encode()
        call: Any = self._client.eval(_SET, 1, TENANTS_KEY, name, expected, value, TENANTS_CHANNEL)
        done = await self._ask(call)
        await self.load()
        return bool(done)

    @staticmethod
    async def _ask(call: Awaitable[Any]) -> Any:
        try:
            return await call
        except RedisError as error:
            known = domain_error(error)
            if known.reason == "QUEUE_SCRIPT":  # Never mended by ourselves: tenants would be gone.
                known = StateError(
                    f"the key {TENANTS_KEY} in Redis holds something else than tenants: remove it",
                    reason="TENANTS_UNREADABLE",
                )
            raise known from error


def check_name(tenant: AddedTenant, name: str) -> None:
    """Refuse a value that lies under another tenant's name.

    Raises:
        ValueError: It does.
    """
    if tenant.name != name:
        raise ValueError(f"it names itself {tenant.name!r}")


def _now_ms() -> int:
    return int(time.time() * 1000)


def _first_line(error: ValueError) -> str:
    """What is wrong, without the value: it may hold a hash."""
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        return f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
    return str(error)
