"""One daemon watched once for many viewers, each of whom must be an administrator, and stay one."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from starlette.datastructures import Headers

from batond.clients.batch import BatchSnapshot
from batond.clients.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from batond.clients.gateway import GatewaySettings
from batond.clients.gateway.page import watch as watch_module
from batond.clients.gateway.page.watch import Watch
from batond.clients.gateway.problems import ApiError
from batond.clients.model import ServerInfo, ServerState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batond.clients.gateway.page.viewer import Viewer

INFO = ServerInfo(
    version="1",
    library_versions={},
    state=ServerState.READY,
    state_message="",
    model="m",
    device="cpu",
    rows=2,
    max_query_tokens=1,
    vocab_size=1,
    eos_token_ids=(),
    batch_kind="ring",
    batch_reason="",
    preemption_mode="offload",
    policy="priority",
    sla_classes=(),
    default_sla_class="",
    kv_bytes_per_token=1,
    host_pool_bytes=1,
    max_message_bytes=1,
    start_time=None,
    uptime_s=1.0,
    tenant="t",
)


class Daemon:
    """Stands for the daemon behind every client: who is an administrator, and which streams are open."""

    def __init__(self) -> None:
        self.admins = {"a", "b"}
        self.streams: list[str | None] = []  # In whose name each open stream is.
        self.opened = self.closed = self.steps = 0
        self.news = asyncio.Event()
        self.away = False
        self.checks = 0

    def check(self, token: str | None) -> None:
        self.checks += 1
        if self.away:
            raise UnavailableError("it is away")
        if token not in self.admins:
            raise PermissionDeniedError(f"tenant {token} is no administrator", reason="NOT_ADMIN")

    def step(self) -> None:
        self.steps += 1
        news, self.news = self.news, asyncio.Event()
        news.set()


class FakeClient:
    """An AsyncClient as far as the page needs it."""

    def __init__(self, daemon: Daemon, token: str | None = None) -> None:
        self.daemon, self.token = daemon, token

    def calling(self, token: str | None, metadata: object = ()) -> FakeClient:
        return FakeClient(self.daemon, token)

    async def policy(self) -> None:
        self.daemon.check(self.token)

    async def server_info(self) -> ServerInfo:
        self.daemon.check(self.token)
        return INFO

    async def watch_batch(self, min_interval_s: float) -> AsyncIterator[BatchSnapshot]:
        self.daemon.check(self.token)
        self.daemon.streams.append(self.token)
        try:
            while True:
                yield BatchSnapshot(step=self.daemon.steps, time=datetime.fromtimestamp(0, UTC))
                await self.daemon.news.wait()
                self.daemon.check(self.token)
        finally:
            self.daemon.streams.remove(self.token)

    async def close(self) -> None:
        self.daemon.closed += 1


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """Puts the daemon behind the page's clients, and makes time short."""
    daemon = Daemon()

    def make(address: str, **options: Any) -> FakeClient:
        daemon.opened += 1
        return FakeClient(daemon)

    monkeypatch.setattr(watch_module, "AsyncClient", make)
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(watch_module, "_FIRST_DELAY_S", 0.001)
    return daemon


@pytest.fixture
def watch(daemon: Daemon) -> Watch:
    """Gives the watch of the daemon."""
    return Watch("unix:/nowhere", GatewaySettings())


async def join(watch: Watch, token: str | None) -> Viewer:
    return await watch.join(Headers({"authorization": f"Bearer {token}"} if token else {}))


async def until(viewer: Viewer, kind: str) -> dict[str, Any]:
    """Reads a viewer's events up to the first of a kind."""
    async with asyncio.timeout(20):
        async for block in viewer.events():
            for event in block.decode().split("\n\n"):
                if event.startswith(f"event: {kind}\n"):
                    found: dict[str, Any] = json.loads(event.partition("data: ")[2])
                    return found
    raise AssertionError(f"no {kind}")


async def until_step(viewer: Viewer, step: int) -> None:
    """Reads a viewer's events up to the batch of a step."""
    while (await until(viewer, "batch"))["step"] < step:
        pass


