"""Where a daemon is and how to reach it: addresses, TLS, tokens, channel options. Pure: opens nothing."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import grpc

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_TARGET: Final = "127.0.0.1:7431"
DEFAULT_TIMEOUT_S: Final = 30.0

# Far above the daemon's own limits: what it accepted to make, the client can read.
_MAX_RECEIVE_BYTES: Final = 256 << 20
_KEEPALIVE_S: Final = 30  # Above the 20 s a daemon allows; finds a dead network under a silent prefill.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTLS:
    """TLS of a client, PEM as bytes.

    Attributes:
        root_ca: Certificates that may vouch for the daemon; None takes those of the system.
        certificate: The client's own certificate chain, for mutual TLS.
        key: The key of that certificate.
        server_name: Name expected in the daemon's certificate, where it isn't the one in the address.
    """

    root_ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Refuses half a key pair."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("mutual TLS needs a certificate and its key; give both or neither")

    @classmethod
    def from_files(
        cls,
        root_ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        server_name: str | None = None,
    ) -> ClientTLS:
        """Reads the PEM files.

        Raises:
            OSError: A file can't be read.
            ValueError: A certificate without its key, or a key without its certificate.
        """
        return cls(
            root_ca=root_ca.read_bytes() if root_ca else None,
            certificate=certificate.read_bytes() if certificate else None,
            key=key.read_bytes() if key else None,
            server_name=server_name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What a channel is made of.

    Attributes:
        target: The address as gRPC wants it.
        credentials: TLS; None is plain.
        options: Channel options.
        metadata: What every call carries.
    """

    target: str
    credentials: grpc.ChannelCredentials | None
    options: tuple[tuple[str, str | int], ...]
    metadata: tuple[tuple[str, str], ...] = field(repr=False)


def connection(
    target: str, *, token: str | None, tls: ClientTLS | None, allow_plaintext_token: bool
) -> Connection:
    """Works out how to reach `target`.

    Args:
        target: "host:port", "unix:///path" or a socket's path, if relative with a slash ("./admin.sock").
        token: A tenant's bearer token.
        tls: None is plain text.
        allow_plaintext_token: Send the token over plain TCP to another host all the same.

    Raises:
        ValueError: The token would cross a network in plain text, or no header can carry it.
    """
    if target.startswith("/"):
        target = f"unix://{target}"
    elif "/" in target and ":" not in target:  # Neither scheme nor port: a relative path.
        target = f"unix:{target}"
    metadata = bearer(token)
    if metadata and not (tls or allow_plaintext_token or is_local(target)):
        raise ValueError(
            f"the token would go to {target} in plain text; give tls=ClientTLS(...), or "
            "allow_plaintext_token=True if the way there is protected otherwise"
        )
    credentials = None
    if tls is not None:
        credentials = grpc.ssl_channel_credentials(tls.root_ca, tls.key, tls.certificate)
    return Connection(
        target=target, credentials=credentials, options=_options(target, tls), metadata=metadata
    )


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Gives the metadata that carries a tenant's token; None is none.

    Raises:
        ValueError: No header can carry it.
    """
    if token is None:
        return ()
    if not (token.isascii() and token.isprintable()) or not token or " " in token:
        raise ValueError("the token must be printable ASCII without spaces; is there a line break in it?")
    return (("authorization", f"Bearer {token}"),)


def _options(target: str, tls: ClientTLS | None) -> tuple[tuple[str, str | int], ...]:
    options: list[tuple[str, str | int]] = [
        ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", -1),
        # A restarted daemon is found again within seconds; gRPC's own longest wait is two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # A proxy of the environment can't reach a socket, and seldom the loopback.
        *([("grpc.enable_http_proxy", 0)] if is_local(target) else []),
    ]
    if not target.startswith("unix:"):
        options += [
            ("grpc.keepalive_time_ms", _KEEPALIVE_S * 1000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return tuple(options)


def is_local(target: str) -> bool:
    """Whether what is sent to `target` stays on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    address = target.removeprefix("dns:///").removeprefix("ipv4:").removeprefix("ipv6:")
    host = address.rpartition(":")[0].strip("[]") if ":" in address else address
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
