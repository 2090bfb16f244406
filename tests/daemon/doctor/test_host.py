"""What `batond doctor` says of addresses, certificates, disks, cards and units."""

from __future__ import annotations

import datetime as dt
import http.server
import socket
import threading
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from batond.daemon.doctor import cards, certificates, disks, ports, systemd_unit
from batond.daemon.doctor.report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from batond.daemon.config import Settings

OK, WARNING, FAULT = Level.OK, Level.WARNING, Level.FAULT


def levels(findings: Iterable[Finding]) -> list[Level]:
    return [one.level for one in findings]


# -- addresses ------------------------------


@pytest.fixture
def batond() -> Iterator[str]:
    """What answers as a daemon does."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    for service in ("liveness", "readiness"):
        servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(20)


def test_an_address_is_free_ours_or_another_programs(batond: str, settings: Callable[..., Settings]) -> None:
    def look(address: str) -> Finding:
        server = {"listen": [address], "metrics_listen": "", "admin_socket": ""}
        (found,) = ports.look(settings(server=server))
        return found

    assert look("127.0.0.1:0").level is OK
    ours = look(batond)
    assert (ours.level, ours.message) == (OK, f"{batond}: a batond is there, ready")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = look(f"127.0.0.1:{other.getsockname()[1]}")
    assert taken.level is FAULT
    assert "is it taken?" in taken.message
    assert "server.listen" in taken.advice


def test_sockets_are_looked_at_alone(tmp_path: Path, settings: Callable[..., Settings]) -> None:
    place = tmp_path / "run" / "b.sock"
    given = settings(server={"listen": [f"unix:{place}"]})
    assert levels(ports.look(given)) == [OK, OK]
    assert not place.parent.exists(), "a folder made here would be this user's, not the service's"
    place.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place))
        other.listen()
        assert levels(ports.look(given)) == [FAULT, OK]


class Metrics(http.server.BaseHTTPRequestHandler):
    """Metrics, of whomever."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:  # type: ignore[override]
        """Says nothing."""


def test_metrics_are_told_from_others(settings: Callable[..., Settings]) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"127.0.0.1:{server.server_port}"
    given = settings(server={"metrics_listen": address, "admin_socket": ""})
    found = []
    for Metrics.body in (b"batond_rows 4\n", b"other 1\n"):
        found.append(list(ports.look(given))[1].level)
    server.shutdown()
    thread.join()
    server.server_close()
    assert found == [OK, FAULT]


# -- certificates ------------------------------


def certificate(
    folder: Path, days: float, *, purpose: Any = ExtendedKeyUsageOID.SERVER_AUTH
) -> dict[str, str]:
    """A certificate that lasts for so many days from now, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpu0")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody else")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=90))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("gpu0.example")]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = {"cert_file": folder / "c.pem", "key_file": folder / "k.pem"}
    files["cert_file"].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files["key_file"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    files["key_file"].chmod(0o600)
    return {name: str(file) for name, file in files.items()}


@pytest.mark.parametrize(
    ("days", "level", "words"),
    [(100, OK, "for gpu0.example, lasts until"), (5, WARNING, "5 days"), (-1, FAULT, "expired")],
)
def test_certificates_are_told_how_long_they_last(
    tmp_path: Path, settings: Callable[..., Settings], days: int, level: Level, words: str
) -> None:
    given = settings(tls=certificate(tmp_path, days + 0.5))
    (found,) = certificates.look(given)
    assert found.level is level
    assert words in found.message
    assert bool(found.advice) is (level is not OK)


def test_a_certificate_that_no_client_takes_and_a_key_that_all_can_read(
    tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    tls = certificate(tmp_path, 100, purpose=ExtendedKeyUsageOID.CLIENT_AUTH)
    Path(tls["key_file"]).chmod(0o644)
    assert levels(certificates.look(settings(tls=tls))) == [FAULT, WARNING]


# -- the host ------------------------------


def test_the_disk_of_the_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    kinds: dict[str, object] = {"mountpoint": str(tmp_path), "fstype": "tmpfs"}
    monkeypatch.setattr(disks.psutil, "disk_partitions", lambda all: [SimpleNamespace(**kinds)])  # noqa: A006 - the library's name
    for free, kind, expected in (
        (50 << 30, "ext4", [OK]),
        (500 << 20, "ext4", [WARNING]),
        (1 << 20, "ext4", [FAULT]),
        (50 << 30, "tmpfs", [OK, WARNING]),
        (50 << 30, "nfs4", [OK, WARNING]),
    ):
        kinds["fstype"] = kind
        monkeypatch.setattr(disks.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert levels(disks.look(settings())) == expected, (free, kind)
    (tmp_path / "file").touch()
    assert levels(disks.look(settings(queue={"state_dir": str(tmp_path / "file" / "x")}))) == [FAULT]
    assert levels(disks.look(settings(queue={"url": "redis://127.0.0.1:1/0"}))) == [OK]


class Nvml:
    """A library with one card."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        if self._error is not None:
            raise self._error

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": b"580.1",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(free=70 << 30, total=80 << 30),
            "nvmlDeviceGetName": "H100",
        }
        return lambda *_: answers.get(name)


