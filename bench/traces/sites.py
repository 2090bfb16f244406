"""The daemons a trace is replayed on: one of one's own, or one that runs."""

from __future__ import annotations

import json
import re
import tempfile
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from batond.bench.local_daemon import OPERATOR, LocalDaemon
from batond.clients import AsyncClient, ClientTLS, ServerState
from batond.clients.errors import BatondClientError
from batond.daemon.errors import ConfigError, StateError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from batond.bench.traces.options import OwnDaemon, RunningDaemon
    from batond.clients import ServerInfo
    from batond.daemon.simulator.trace import Request
    from batond.policies.classes import SlaClasses

#: Of a call, also while thousands of streams are opened beside it.
CALL_TIMEOUT_S: Final = 120.0
#: What a daemon of one's own lets wait beyond the requests: step times are measured with jobs too.
SPARE_QUEUED: Final = 1000
_TENANT: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")  # As in the configuration.


@dataclass(frozen=True, slots=True)
class Site:
    """A daemon, and how tenants and the operator talk to it; in one event loop.

    Attributes:
        info: As it says of itself.
        clients: By tenant of the trace.
        operator: Who looks at the batch and exchanges the policy.
        one_tenant: All tenants of the trace are one to the daemon, so that it can't share among them.
    """

    info: ServerInfo
    clients: Mapping[str, AsyncClient]
    operator: AsyncClient
    one_tenant: bool


@contextmanager
def started(
    own: OwnDaemon, requests: Sequence[Request], classes: SlaClasses, policy: str, spare_tokens: int
) -> Iterator[LocalDaemon]:
    """A daemon for these requests; it is stopped at the end.

    Args:
        own: How it is set up.
        requests: Of any arrival: the longest and the tenants count.
        classes: With their targets.
        policy: Its first.
        spare_tokens: Beyond the longest request.

    Raises:
        ConfigError: A tenant's name is none for a daemon.
    """
    tenants = sorted({one.tenant for one in requests})
    for name in tenants:
        if name == OPERATOR or not _TENANT.fullmatch(name):
            raise ConfigError(
                f"{name!r} can't be the name of a tenant here: rename it in the trace", field="trace"
            )
    longest = max(one.prompt_tokens + one.output_tokens for one in requests)
    sections = {name: dict(keys) for name, keys in own.settings.items()}
    engine = {
        "rows": own.rows,
        "chunk_tokens": own.chunk_tokens,
        "quantum_tokens": own.quantum_tokens,
        "max_query_tokens": longest + spare_tokens,
        "host_pool_bytes": own.host_pool_bytes,
        "policy": policy,
        "threads": own.threads,
        **sections.pop("engine", {}),
    }
    model = {"path": own.model, "device": own.device, "dtype": own.dtype, **sections.pop("model", {})}
    sections["queue"] = {"max_queued": len(requests) + SPARE_QUEUED, **sections.get("queue", {})}
    with tempfile.TemporaryDirectory(prefix="bd-") as name:  # Paths of Unix sockets are short.
        daemon = LocalDaemon(
            Path(name),
            tenants,
            model=model,
            engine=engine,
            sections=sections,
            environment={"BATOND_CLASSES": json.dumps([asdict(one) for one in classes]), **own.environment},
            program=own.program,
        )
        try:
            yield daemon
        finally:
            daemon.stop()


@asynccontextmanager
async def own_site(daemon: LocalDaemon, info: ServerInfo, tenants: Sequence[str]) -> AsyncIterator[Site]:
    """Clients of a daemon of one's own."""
    clients = {name: daemon.async_client(name) for name in (*tenants, OPERATOR)}
    try:
        yield Site(info, clients, clients[OPERATOR], one_tenant=False)
    finally:
        for client in clients.values():
            await client.close()


class Connector:
    """Clients of a running daemon, one for each token; closed at the end of the context.

    Args:
        running: Address and credentials.

    Raises:
        ConfigError: The address is none, a token would cross a network in plain text, or the certificate
            can't be read.
    """

    def __init__(self, running: RunningDaemon) -> None:
        self._running = running
        self._clients: dict[str | None, AsyncClient] = {}
        try:
            self._tls = None if running.root_ca is None else ClientTLS.from_files(running.root_ca)
            self.operator = self.client(running.operator_token)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{running.address} can't be called: {error}", field="address") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for client in self._clients.values():
            await client.close()

    def client(self, token: str | None) -> AsyncClient:
        """The client of a token; None has none to show."""
        if token not in self._clients:
            self._clients[token] = AsyncClient(
                [address.strip() for address in self._running.address.split(",")],
                token=token,
                tls=self._tls,
                timeout_s=CALL_TIMEOUT_S,
                allow_plaintext_token=self._running.allow_plaintext_token,
            )
        return self._clients[token]

    async def info(self) -> ServerInfo:
        """What the daemon says of itself.

        Raises:
            StateError: It is not reached, refuses us, or takes no jobs.
        """
        try:
            info = await self.operator.server_info()
        except BatondClientError as error:
            raise StateError(f"the daemon at {self._running.address} can't be asked: {error}") from error
        if info.state is not ServerState.READY:
            raise StateError(
                f"the daemon at {self._running.address} is {info.state}: {info.state_message};"
                " replay when it is ready"
            )
        return info

    def site(self, info: ServerInfo, tenants: Sequence[str]) -> Site:
        """The daemon as these tenants see it.

        Raises:
            ConfigError: A tenant has no token.
        """
        tokens = {name: self._running.token_of(name) for name in tenants}
        clients = {name: self.client(token) for name, token in tokens.items()}
        return Site(info, clients, self.operator, one_tenant=len(set(tokens.values())) == 1 < len(tenants))
