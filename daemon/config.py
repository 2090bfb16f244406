"""The configuration's schema: every key with its type, range and default. `config_load.py` reads it."""

from __future__ import annotations

import ipaddress
import os
import tempfile
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from batond.daemon.config_base import Number, Seconds, Section, StringList, parse_json, split_address
from batond.daemon.config_memory import MemoryConfig
from batond.daemon.config_queue import QueueSettings
from batond.daemon.config_tenants import TenantConfig, check_tenants
from batond.daemon.config_tracing import TracingConfig
from batond.daemon.requests.params import MAX_N
from batond.policies.classes import DEFAULT_CLASSES, SlaClass, SlaClasses

ENV_PREFIX: Final = "BATOND_"
SMOLLM2_NAME: Final = "SmolLM2-135M-Instruct"
_LARGEST_UNIX_PATH_BYTES: Final = 107  # The kernel's limit on the path of a Unix socket.


def runtime_dir() -> Path:
    """Directory of sockets: systemd's, else the user's own."""
    if given := os.environ.get("RUNTIME_DIRECTORY"):
        return Path(given.split(":")[0])
    if os.geteuid() == 0:
        return Path("/run/batond")
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(given) / "batond"
    return Path(tempfile.gettempdir()) / f"batond-{os.geteuid()}"


def is_local(address: str) -> bool:
    """Whether only this host can reach a server on the address."""
    if address.startswith("unix:"):
        return True
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ServerSettings(Section):
    """Where and how clients reach the daemon.

    Attributes:
        listen: Addresses of the gRPC server: `host:port` or `unix:/path`.
        advertise: `host:port` at which other hosts reach this daemon, as clients and operators are told;
            empty is the first address of `listen` that is not of this host alone.
        metrics_listen: `host:port` of Prometheus metrics over HTTP; empty is off.
        metrics_tenants: Tenants with a label of their own in metrics; the others are counted as `other`.
        max_message_bytes: Longest request that is read; a longer one is answered RESOURCE_EXHAUSTED.
        allow_insecure: Accept a non-loopback address without TLS and credentials.
        require_credentials: Let nobody in without credentials, not even while there are no tenants: the first
            one is then added through the administrators' socket.
        admin_socket: Path of the local administrators' socket; `auto` is `admin.sock` beside the first Unix
            socket of `listen`, empty is off.
        admin_users: Users of this host, by name or number, who may use it beside root and the daemon's own.
        reflection: Let clients such as grpcurl list the services.
    """

    listen: StringList = Field(
        default_factory=lambda: ["127.0.0.1:7431", f"unix:{runtime_dir()}/batond.sock"], min_length=1
    )
    advertise: str = ""
    metrics_listen: str = "127.0.0.1:9431"
    metrics_tenants: int = Field(default=50, ge=0, le=1000)
    max_message_bytes: ByteSize = Field(default=ByteSize(16 << 20), ge=64 << 10, le=1 << 30)
    allow_insecure: bool = False
    require_credentials: bool = False
    admin_socket: str = "auto"
    admin_users: StringList = Field(default_factory=list)
    reflection: bool = True

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: list[str]) -> list[str]:
        for address in listen:
            if address.startswith("unix:"):
                if len(os.fsencode(address.removeprefix("unix:"))) > _LARGEST_UNIX_PATH_BYTES:
                    raise ValueError(f"{address}: the path is longer than {_LARGEST_UNIX_PATH_BYTES} bytes")
            else:
                split_address(address)
        return listen

    @field_validator("admin_socket")
    @classmethod
    def _check_admin_socket(cls, path: str) -> str:
        if path not in {"", "auto"} and not path.startswith("/"):
            raise ValueError(f"{path!r} is neither an absolute path nor 'auto' nor empty")
        return path

    @property
    def admin_socket_path(self) -> Path | None:
        """The local administrators' socket, or None where there is none."""
        if self.admin_socket != "auto":
            return Path(self.admin_socket) if self.admin_socket else None
        sockets = [address.removeprefix("unix:") for address in self.listen if address.startswith("unix:")]
        return Path(sockets[0]).with_name("admin.sock") if sockets else None

    @field_validator("metrics_listen", "advertise")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if address:
            split_address(address)
        return address