def test_a_card_is_there_or_not_needed_or_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(cards, "memlock_free_bytes", lambda: None)

    def look(device: str, nvml: Any, **engine: Any) -> list[Finding]:
        given = settings(model={"device": device}, engine=engine)
        return list(cards.look(given, "none", nvml=lambda: nvml, devices=tmp_path))

    found = look("cuda", Nvml())
    assert [one.level for one in found] == [OK, OK, OK]
    assert "driver 580.1, H100 with 70.0 of 80.0 GiB free" in found[0].message
    broken = Nvml(RuntimeError("Driver/library version mismatch"))
    assert [one.level for one in look("auto", broken)] == [OK, OK], "no card"
    missing = look("cuda", broken)
    assert missing[0].level is FAULT
    assert "version mismatch" in missing[0].message
    (tmp_path / "nvidia0").touch()
    assert look("auto", broken)[0].level is WARNING, "there is a card, and its driver is ill"
    assert [one.level for one in look("cpu", broken)] == [OK, OK]
    monkeypatch.setattr(cards, "memlock_free_bytes", lambda: 64 << 10)
    tight = look("cuda", Nvml(), host_pool_bytes=1 << 20)[-1]
    assert (tight.check, tight.level) == ("memlock", WARNING)
    assert "LimitMEMLOCK=infinity" in tight.advice


def test_limits_of_the_unit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    """V2: a unit that kills a drain, or allows fewer files than clients need."""
    program = tmp_path / "systemctl"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def look(**properties: str) -> list[Finding]:
        told = {
            "LoadState": "loaded",
            "ActiveState": "active",
            "TimeoutStopUSec": "1min 30s",
            "LimitNOFILE": "65536",
            "LimitMEMLOCK": str((1 << 64) - 1),
            "MemoryMax": "infinity",
        }
        lines = "\n".join(f"{name}={value}" for name, value in (told | properties).items())
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
        program.chmod(0o700)
        systemd_unit.unit_properties.cache_clear()
        return list(systemd_unit.look(settings(engine={"host_pool_bytes": 1 << 30}), "batond.service"))

    (sound,) = look()
    assert (sound.level, sound.message) == (
        OK,
        "batond.service is active, its limits fit the configuration",
    )
    assert systemd_unit.unit_properties("batond.service")["LimitMEMLOCK"] == "infinity"
    assert [one.level for one in look(TimeoutStopUSec="20s")] == [FAULT]
    assert [one.level for one in look(LimitNOFILE="1024", MemoryMax="1000")] == [WARNING, FAULT]
    assert [one.level for one in look(LoadState="not-found")] == [OK]


@pytest.mark.parametrize(
    ("span", "expected"),
    [("1min 30s", 90.0), ("500ms", 0.5), ("1h 2min", 3720.0), ("infinity", None), ("", None), ("3x", None)],
)
def test_times_of_systemd(span: str, expected: float | None) -> None:
    assert systemd_unit.seconds(span) == expected
