"""TLS to Redis: the server's certificate is checked, ours is shown. A proxy ends TLS before a real server."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import selectors
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import SecretStr

from batond.bench.local_redis import HOST
from batond.daemon.config_queue import QueueSettings
from batond.daemon.errors import ConfigError, UnavailableError
from batond.daemon.queue import check_target, open_sync
from batond.daemon.queue.target import RedisTarget, target_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Queue

    from batond.daemon.queue import EmbeddedRedis

CHUNK_BYTES = 65_536


class Authority:
    """Signs certificates for loopback; writes all it makes into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca_file = folder / "ca.crt"
        self.ca_file.write_bytes(self._sign(self._name, self._key.public_key(), host=None))

    def issue(self, name: str, host: str = HOST) -> tuple[Path, Path]:
        """Gives the files of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        files = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        files[0].write_bytes(self._sign(subject, key.public_key(), host=host))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _sign(self, subject: x509.Name, public: Any, *, host: str | None) -> bytes:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        )
        if host is not None:
            names = [x509.IPAddress(ipaddress.ip_address(host))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class TlsProxy:
    """Takes TLS on a port, and passes what was in it on to a Unix socket."""

    def __init__(self, context: ssl.SSLContext, backend: Path) -> None:
        self._context, self._backend = context, backend
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends it, and all connections through it."""
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        self._open.append(raw)
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as inner:
            outer = self._context.wrap_socket(raw, server_side=True)
            self._open.append(outer)
            inner.connect(str(self._backend))
            with selectors.DefaultSelector() as ready, outer:
                ready.register(outer, selectors.EVENT_READ, inner)
                ready.register(inner, selectors.EVENT_READ, outer)
                while True:
                    for key, _ in ready.select():
                        source: Any = key.fileobj
                        data = source.recv(CHUNK_BYTES)
                        while source is outer and outer.pending():
                            data += outer.recv(CHUNK_BYTES)
                        if not data:
                            return
                        key.data.sendall(data)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Whom server and clients trust."""
    return Authority(tmp_path / "ours", "ours")


@pytest.fixture
def proxy(authority: Authority, server: EmbeddedRedis) -> Iterator[TlsProxy]:
    """TLS before the folder's server; asks for a client certificate of the same authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    context.load_verify_locations(authority.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    made = TlsProxy(context, server.socket_path)
    yield made
    made.close()


@pytest.fixture(params=["standalone", "cluster"])
def keys(request: pytest.FixtureRequest, proxy: TlsProxy, authority: Authority) -> dict[str, Any]:
    """Keys of `[queue]` that fit; the second form connects as in a Cluster and behind Sentinels."""
    cert_file, key_file = authority.issue("client")
    files = {"tls_ca_file": authority.ca_file, "tls_cert_file": cert_file, "tls_key_file": key_file}
    if request.param == "standalone":
        return {"url": f"rediss://{HOST}:{proxy.port}/0", **files}
    return {"mode": "cluster", "nodes": [f"{HOST}:{proxy.port}"], "tls": True, **files}


async def test_jobs_go_over_tls(keys: dict[str, Any], open_queue: Callable[..., Queue]) -> None:
    target = target_of(QueueSettings(**keys))
    queue = open_queue(target)
    notices = queue.store.notices("d1")
    await anext(notices)
    await queue.submit("a")
    await anext(notices)
    job = await queue.claim_one()
    assert await queue.commit(queue.step(job, 0, *range(1000))) == []
    assert len(await queue.tokens("a")) == 1000
    with open_sync(target, key=queue.store.keys.base, budget_s=20.0) as client:
        assert client.exists(queue.store.keys.job("t/a"))
    await notices.aclose()  # type: ignore[attr-defined] # a generator, said to be an iterator


async def test_a_server_of_another_authority_is_refused(
    keys: dict[str, Any], tmp_path: Path, open_queue: Callable[..., Queue]
) -> None:
    """Also the system's authorities do not know it, where none is named."""
    stranger = Authority(tmp_path / "theirs", "theirs")
    for trusted in (stranger.ca_file, None):
        queue = open_queue(target_of(QueueSettings(**keys | {"tls_ca_file": trusted})))
        with pytest.raises(UnavailableError, match=r"(?i)certificate"):
            await queue.submit("a")


async def test_a_certificate_for_another_host_is_refused(
    authority: Authority, server: EmbeddedRedis, open_queue: Callable[..., Queue]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("elsewhere", "192.0.2.1"))
    proxy = TlsProxy(context, server.socket_path)
    try:
        keys = {"url": f"rediss://{HOST}:{proxy.port}/0", "tls_ca_file": authority.ca_file}
        with pytest.raises(UnavailableError, match=r"(?i)mismatch|not valid for"):
            await open_queue(target_of(QueueSettings(**keys))).submit("a")
    finally:
        proxy.close()


async def test_without_our_certificate_we_are_refused(
    keys: dict[str, Any], open_queue: Callable[..., Queue]
) -> None:
    alone = keys | {"tls_cert_file": None, "tls_key_file": None}
    with pytest.raises(UnavailableError):
        await open_queue(target_of(QueueSettings(**alone))).submit("a")


async def test_plain_text_to_a_tls_port_is_refused(proxy: TlsProxy) -> None:
    with pytest.raises(UnavailableError):
        await check_target(RedisTarget(url=f"redis://{HOST}:{proxy.port}/0"), timeout_s=5.0)


def test_a_file_that_can_not_be_used_is_found_at_the_start(tmp_path: Path, authority: Authority) -> None:
    cert_file, _ = authority.issue("client")
    _, other_key = authority.issue("other")
    url = f"rediss://{HOST}:1/0"
    for files in (
        {"tls_ca_file": tmp_path / "none.crt"},
        {"tls_cert_file": cert_file, "tls_key_file": other_key},
        {"tls_ca_file": other_key},
    ):
        with pytest.raises(ConfigError, match="can't use the TLS files of the queue"):
            target_of(QueueSettings(url=url, **files))
    with pytest.raises(ConfigError, match="rediss://"):
        target_of(QueueSettings(url=f"redis://{HOST}:1/0", tls_ca_file=authority.ca_file))


@pytest.mark.parametrize(
    "query", ["ssl_cert_reqs=none", "ssl_cert_reqs=optional", "ssl_check_hostname=false"]
)
def test_a_url_does_not_turn_the_check_of_certificates_off(query: str) -> None:
    """In the client, what a URL says goes before our own options."""
    with pytest.raises(ConfigError, match=r"must not set ssl_.*tls_ca_file"):
        target_of(QueueSettings(url=SecretStr(f"rediss://{HOST}:1/0?{query}")))
    target_of(
        QueueSettings(url=SecretStr(f"rediss://{HOST}:1/0?ssl_cert_reqs=required&ssl_check_hostname=true"))
    )
