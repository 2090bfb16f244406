"""SIGHUP: takes over from the configuration what can change while jobs run, and says what can't.

Everything is read and checked before anything is changed: a broken configuration changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from batond.daemon.config_base import Section
from batond.daemon.errors import ConfigError
from batond.daemon.front.tls import read_tls
from batond.daemon.telemetry.logging import get_logger, set_level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from batond.daemon.config import Settings
    from batond.daemon.front.identity import Identities
    from batond.daemon.front.tls import ServerTls, TlsFiles

#: Keys that are read anew. All others are known to the engine, to the queue or to sockets that are open.
RELOADABLE: Final = frozenset(
    {
        "log.level",
        "service.drain_timeout_s",
        "tenants",
        "tls.cert_file",
        "tls.key_file",
        "tls.client_ca_file",
    }
)

REFUSED: Final = "the new configuration was refused and the old one stays: see the log"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """What comes of a new configuration.

    Attributes:
        settings: In force from now on: the old ones with the keys that are taken over.
        taken: Keys that changed and are taken over, sorted.
        needs_restart: Keys that changed and hold from the next start on, sorted.
    """

    settings: Settings
    taken: tuple[str, ...]
    needs_restart: tuple[str, ...]


def decide(now: Settings, new: Settings) -> Decision:
    """Take over what can be.

    Raises:
        ConfigError: What is taken over does not go with what stays: say, a tenant with a class that needs a
            restart to be there, or no tenants any more while strangers can still connect.
    """
    before, after = dict(_keys(now)), dict(_keys(new))
    changed = sorted(key for key in before if before[key] != after[key])
    taken = tuple(key for key in changed if key in RELOADABLE and not _turns_tls(key, before, after))
    settings = now
    for key in taken:
        settings = _with(settings, key, after[key])
    try:
        settings.check()
    except ValueError as error:
        raise ConfigError(f"it needs a restart: until then {error}") from error
    return Decision(settings, taken, tuple(key for key in changed if key not in taken))


class Reloader:
    """Applies a changed configuration to a daemon that runs.

    Args:
        settings: In force.
        reread: Reads the configuration as at the start; raises ConfigError.
        identities: Is given the configured tenants.
        tls: Is given the files; None without TLS.
        on_tenants: Called after the tenants changed.

    Attributes:
        settings: In force.
    """

    def __init__(
        self,
        settings: Settings,
        reread: Callable[[], Settings],
        *,
        identities: Identities,
        tls: ServerTls | None,
        on_tenants: Callable[[], None],
    ) -> None:
        self.settings = settings
        self._reread, self._identities, self._tls, self._on_tenants = reread, identities, tls, on_tenants

    async def reload(self) -> str:
        """Read the configuration again and apply it; returns what came of it in a few words.

        Raises nothing: whatever is wrong with the configuration is logged, and everything stays as it was.
        """
        try:
            decision, files = await asyncio.to_thread(self._read)
        except ConfigError as error:
            _log.error("reload_refused", error=error.message)
            return REFUSED
        except Exception as error:  # noqa: BLE001 - no file may end a daemon that works
            _log.error("reload_refused", error=type(error).__name__, exc_info=error)
            return REFUSED
        tenants = _compare_tenants(self.settings, decision.settings)
        changed = list(decision.taken)
        if self._tls is not None and files is not None and files != self._tls.files:
            self._tls.exchange(files)
            changed.append("tls: contents of files")
        old_level, level = self.settings.log.level, decision.settings.log.level
        self.settings = decision.settings
        if "tenants" in decision.taken:
            self._identities.replace_configured(decision.settings.tenants)
            self._on_tenants()
        # Seen if either level shows it: who silences the log, or opens it, wants to know that it worked.
        set_level(min(old_level, level, key=_severity))
        _log.info("reloaded", changed=changed, **tenants)
        if decision.needs_restart:
            _log.warning("reload_needs_restart", keys=list(decision.needs_restart))
        set_level(level)
        return "reloaded" + (", some changes need a restart" if decision.needs_restart else "")

    def _read(self) -> tuple[Decision, TlsFiles | None]:
        decision = decide(self.settings, self._reread())
        return decision, read_tls(decision.settings.tls)


def _keys(settings: Settings) -> Iterator[tuple[str, Any]]:
    """All keys with their values; tables that are no sections count as one key."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Section):
            yield from ((f"{name}.{key}", getattr(value, key)) for key in type(value).model_fields)
        else:
            yield name, value


def _with(settings: Settings, key: str, value: Any) -> Settings:
    name, _, inner = key.partition(".")
    if inner:
        value = getattr(settings, name).model_copy(update={inner: value})
    return settings.model_copy(update={name: value})


def _turns_tls(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether TLS, or asking for client certificates, would be turned on or off: sockets are bound so."""
    return key.startswith("tls.") and any(
        (before[name] is None) != (after[name] is None) for name in ("tls.cert_file", "tls.client_ca_file")
    )


def _compare_tenants(now: Settings, new: Settings) -> dict[str, list[str]]:
    """Names for the log; empty lists are left out."""
    before, after = ({one.name: one for one in settings.tenants} for settings in (now, new))
    names = {
        "tenants_added": sorted(after.keys() - before.keys()),
        "tenants_removed": sorted(before.keys() - after.keys()),
        "tenants_changed": sorted(
            name for name in before.keys() & after.keys() if before[name] != after[name]
        ),
    }
    return {key: found for key, found in names.items() if found}


def _severity(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]
