"""The configuration of the queue: which Redis keeps the jobs, and how they are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from batond.daemon.config_base import Seconds, Section, StringList, split_address

MOST_NODES: Final = 32
MOST_REPLICAS: Final = 16


def state_dir() -> Path:
    """Directory of what must survive a restart: systemd's, else the user's own."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/batond")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "batond"


class QueueSettings(Section):
    """Where jobs live.

    Attributes:
        mode: `standalone` is one server, `sentinel` the primary that Sentinels name, `cluster` Redis Cluster.
        url: Of a standalone server; empty starts a private Redis server in the state directory.
        nodes: `host:port` of the Sentinels, or of some nodes of the Cluster.
        sentinel_service: Name by which the Sentinels know the primary.
        username: ACL user at the Redis servers.
        password: Its password, or the one of `requirepass`.
        sentinel_username: ACL user at the Sentinels, where they ask for one.
        sentinel_password: Its password.
        tls: Speak TLS with Sentinels and servers; of a standalone server `rediss://` says it.
        tls_ca_file: The authority that signed the servers' certificates; None takes the system's.
        tls_cert_file: Client certificate, where servers ask for one.
        tls_key_file: Its private key.
        wait_replicas: Replicas that must have a write before it counts.
        state_dir: Where the private server keeps its append-only file.
        lease_s: A daemon silent for so long loses its jobs to another.
        max_queued: Most jobs waiting per model; more are refused.
        result_ttl_s: How long a finished job can be read.
        max_attempts: A job that killed its engine so often goes to the dead-letter list.
        claim_ahead: Jobs of a class claimed beyond the batch's rows, so that the next one is at hand.
    """

    mode: Literal["standalone", "sentinel", "cluster"] = "standalone"
    url: SecretStr = SecretStr("")
    nodes: StringList = Field(default_factory=list, max_length=MOST_NODES)
    sentinel_service: str = Field(default="", max_length=200)
    username: str = Field(default="", max_length=200)
    password: SecretStr = SecretStr("")
    sentinel_username: str = Field(default="", max_length=200)
    sentinel_password: SecretStr = SecretStr("")
    tls: bool = False
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    wait_replicas: int = Field(default=0, ge=0, le=MOST_REPLICAS)
    state_dir: Path = Field(default_factory=state_dir)
    lease_s: Seconds = 10.0
    max_queued: int = Field(default=10_000, ge=1)
    result_ttl_s: int = Field(default=3600, ge=1)
    max_attempts: int = Field(default=3, ge=1)
    claim_ahead: int = Field(default=2, ge=1)

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: list[str]) -> list[str]:
        for node in nodes:
            try:
                host, port = split_address(node)
            except ValueError as error:
                raise ValueError(f"{node!r} is no host:port ({error})") from error
            if not host or not port:
                raise ValueError(f"{node!r} is no host:port")
        if len(set(nodes)) != len(nodes):
            raise ValueError("a node is named twice")
        return nodes

    @model_validator(mode="after")
    def _check_together(self) -> QueueSettings:
        if self.mode == "standalone":
            self._check_standalone()
        elif self.url.get_secret_value():
            raise ValueError(f"url is of a standalone server: name those of mode {self.mode!r} in nodes")
        elif not self.nodes:
            raise ValueError(f'mode {self.mode!r} needs nodes = ["host:port", ...]')
        if (self.mode == "sentinel") != bool(self.sentinel_service):
            raise ValueError("sentinel_service and mode = 'sentinel' come together")
        if self.mode != "sentinel" and (self.sentinel_username or self.sentinel_password.get_secret_value()):
            raise ValueError("sentinel_username and sentinel_password need mode = 'sentinel'")
        if self.sentinel_username and not self.sentinel_password.get_secret_value():
            raise ValueError("sentinel_username needs sentinel_password")
        if self.username and not self.password.get_secret_value():
            raise ValueError("username needs password")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file come together")
        return self

    def _check_standalone(self) -> None:
        if self.nodes:
            raise ValueError("nodes need mode = 'sentinel' or 'cluster'; a standalone server has a url")
        url = self.url.get_secret_value()
        if self.tls and not url.startswith("rediss://"):
            raise ValueError("tls = true is of sentinel and cluster; here let url begin with rediss://")
        if not url and (self.username or self.password.get_secret_value() or self.wait_replicas):
            raise ValueError("username, password and wait_replicas are for a server named by url or nodes")

    @property
    def named(self) -> bool:
        """Whether servers are named; otherwise the daemon starts a private one."""
        return self.mode != "standalone" or bool(self.url.get_secret_value())

    @property
    def speaks_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls or self.url.get_secret_value().startswith("rediss://")
