"""The server's certificate: checked before it is used, and exchanged without closing a connection."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from batond.daemon.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from batond.daemon.config import TlsSettings


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What the files of `[tls]` hold, PEM.

    Attributes:
        certificates: The server's chain.
        key: Its private key.
        client_ca: Who signs clients' certificates; None asks clients for none.
    """

    certificates: bytes
    key: bytes
    client_ca: bytes | None


def read_tls(tls: TlsSettings) -> TlsFiles | None:
    """Read and check the files; None without TLS.

    Raises:
        ConfigError: One can't be read or is no PEM, or certificate and key don't belong together.
    """
    if tls.cert_file is None or tls.key_file is None:
        return None
    try:
        files = _read(tls)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The empty password keeps OpenSSL from asking a terminal for one.
        context.load_cert_chain(tls.cert_file, tls.key_file, password="")
        if tls.client_ca_file is not None:
            context.load_verify_locations(tls.client_ca_file)
        again = _read(tls)
    except OSError as error:  # ssl.SSLError is one too.
        raise ConfigError(f"can't use the TLS files: {error}") from error
    if again != files:
        raise ConfigError("the TLS files are being written: reload once all of them are there")
    return files


def _read(tls: TlsSettings) -> TlsFiles:
    if tls.cert_file is None or tls.key_file is None:
        raise ConfigError("there are no TLS files")
    return TlsFiles(
        certificates=tls.cert_file.read_bytes(),
        key=tls.key_file.read_bytes(),
        client_ca=tls.client_ca_file.read_bytes() if tls.client_ca_file is not None else None,
    )


class ServerTls:
    """What new connections are shown; those that are open keep what they began with.

    Args:
        files: To begin with. Whether clients are asked for certificates can't change later.

    Attributes:
        files: Those in force.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._asks_clients = files.client_ca is not None
        self._current = _configuration(files)

    def exchange(self, files: TlsFiles) -> None:
        """Show these from the next connection on."""
        if files != self.files:
            self.files, self._current = files, _configuration(files)

    def credentials(self) -> grpc.ServerCredentials:
        """For one address: each remembers by itself what it was given last."""
        return grpc.dynamic_ssl_server_credentials(
            self._current, self._fetcher(), require_client_authentication=self._asks_clients
        )

    def _fetcher(self) -> Callable[[], Any]:
        given = self._current

        def fetch() -> Any:  # Called by gRPC's threads, at each new connection.
            nonlocal given
            if self._current is given:
                return None
            given = self._current
            return given

        return fetch


def _configuration(files: TlsFiles) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(files.key, files.certificates)], root_certificates=files.client_ca
    )
