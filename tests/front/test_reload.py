"""What a SIGHUP changes, what it leaves for a restart, and what it refuses."""

from __future__ import annotations

import datetime as dt
import ipaddress
import logging
import os
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from batond.daemon import config_load
from batond.daemon.config_load import load_settings
from batond.daemon.errors import ConfigError
from batond.daemon.front.identity import Identities
from batond.daemon.front.reload import RELOADABLE, Reloader, decide
from batond.daemon.front.tls import ServerTls, read_tls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from batond.daemon.config import Settings

RED = f"[[tenants]]\nname='red'\ntoken_sha256='{'ab' * 32}'\n"
BLUE = f"[[tenants]]\nname='blue'\ntoken_sha256='{'cd' * 32}'\n"
TLS = "[tls]\ncert_file='{0}/cert.pem'\nkey_file='{0}/key.pem'\n"


@pytest.fixture(autouse=True)
def _no_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("BATOND_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(config_load, "DEFAULT_FILE", tmp_path / "none.toml")


@pytest.fixture(autouse=True)
def _restore_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def settings(tmp_path: Path) -> Callable[[str], Settings]:
    """Reads a text as the configuration."""

    def read(text: str) -> Settings:
        (tmp_path / "batond.toml").write_text(text)
        return load_settings(tmp_path / "batond.toml")

    return read


class Running:
    """A reloader over a file."""

    def __init__(self, folder: Path, text: str) -> None:
        self._file = folder / "batond.toml"
        self.write(text)
        settings = load_settings(self._file)
        files = read_tls(settings.tls)
        self.tls = ServerTls(files) if files is not None else None
        self.identities = Identities(settings.tenants, settings.sla_classes)
        self.tenants_changed = 0
        self.reloader = Reloader(
            settings,
            lambda: load_settings(self._file),
            identities=self.identities,
            tls=self.tls,
            on_tenants=self._changed,
        )

    def _changed(self) -> None:
        self.tenants_changed += 1

    def write(self, text: str) -> None:
        self._file.write_text(text)

    async def reload(self) -> list[Any]:
        with capture_logs() as lines:
            await self.reloader.reload()
        return lines


def test_what_can_be_is_taken_and_the_rest_is_named(settings: Callable[[str], Settings]) -> None:
    now = settings("")
    new = settings(
        "[log]\nlevel='debug'\n[service]\ndrain_timeout_s=5\n[engine]\nrows=3\n[queue]\nlease_s=4\n"
    )
    decision = decide(now, new)
    assert decision.taken == ("log.level", "service.drain_timeout_s")
    assert decision.needs_restart == ("engine.rows", "queue.lease_s")
    assert (decision.settings.log.level, decision.settings.service.drain_timeout_s) == ("debug", 5.0)
    assert (decision.settings.engine.rows, decision.settings.queue.lease_s) == (8, 10.0)
    # What needs a restart is named at each reload until it happens.
    assert decide(decision.settings, new).needs_restart == decision.needs_restart
    assert decide(decision.settings, new).taken == ()


def test_reloadable_keys_exist(settings: Callable[[str], Settings]) -> None:
    shown = settings("").model_dump()
    for key in RELOADABLE:
        section, _, inner = key.partition(".")
        assert section in shown
        assert not inner or inner in shown[section], key


def test_tenants_must_go_with_the_classes_that_run(settings: Callable[[str], Settings]) -> None:
    gold = "[[classes]]\nname='gold'\norder=0\n"
    with pytest.raises(ConfigError, match=r"needs a restart.*unknown class 'gold'"):
        decide(settings(RED), settings(gold + RED + "classes=['gold']\n"))


def test_nobody_is_let_in_because_an_address_will_go(settings: Callable[[str], Settings]) -> None:
    """Without tenants everybody is an administrator: not while strangers still reach the old address."""
    tls = TLS.format("/x")
    open_to_all = settings("[server]\nlisten=['0.0.0.0:7431']\n" + tls + RED)
    with pytest.raises(ConfigError, match="can be reached from other hosts"):
        decide(open_to_all, settings("[server]\nlisten=['127.0.0.1:7431']\n" + tls))


@pytest.mark.parametrize("turned", ["on", "off"])
def test_tls_is_not_turned(settings: Callable[[str], Settings], turned: str) -> None:
    without, tls = settings(""), settings(TLS.format("/x"))
    now, new = (without, tls) if turned == "on" else (tls, without)
    decision = decide(now, new)
    assert decision.taken == ()
    assert decision.needs_restart == ("tls.cert_file", "tls.key_file")
    asking = settings(TLS.format("/x") + "client_ca_file='/x/ca.pem'\n")
    assert decide(tls, asking).needs_restart == ("tls.client_ca_file",)


async def test_tenants_are_exchanged(tmp_path: Path) -> None:
    running = Running(tmp_path, RED)
    running.write(RED + "max_running=2\n" + BLUE)
    (line,) = await running.reload()
    assert line == {
        "event": "reloaded",
        "log_level": "info",
        "changed": ["tenants"],
        "tenants_added": ["blue"],
        "tenants_changed": ["red"],
    }
    assert set(running.identities.tenants) == {"red", "blue"}
    assert running.identities.limits["red"].running == 2
    running.write(BLUE)
    (line,) = await running.reload()
    assert line["tenants_removed"] == ["red"]
    assert set(running.identities.tenants) == {"blue"}
    assert [one.name for one in running.identities.configured_tenants] == ["blue"]
    assert running.tenants_changed == 2
    assert (await running.reload())[0]["changed"] == []
    assert running.tenants_changed == 2


@pytest.mark.parametrize("broken", ["[log\n", "[log]\nlevel='loud'\n", "[lgo]\n", RED + RED, "\udcff"])
async def test_a_broken_configuration_changes_nothing(tmp_path: Path, broken: str) -> None:
    running = Running(tmp_path, "[log]\nlevel='warning'\n" + RED)
    before = running.reloader.settings
    (tmp_path / "batond.toml").write_bytes(broken.encode(errors="surrogateescape"))
    (line,) = await running.reload()
    assert (line["event"], line["log_level"]) == ("reload_refused", "error")
    assert "ab" * 32 not in line["error"]
    assert running.reloader.settings is before
    assert set(running.identities.tenants) == {"red"}
    running.write("[service]\ndrain_timeout_s=1\n[log]\nlevel='warning'\n" + RED)
    assert (await running.reload())[0]["changed"] == ["service.drain_timeout_s"]


async def test_the_log_level_changes(tmp_path: Path) -> None:
    running = Running(tmp_path, "")
    for level in ("debug", "error", "info"):
        running.write(f"[log]\nlevel='{level}'\n")
        assert (await running.reload())[0]["changed"] == ["log.level"]
        assert logging.getLevelName(logging.getLogger().level) == level.upper()


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.pem = self._sign(self._key, authority=True)

    def write(self, folder: Path) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        (folder / "cert.pem").write_bytes(self._sign(key))
        (folder / "key.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )

    def _sign(self, key: ec.EllipticCurvePrivateKey, *, authority: bool = False) -> bytes:
        now, hour = dt.datetime.now(dt.UTC), dt.timedelta(hours=1)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(self._name if authority else x509.Name([]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - hour)
            .not_valid_after(now + hour)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )


async def trusted(address: str, authority: Authority) -> bool:
    """Whether a new connection is shown a certificate of this authority."""
    credentials = grpc.ssl_channel_credentials(authority.pem)
    # Without a pool of its own a channel would share the connection of an earlier one.
    async with grpc.aio.secure_channel(
        address, credentials, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


async def test_a_new_certificate_is_shown_to_new_connections_and_old_ones_stay(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    old.write(tmp_path)
    running = Running(tmp_path, TLS.format(tmp_path))
    assert running.tls is not None
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    addresses = [
        f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', running.tls.credentials())}" for _ in range(2)
    ]
    await server.start()
    try:
        # Before the first connection and after it: both ports must hear of it.
        assert await trusted(addresses[0], old)
        async with grpc.aio.secure_channel(addresses[0], grpc.ssl_channel_credentials(old.pem)) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            new.write(tmp_path)
            (line,) = await running.reload()
            assert line["changed"] == ["tls: contents of files"]
            for address in addresses:
                assert await trusted(address, new)
                assert not await trusted(address, old)
            await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            answer = await watch.read()
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
    finally:
        await server.stop(0)


@pytest.mark.parametrize("fault", ["another key", "no PEM", "missing", "encrypted"])
async def test_wrong_files_are_refused_and_the_old_ones_stay(tmp_path: Path, fault: str) -> None:
    Authority().write(tmp_path)
    running = Running(tmp_path, TLS.format(tmp_path))
    assert running.tls is not None
    before = running.tls.files
    key = tmp_path / "key.pem"
    if fault == "another key":
        good = (tmp_path / "cert.pem").read_bytes()
        Authority().write(tmp_path)
        (tmp_path / "cert.pem").write_bytes(good)
    elif fault == "no PEM":
        key.write_text("nothing")
    elif fault == "missing":
        key.unlink()
    else:
        key.write_bytes(
            ec.generate_private_key(ec.SECP256R1()).private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            )
        )
    running.write(TLS.format(tmp_path) + "[log]\nlevel='debug'\n")
    (line,) = await running.reload()
    assert line["event"] == "reload_refused"
    assert "TLS files" in line["error"]
    assert running.tls.files is before
    assert running.reloader.settings.log.level == "info"
