"""Which Redis to talk to, and as whom: one value for a server, a primary behind Sentinels and a Cluster."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from redis.connection import parse_url

from batond.daemon.config_base import split_address
from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from batond.daemon.config_queue import QueueSettings

Address: TypeAlias = tuple[str, int]
#: A host that vanished without a word is noticed within half a minute on connections that only listen.
KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
BAD_URL: Final = (
    "the Redis URL can't be used: write redis://, rediss:// (TLS) or unix://, with user and password in "
    "percent-encoding, such as redis://batond:PASSWORD@redis.example:6379/0"
)


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """Where the queue is.

    Attributes:
        mode: See `QueueSettings`.
        url: Of a standalone server.
        nodes: Sentinels, or nodes of the Cluster.
        service: Name of the primary at the Sentinels.
        username: At the servers.
        password: At the servers.
        sentinel_username: At the Sentinels.
        sentinel_password: At the Sentinels.
        tls: Speak TLS.
        tls_ca_file: Who signed the servers' certificates.
        tls_cert_file: Ours.
        tls_key_file: Ours.
    """

    mode: Literal["standalone", "sentinel", "cluster"] = "standalone"
    url: str = field(default="", repr=False)
    nodes: tuple[Address, ...] = ()
    service: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)
    tls: bool = False
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None

    def server_options(self) -> dict[str, Any]:
        """What the client needs to get into a server."""
        return self._options(self.username, self.password)

    def sentinel_options(self) -> dict[str, Any]:
        """What the client needs to get into a Sentinel."""
        return self._options(self.sentinel_username, self.sentinel_password)

    def _options(self, username: str, password: str) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if password:
            options["password"] = password
        if username:
            options["username"] = username
        if not self.url.startswith("unix://"):
            options |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
        if self.tls:
            options |= {
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
                "ssl_ca_certs": _text(self.tls_ca_file),
                "ssl_certfile": _text(self.tls_cert_file),
                "ssl_keyfile": _text(self.tls_key_file),
            }
        return options


def target_of(queue: QueueSettings) -> RedisTarget:
    """The target that is configured; a private server has none.

    Raises:
        ConfigError: The URL can't be read, names the password a second time, or a TLS file can't be used.
    """
    url = queue.url.get_secret_value()
    target = RedisTarget(
        mode=queue.mode,
        url=url,
        nodes=tuple(split_address(node) for node in queue.nodes),
        service=queue.sentinel_service,
        username=queue.username,
        password=queue.password.get_secret_value(),
        sentinel_username=queue.sentinel_username,
        sentinel_password=queue.sentinel_password.get_secret_value(),
        tls=queue.speaks_tls,
        tls_ca_file=queue.tls_ca_file,
        tls_cert_file=queue.tls_cert_file,
        tls_key_file=queue.tls_key_file,
    )
    if queue.mode == "standalone":
        _check_url(read_url(url), target)
    if (target.tls_ca_file or target.tls_cert_file) and not target.tls:
        raise ConfigError(
            "queue.tls_*_file need queue.tls = true, or a queue.url that begins with rediss://",
            setting="queue.tls",
        )
    _check_tls_files(target)
    return target


def _check_url(options: dict[str, Any], target: RedisTarget) -> None:
    """What a URL says goes before all else in the client: it must not turn off what we rely on."""
    if "password" in options and target.password:
        raise ConfigError(
            "queue.url has a password already: leave out queue.password", setting="queue.password"
        )
    for name, must_be in (("ssl_cert_reqs", "required"), ("ssl_check_hostname", "true")):
        if str(options.get(name, must_be)).lower() != must_be:
            raise ConfigError(
                f"queue.url must not set {name}: whoever answers could read the password and all jobs. "
                "Name the authority that signed the server's certificate in queue.tls_ca_file",
                setting="queue.url",
            )


def read_url(url: str) -> dict[str, Any]:
    """Reads a standalone server's URL into the client's options.

    Raises:
        ConfigError: It can't be read. What is wrong is not quoted: it may be half a password.
    """
    try:
        return dict(cast("Any", parse_url)(url))
    except ValueError:
        raise ConfigError(BAD_URL, setting="queue.url") from None


def _check_tls_files(target: RedisTarget) -> None:
    """Reads the files once, so that a wrong one is found at the start and by its name."""
    try:
        context = ssl.create_default_context(cafile=_text(target.tls_ca_file))
        if target.tls_cert_file is not None:
            context.load_cert_chain(target.tls_cert_file, _text(target.tls_key_file))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"can't use the TLS files of the queue: {error}", setting="queue.tls_ca_file"
        ) from error


def _keepalive() -> dict[int, int]:
    """The options that this platform has, by number."""
    return {getattr(socket, name): value for name, value in KEEPALIVE.items() if hasattr(socket, name)}


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None