async def settled(condition: Any) -> None:
    """Lets the other tasks run until something holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a condition of any kind
            await asyncio.sleep(0.001)


async def test_many_viewers_share_one_stream_and_nothing_is_left_open(watch: Watch, daemon: Daemon) -> None:
    viewers = [await join(watch, token) for token in "abababab"]
    for viewer in viewers:
        assert (await until(viewer, "batch"))["step"] == 0
    assert (daemon.opened, daemon.streams) == (1, ["a"])
    daemon.step()
    for viewer in viewers:
        await until_step(viewer, 1)
    assert (await until(await join(watch, "b"), "daemon"))["policy"] == "priority"
    for viewer in viewers:
        watch.leave(viewer)
    await settled(lambda: daemon.streams == ["b"])
    assert daemon.closed == 0, "one viewer is left"


async def test_the_last_viewer_takes_everything_along_and_the_next_one_begins_anew(
    watch: Watch, daemon: Daemon
) -> None:
    for turn in (1, 2):
        viewer = await join(watch, "a")
        await until(viewer, "batch")
        watch.leave(viewer)
        await settled(lambda turn=turn: daemon.closed == turn)
        assert (daemon.opened, daemon.streams) == (turn, [])


@pytest.mark.parametrize("token", ["nobody", None])
async def test_who_is_no_administrator_sees_nothing(watch: Watch, daemon: Daemon, token: str | None) -> None:
    first = await join(watch, "a")
    await until(first, "batch")
    with pytest.raises(PermissionDeniedError, match="no administrator"):
        await join(watch, token)
    daemon.step()
    await until_step(first, 1)
    watch.leave(first)
    await settled(lambda: daemon.closed == 1)


async def test_a_refused_caller_leaves_no_connection_behind(watch: Watch, daemon: Daemon) -> None:
    with pytest.raises(PermissionDeniedError):
        await join(watch, "nobody")
    with pytest.raises(ApiError, match="can't be read"):
        await watch.join(Headers({"authorization": "Basic eDp5"}))
    await settled(lambda: daemon.closed == 2)


async def test_nothing_goes_on_in_the_name_of_who_left(watch: Watch, daemon: Daemon) -> None:
    first, second = await join(watch, "a"), await join(watch, "b")
    await until(second, "batch")
    assert daemon.streams == ["a"]
    watch.leave(first)
    await settled(lambda: daemon.streams == ["b"])
    daemon.step()
    await until_step(second, 1)


async def test_a_token_that_is_refused_now_ends_its_viewers_alone(watch: Watch, daemon: Daemon) -> None:
    first, second = await join(watch, "a"), await join(watch, "b")
    await until(first, "batch")
    daemon.admins.discard("a")
    daemon.step()
    assert (await until(first, "refused")) == {"status": 403, "message": "tenant a is no administrator"}
    await settled(lambda: daemon.streams == ["b"])
    await until_step(second, 1)


async def test_viewers_in_whose_name_nothing_is_read_are_checked_too(
    watch: Watch, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "RECHECK_EVERY_S", 0.0)
    first, second = await join(watch, "a"), await join(watch, "b")
    await until(second, "batch")
    daemon.admins.discard("b")
    assert (await until(second, "refused"))["status"] == 403
    daemon.step()
    await until_step(first, 1)


async def test_a_daemon_that_is_away_is_said_to_be_and_found_again(watch: Watch, daemon: Daemon) -> None:
    viewer = await join(watch, "a")
    await until(viewer, "batch")
    daemon.away = True
    daemon.step()
    assert "it is away" in (await until(viewer, "lost"))["message"]
    checks = daemon.checks
    await settled(lambda: daemon.checks > checks + 4)
    with pytest.raises(UnavailableError):
        await join(watch, "b")
    daemon.away = False
    await until_step(viewer, 1)
    assert (await until(await join(watch, "b"), "batch"))["step"] == 1


async def test_a_slow_viewer_gets_the_latest_and_nothing_piles_up(watch: Watch, daemon: Daemon) -> None:
    slow, quick = await join(watch, "a"), await join(watch, "a")
    await until(quick, "batch")
    for _ in range(50):
        daemon.step()
        await until(quick, "batch")
    assert set(slow._due) <= {"batch", "daemon", "lost"}
    await until_step(slow, 50)


async def test_too_many_viewers_are_told(
    watch: Watch, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "MOST_VIEWERS", 1)
    first = await join(watch, "a")
    with pytest.raises(ApiError, match="too many") as refusal:
        await join(watch, "b")
    assert refusal.value.status == 503
    watch.leave(first)
    await until(await join(watch, "b"), "batch")


async def test_a_fault_is_no_silence(
    watch: Watch, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Viewers hear of it, the log has it, and who comes next finds everything in order."""

    def broken(snapshot: object) -> bytes:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(watch_module.frames, "batch", broken)
        viewer = await join(watch, "a")
        assert "fault" in (await until(viewer, "lost"))["message"]
    assert "a bug" in caplog.text
    assert (await until(await join(watch, "b"), "batch"))["step"] == 0
    watch.leave(viewer)


async def test_credentials_that_the_daemon_does_not_know_are_told_apart(
    watch: Watch, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(token: str | None) -> None:
        raise UnauthenticatedError("the token is not valid", reason="BAD_TOKEN")

    monkeypatch.setattr(daemon, "check", check)
    with pytest.raises(UnauthenticatedError):
        await join(watch, "x")