class TlsSettings(Section):
    """Certificates in PEM files; without them the daemon speaks plain text.

    Attributes:
        cert_file: The server's certificate chain.
        key_file: Its private key.
        client_ca_file: Demand client certificates that this authority signed.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None

    @model_validator(mode="after")
    def _check_pair(self) -> TlsSettings:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file come together")
        if self.client_ca_file and not self.cert_file:
            raise ValueError("client_ca_file needs cert_file and key_file")
        return self

    @property
    def on(self) -> bool:
        """Whether the server speaks TLS."""
        return self.cert_file is not None


class ModelSettings(Section):
    """What is served. Code that comes with weights is never run: there is no switch for it.

    Attributes:
        path: Local folder in Hugging Face's layout, a `.gguf` file, or the word `smollm2`.
        name: The name clients ask for; empty takes the folder's or file's own.
        dtype: A torch dtype's name; `auto` is the weights' own on a GPU, float32 on a CPU.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        default_max_tokens: Output limit of a request that names none.
        max_choices: Most choices (`n`) of one job.
        max_choice_tokens: Most tokens that all choices of a job of several may emit: `n` * `max_tokens`.
    """

    model_config = ConfigDict(protected_namespaces=())

    path: str = ""
    name: str = Field(default="", max_length=200)
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    default_max_tokens: int = Field(default=256, ge=1)
    max_choices: int = Field(default=16, ge=1, le=MAX_N)
    max_choice_tokens: int = Field(default=1 << 16, ge=1)

    @property
    def served_name(self) -> str:
        """The name clients ask for."""
        if self.name:
            return self.name
        return SMOLLM2_NAME if self.path == "smollm2" else Path(self.path).name.removesuffix(".gguf")


class EngineConfig(Section):
    """The batch and its scheduling; see `EngineSettings` for what each value means to the engine.

    Attributes:
        rows: Rows of the batch.
        batch: `auto`, `padded` or `ring`.
        prefill: `decoupled` or `inline`.
        chunk_tokens: Prompt tokens computed between two decode steps; 0 is no bound, `auto` follows the
            inter-token target of the most urgent class that runs.
        max_query_tokens: Limit on prompt + output of a query; 0 takes the model's own.
        host_pool_bytes: Host RAM for parked KV: bytes, a size such as `4GiB`, or `auto`.
        session_bytes: Part of it, and of the spill directory, that kept KV of chat sessions may take; `auto`
            is a quarter of both together, 0 keeps none.
        session_ttl_s: A chat session unused for so long is dropped.
        spill_dir: Directory for KV that the host pool can't hold; empty is none.
        spill_bytes: Most bytes of files in it; `auto` is half of what its disk has free.
        policy: Name of a registered policy.
        quantum_tokens: Tokens a query decodes before it may be parked again.
        max_parks: Parks after which a query stays.
        ready_limit: Prefilled queries kept ahead of free rows.
        overcommit: Reserve KV for the output expected of a class; false reserves all that is asked for.
        one_at_a_time: Serve a model that no shared batch serves exactly in a batch of one row, or refuse it.
        deterministic: Give a query the same bits whatever the load is; see `LocalEngine`.
        kernels: Decode on a card through the ring's own kernels, where they are exact for the model.
        graphs: Capture decode steps and prompts on a card, where they can be; needs the kernels.
        compiled: Compile the small parts of captured steps.
        overlap: Begin a captured step before the books of the last one are done.
        arena: What the ring's memory is: `plain`, `elastic` or `auto`; see `LocalEngine`.
        threads: CPU threads of torch; 0 keeps torch's choice.
    """

    rows: int = Field(default=8, ge=1, le=4096)
    batch: Literal["auto", "padded", "ring"] = "auto"
    prefill: Literal["decoupled", "inline"] = "decoupled"
    chunk_tokens: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    max_query_tokens: int = Field(default=0, ge=0)
    host_pool_bytes: Literal["auto"] | ByteSize = "auto"
    session_bytes: Literal["auto"] | ByteSize = "auto"
    session_ttl_s: Seconds = 3600.0
    spill_dir: str = ""
    spill_bytes: Literal["auto"] | ByteSize = "auto"
    policy: str = "priority"
    quantum_tokens: int = Field(default=16, ge=0)
    max_parks: int = Field(default=8, ge=0)
    ready_limit: int = Field(default=1, ge=0)
    overcommit: bool = True
    one_at_a_time: bool = False
    deterministic: bool = False
    kernels: bool = True
    graphs: bool = True
    compiled: bool = True
    overlap: bool = True
    arena: Literal["auto", "plain", "elastic"] = "auto"
    threads: int = Field(default=0, ge=0, le=4096)

    @model_validator(mode="after")
    def _check_graphs(self) -> EngineConfig:
        if self.graphs and not self.kernels and "graphs" in self.model_fields_set:
            raise ValueError("graphs = true needs kernels = true: steps are captured with the kernels alone")
        return self


class ServiceSettings(Section):
    """Life of the process.

    Attributes:
        drain_timeout_s: After SIGTERM running jobs may go on for so long; the rest is handed back.
        frozen_after_s: An engine that sends nothing for so long is frozen: not ready, no watchdog pings.
        engine_backoff_s: First pause before a dead engine is started again; doubles up to a minute.
    """

    drain_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    frozen_after_s: Seconds = 30.0
    engine_backoff_s: Seconds = 0.5


class ClassConfig(Section):
    """An SLA class; see `batond.policies.classes.SlaClass`."""

    name: str
    order: int
    preemptible: bool = True
    ttft_target_s: float = 5.0
    tpot_target_s: float = 0.25
    longest_queue_s: float | None = None
    share: float = 1.0


class LogSettings(Section):
    """Attributes: level: least severity that is shown; format: `auto` is console on a terminal, else JSON."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Settings(BaseSettings):
    """The resolved configuration. Load it with `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
        protected_namespaces=(),
    )

    server: ServerSettings = Field(default_factory=ServerSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    queue: QueueSettings = Field(default_factory=QueueSettings)
    service: ServiceSettings = Field(default_factory=ServiceSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    classes: Annotated[list[ClassConfig], NoDecode, BeforeValidator(parse_json)] = []
    tenants: Annotated[list[TenantConfig], NoDecode, BeforeValidator(parse_json)] = []
    policy_options: dict[str, dict[str, Number]] = {}  # By policy; docs/policies.md has them.

    @property
    def sla_classes(self) -> SlaClasses:
        """The configured classes, or the default ones."""
        if not self.classes:
            return SlaClasses(DEFAULT_CLASSES)
        return SlaClasses(SlaClass(**entry.model_dump()) for entry in self.classes)

    @model_validator(mode="after")
    def _check_all(self) -> Settings:
        self.check()
        return self

    def check(self) -> None:
        """Check what no section can check alone.

        Raises:
            ValueError: Strangers would be served in plain text or unasked, or a tenant can't be.
        """
        self._check_exposure()
        self._check_tenants()

    def _check_exposure(self) -> None:
        """Refuse to serve strangers in plain text, or without asking who they are."""
        asked = bool(self.tenants) or self.server.require_credentials
        open_to_all = [address for address in self.server.listen if not is_local(address)]
        if open_to_all and not self.server.allow_insecure and not (self.tls.on and asked):
            raise ValueError(
                f"{open_to_all[0]} can be reached from other hosts: configure tls.cert_file, tls.key_file and"
                " tenants with tokens or certificates (or server.require_credentials), or set"
                " server.allow_insecure = true"
            )

    def _check_tenants(self) -> None:
        check_tenants(self.tenants, self.sla_classes)
        if not self.tls.client_ca_file and any(tenant.certificate_subject for tenant in self.tenants):
            raise ValueError(
                "tenants.certificate_subject needs tls.client_ca_file, which checks certificates"
            )
