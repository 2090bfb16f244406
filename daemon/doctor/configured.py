"""What a configuration names must be there and be usable: `check-config` and `doctor` ask the same.

Each check takes the resolved configuration, returns in words what was found, and raises ConfigError for what
would fail the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from batond.daemon.config_load import engine_settings
from batond.daemon.memory.host import check_host_pool
from batond.daemon.queue.target import target_of
from batond.daemon.telemetry.tracing import check_tracing
from batond.offload.folder import check_spill_folder
from batond.policies.registry import check_configured, load_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.config import Settings


def weights(settings: Settings) -> str:
    """The weights are where `model.path` says."""
    return engine_settings(settings).model_path


def spill_folder(settings: Settings) -> str:
    """The spill directory can be used, and its disk has room."""
    engine = engine_settings(settings)
    if not engine.spill_dir:
        return "no spill directory is configured"
    check_spill_folder(Path(engine.spill_dir), None if engine.spill_bytes < 0 else engine.spill_bytes)
    return engine.spill_dir


def policies(settings: Settings) -> str:
    """The policy, and all that have options, can be loaded."""
    load_policy(settings.engine.policy)
    check_configured(settings.policy_options)
    return settings.engine.policy


def tls_files(settings: Settings) -> str:
    """The server's certificate and key can be read, and belong together."""
    from batond.daemon.front.tls import read_tls  # noqa: PLC0415 - brings gRPC

    return "the daemon speaks plain text" if read_tls(settings.tls) is None else str(settings.tls.cert_file)


def host_pool(settings: Settings) -> str:
    """The host pool fits into memory.

    What this shell may lock says nothing of the service: it is checked as a pool that is not locked.
    """
    nbytes = settings.engine.host_pool_bytes
    if nbytes == "auto":
        return "auto"
    check_host_pool(int(nbytes), pin=False)
    return f"{int(nbytes)} bytes"


def device(settings: Settings) -> str:
    """The card is there, as torch sees it."""
    if not settings.model.device.startswith("cuda"):
        return settings.model.device
    from batond.daemon.devices import chosen_device  # noqa: PLC0415 - brings torch, which takes seconds

    return chosen_device(settings.model.device)


def queue_servers(settings: Settings) -> str:
    """The addresses of the queue's servers make sense; nobody is asked yet."""
    if not settings.queue.named:
        return "a private Redis"
    return f"{target_of(settings.queue).mode}"


def tracing(settings: Settings) -> str:
    """What sends traces is installed, and knows where to."""
    check_tracing(settings.tracing)
    return settings.tracing.endpoint or "no traces are sent"


#: In the order in which `check-config` asks; the first fault ends it.
CONFIGURED: Final[dict[str, Callable[[Settings], str]]] = {
    "model": weights,
    "spill directory": spill_folder,
    "policies": policies,
    "tls files": tls_files,
    "tracing": tracing,
    "host pool": host_pool,
    "device": device,
    "queue": queue_servers,
}
