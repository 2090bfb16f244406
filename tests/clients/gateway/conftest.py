"""A gateway on a real socket, before a real daemon whose engine computes nothing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import httpx
import pytest
import uvicorn

from batond.bench.fake_daemon import PROGRAM
from batond.bench.fake_engine import STEP_VARIABLE
from batond.bench.local_daemon import LocalDaemon
from batond.clients.gateway import GatewaySettings, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEP_S = "0.005"


class ServedApp:
    """An application on a port of its own, in a thread."""

    def __init__(self, settings: GatewaySettings) -> None:
        config = uvicorn.Config(create_app(settings), port=0, log_level="warning", lifespan="on")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            self.thread.join(0.01)
            assert self.thread.is_alive()
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        """Ends it."""
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDaemon]:
    """Starts the daemon."""
    folder: Path = tmp_path_factory.mktemp("gw")
    daemon = LocalDaemon(
        folder,
        ["alice", "bob"],
        model={"path": str(folder), "name": "fake"},
        engine={"rows": 4},
        environment={STEP_VARIABLE: STEP_S},
        program=PROGRAM,
    )
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.stop()


@pytest.fixture(scope="module")
def settings(fake: LocalDaemon, tmp_path_factory: pytest.TempPathFactory) -> GatewaySettings:
    """Says what the gateway of the module does."""
    return GatewaySettings(daemons=(f"unix:{fake.socket}",))


@pytest.fixture(scope="module")
def gateway(settings: GatewaySettings) -> Iterator[ServedApp]:
    """Starts the gateway."""
    app = ServedApp(settings)
    yield app
    app.stop()


@pytest.fixture
def http(gateway: ServedApp, fake: LocalDaemon) -> Iterator[httpx.Client]:
    """Gives plain HTTP in the name of alice."""
    headers = {"authorization": f"Bearer {fake.tokens['alice']}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=30, trust_env=False) as client:
        yield client
