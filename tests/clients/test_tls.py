"""TLS and mutual TLS, with certificates made here."""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from batond.clients import ClientTLS, errors


@dataclass
class Identity:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs certificates."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.pem = self._sign(self.name, self.key.public_key(), authority=True)

    def issue(self, common_name: str, address: str = "127.0.0.1") -> Identity:
        """Makes a certificate for an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        pem = self._sign(name, key.public_key(), address=address)
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Identity(pem, secret)

    def _sign(
        self, name: x509.Name, public: Any, *, address: str | None = None, authority: bool = False
    ) -> bytes:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def authority() -> Authority:
    """Makes an authority."""
    return Authority()


def serve(daemon: Any, authority: Authority, *, mutual: bool) -> None:
    """Restarts the daemon with TLS."""
    daemon.stop()
    identity = authority.issue("daemon")
    daemon.start(
        grpc.ssl_server_credentials(
            [(identity.key, identity.certificate)],
            root_certificates=authority.pem if mutual else None,
            require_client_auth=mutual,
        )
    )


def test_tls_carries_the_token(daemon: Any, connect: Any, authority: Authority) -> None:
    serve(daemon, authority, mutual=False)
    client = connect(token="s3cret", tls=ClientTLS(root_ca=authority.pem))
    assert client.server_info().model == "tiny"
    assert daemon.metadata["authorization"] == "Bearer s3cret"


def test_a_stranger_is_not_trusted(daemon: Any, connect: Any, authority: Authority) -> None:
    serve(daemon, authority, mutual=False)
    with pytest.raises(errors.UnavailableError):
        connect(token="s3cret", tls=ClientTLS(root_ca=Authority().pem)).server_info()
    assert daemon.calls == []


def test_mutual_tls(daemon: Any, connect: Any, authority: Authority, tmp_path: Path) -> None:
    serve(daemon, authority, mutual=True)
    identity = authority.issue("tenant")
    for name, content in [("ca", authority.pem), ("cert", identity.certificate), ("key", identity.key)]:
        (tmp_path / name).write_bytes(content)
    tls = ClientTLS.from_files(tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    assert connect(tls=tls).server_info().model == "tiny"
    with pytest.raises(errors.UnavailableError):
        connect(tls=ClientTLS(root_ca=authority.pem)).server_info()
    assert daemon.names() == ["GetServerInfo"]
