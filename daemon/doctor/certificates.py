"""How long certificates last.

The standard library tells the dates of a certificate that a handshake has checked, and of authorities. So a
handshake is made, in memory, between two ends of ours.
"""

from __future__ import annotations

import ssl
import stat
import time
from typing import TYPE_CHECKING, Any, Final

from batond.daemon.doctor.report import Finding, Level
from batond.daemon.front.tls import read_tls

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batond.daemon.config import Settings

CHECK: Final = "certificates"
SOON_S: Final = 14 * 86400
DAY_S: Final = 86400
_RENEW: Final = "renew it; SIGHUP (systemctl reload) has the daemon show the new one"


def look(settings: Settings) -> Iterator[Finding]:
    """The daemon's own certificate and its key, and the authorities that clients and servers must have."""
    tls = settings.tls
    if read_tls(tls) is None:
        yield Finding(CHECK, Level.OK, "the daemon speaks plain text")
    elif tls.cert_file is not None and tls.key_file is not None:
        yield _own(tls.cert_file, tls.key_file)
        mode = stat.S_IMODE(tls.key_file.stat().st_mode)
        if mode & (stat.S_IRGRP | stat.S_IROTH) & ~stat.S_IRGRP:
            yield Finding(
                CHECK, Level.WARNING, f"{tls.key_file}: everybody can read it", f"chmod 640 {tls.key_file}"
            )
    for name, file in (
        ("tls.client_ca_file", tls.client_ca_file),
        ("queue.tls_ca_file", settings.queue.tls_ca_file),
    ):
        if file is not None:
            yield from _authorities(name, file)


def _own(certificate: Path, key: Path) -> Finding:
    try:
        peer = peer_certificate(certificate, key)
    except ssl.SSLCertVerificationError as error:
        return Finding(CHECK, Level.FAULT, f"{certificate}: {error.verify_message}", _RENEW)
    names = ", ".join(str(value) for _, value in peer.get("subjectAltName", ())) or "no host"
    return _lasting(f"{certificate}, for {names},", str(peer["notAfter"]))


def _authorities(name: str, file: Path) -> Iterator[Finding]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(file)
    except OSError as error:
        yield Finding(CHECK, Level.FAULT, f"{name}: {file} can't be used: {error}", f"mend {name}")
        return
    for one in context.get_ca_certs():
        yield _lasting(f"{name}: an authority in {file}", str(one["notAfter"]))


def _lasting(what: str, not_after: str) -> Finding:
    end_s = ssl.cert_time_to_seconds(not_after)
    left_s = end_s - time.time()
    day = time.strftime("%Y-%m-%d", time.gmtime(end_s))
    if left_s <= 0:
        return Finding(CHECK, Level.FAULT, f"{what} has expired on {day}", _RENEW)
    level = Level.WARNING if left_s < SOON_S else Level.OK
    advice = _RENEW if level is Level.WARNING else ""
    return Finding(CHECK, level, f"{what} lasts until {day}, {left_s // DAY_S:.0f} days", advice)


def peer_certificate(certificate: Path, key: Path) -> dict[str, Any]:
    """The fields of a server's certificate, as a client that trusts it reads them.

    Args:
        certificate: PEM, the server's own first.
        key: Its key.

    Raises:
        ssl.SSLCertVerificationError: No client would take it: it has expired, or is none of a server's.
        OSError: The files can't be used.
    """
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key, password="")
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    # The certificate itself is what is trusted, whoever signed it.
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server, server_side=False)
    done = False
    while not done:
        done = all([_step(client), _step(server)])
    return dict(client.getpeercert() or {})


def _step(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
