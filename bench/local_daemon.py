"""A real daemon of one's own in a folder, for the demonstration, benchmarks and end-to-end tests."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from batond.clients import AsyncClient, Client
from batond.clients.errors import BatondClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from batond.clients import ServerInfo

OPERATOR = "operator"
DAEMON_PROGRAM = ("-m", "batond.daemon", "serve")
#: Without a word in its log; a daemon that loads says so every few seconds, however slow the machine is.
START_SILENCE_S = 170.0
TELL_EVERY_S = 15.0
STOP_TIMEOUT_S = 60.0
_LOG_TAIL_LINES = 15


class LocalDaemon:
    """Starts `batond serve` with an embedded Redis on a Unix socket; stops it as systemd would.

    Args:
        folder: Where configuration, socket, queue and log go.
        tenants: Names of tenants; an operator is added.
        model: Keys of the configuration's `[model]`.
        engine: Keys of `[engine]`.
        sections: Keys of further sections, by section.
        environment: Variables added to the daemon's environment.
        tokens: Tokens by tenant, as another daemon of the same queue has them; others are made.
        program: What Python runs, before `--config FILE`.
    """

    def __init__(
        self,
        folder: Path,
        tenants: Sequence[str],
        *,
        model: Mapping[str, Any],
        engine: Mapping[str, Any],
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
        tokens: Mapping[str, str] | None = None,
        program: Sequence[str] = DAEMON_PROGRAM,
    ) -> None:
        self.folder = folder
        self.socket = folder / "batond.sock"
        self.log = folder / "batond.log"
        self.tokens = {name: secrets.token_urlsafe(24) for name in (*tenants, OPERATOR)} | dict(tokens or {})
        self._program = program
        self._config = folder / "batond.toml"
        self._config.write_text(self._toml(model, engine, sections or {}))
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("BATOND_")}
        self._environment = {**inherited, **(environment or {})}
        self.process = self._start()

    def client(self, tenant: str, **options: Any) -> Client:
        """A client with the tenant's token."""
        return Client(f"unix:{self.socket}", token=self.tokens[tenant], **{"timeout_s": 120.0, **options})

    def async_client(self, tenant: str) -> AsyncClient:
        """The same for asyncio."""
        return AsyncClient(f"unix:{self.socket}", token=self.tokens[tenant], timeout_s=120.0)

    def operator(self) -> Client:
        """A client that may use the admin service."""
        return self.client(OPERATOR)

    def wait_ready(self, tell: Callable[[str], None] | None = None) -> ServerInfo:
        """Wait until the daemon takes jobs.

        Args:
            tell: Hears now and then that it is still starting.

        Raises:
            SystemExit: It ended, or said nothing for too long; its last words are shown.
        """
        began_s = heard_s = told_s = time.monotonic()
        written = 0
        while time.monotonic() - heard_s < START_SILENCE_S and self.process.poll() is None:
            if self.socket.exists():
                try:
                    with self.client(OPERATOR, timeout_s=2.0) as client:
                        return client.server_info()
                except BatondClientError:
                    pass
            time.sleep(0.1)
            now_s, size = time.monotonic(), self.log.stat().st_size
            if size != written:
                heard_s, written = now_s, size
            if tell is not None and now_s - told_s > TELL_EVERY_S:
                told_s = now_s
                tell(f"still starting, {now_s - began_s:.0f} s")
        tail = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        raise SystemExit("\n".join(["the daemon did not become ready; the end of its log:", *tail]))

    def stop(self) -> int:
        """Send SIGTERM and wait; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def restart(self) -> ServerInfo:
        """Start it again on the same folder, after `stop` or a crash."""
        self.process = self._start()
        return self.wait_ready()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - our own interpreter, our own file
                [sys.executable, *self._program, "--config", str(self._config)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def _toml(
        self, model: Mapping[str, Any], engine: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
    ) -> str:
        merged: dict[str, dict[str, Any]] = {
            "server": {"listen": [f"unix:{self.socket}"], "metrics_listen": ""},
            "model": {"device": "cpu", **model},
            "engine": dict(engine),
            "queue": {"state_dir": str(self.folder / "redis")},
        }
        for section, keys in sections.items():
            merged[section] = {**merged.get(section, {}), **keys}
        lines = []
        for section, keys in merged.items():
            lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in keys.items())]
        for name, token in self.tokens.items():
            digest = hashlib.sha256(token.encode()).hexdigest()
            admin = _toml_value(name == OPERATOR)
            lines += ["[[tenants]]", f'name = "{name}"', f'token_sha256 = "{digest}"', f"admin = {admin}"]
        return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    """Numbers, strings, booleans and lists of them look the same in TOML and JSON."""
    return json.dumps(value)
