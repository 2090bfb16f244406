"""Where the queue is: the keys of `[queue]` that belong together, and what must not be shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from batond.daemon import cli, config_load
from batond.daemon.config_load import load_settings, redacted
from batond.daemon.errors import ConfigError
from batond.daemon.queue.target import target_of

if TYPE_CHECKING:
    from pathlib import Path

SENTINEL = {"mode": "sentinel", "nodes": ["s1:26379", "[::1]:26380"], "sentinel_service": "jobs"}
CLUSTER = {"mode": "cluster", "nodes": ["10.0.0.1:6379"]}
URL = {"url": "redis://db:6379/0"}


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config_load, "DEFAULT_FILE", tmp_path / "none.toml")


def test_the_three_forms_are_read() -> None:
    standalone, sentinel, cluster, private = (
        load_settings(flags={"queue": keys}).queue for keys in (URL, SENTINEL, CLUSTER, {})
    )
    assert (standalone.named, sentinel.named, cluster.named, private.named) == (True, True, True, False)
    assert target_of(sentinel).nodes == (("s1", 26379), ("::1", 26380))
    assert target_of(sentinel).service == "jobs"
    assert target_of(cluster).mode == "cluster"
    assert target_of(standalone).url == URL["url"]


def test_nodes_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATOND_QUEUE__MODE", "cluster")
    monkeypatch.setenv("BATOND_QUEUE__NODES", "a:1, b:2")
    assert load_settings().queue.nodes == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mode": "sentinels"}, "'standalone', 'sentinel' or 'cluster'"),
        ({"mode": "cluster"}, "needs nodes"),
        ({"mode": "sentinel", "nodes": ["a:1"]}, "sentinel_service and mode"),
        ({**CLUSTER, "sentinel_service": "jobs"}, "sentinel_service and mode"),
        ({**CLUSTER, **URL}, "url is of a standalone server"),
        ({"nodes": ["a:1"]}, "nodes need mode"),
        ({**CLUSTER, "nodes": ["a"]}, "'a' is no host:port"),
        ({**CLUSTER, "nodes": ["a:0"]}, "'a:0' is no host:port"),
        ({**CLUSTER, "nodes": [":1"]}, "':1' is no host:port"),
        ({**CLUSTER, "nodes": ["a:1", "a:1"]}, "named twice"),
        ({**CLUSTER, "nodes": [f"a:{port}" for port in range(1, 40)]}, "at most 32"),
        ({**CLUSTER, "username": "batond"}, "username needs password"),
        ({**SENTINEL, "sentinel_username": "batond"}, "sentinel_username needs"),
        ({**CLUSTER, "sentinel_password": "x"}, "need mode = 'sentinel'"),
        ({**URL, "tls": True}, "rediss://"),
        ({**CLUSTER, "tls": True, "tls_cert_file": "/a"}, "come together"),
        ({"password": "hunter2"}, "named by url or nodes"),
        ({"wait_replicas": 1}, "named by url or nodes"),
        ({**URL, "wait_replicas": 17}, "less than or equal to 16"),
        ({**CLUSTER, "node": ["a:1"]}, "did you mean 'nodes'"),
    ],
)
def test_what_does_not_belong_together_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags={"queue": keys})
    assert message in caught.value.message
    assert "hunter2" not in caught.value.message


def test_a_password_is_given_once() -> None:
    keys = {"url": "redis://:hunter2@db:6379/0", "password": "hunter3"}
    with pytest.raises(ConfigError, match="has a password already") as caught:
        target_of(load_settings(flags={"queue": keys}).queue)
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://db:6379/0", "redis://db:6379/0"),
        ("redis://user:hunter2@db:6379/0?db=1", "redis://user:***@db:6379/0?db=1"),
        ("redis://db?password=hunter2&db=1", "redis://db?password=***&db=1"),
        ("redis://:hun/ter2@db:6379/0", "redis://***"),
        ("redis://:hun#ter2@db:6379/0", "redis://***"),
        ("redis://:hun?ter2@db:6379/0", "redis://***"),
        ("redis://:hunter2@[db:6379/0", "***"),
        ("unix:///run/redis.sock?password=hunter2", "unix:/run/redis.sock?password=***"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_no_part_of_a_password_is_shown(url: str, shown: str) -> None:
    assert redacted(load_settings(flags={"queue": {"url": url}}))["queue"]["url"] == shown


def test_passwords_are_neither_logged_nor_quoted() -> None:
    keys = {**SENTINEL, "username": "batond", "password": "hunter2", "sentinel_password": "hunter3"}
    settings = load_settings(flags={"queue": keys})
    target = target_of(settings.queue)
    for text in (json.dumps(redacted(settings)), repr(settings), repr(target)):
        assert "hunter" not in text
    assert (target.password, target.sentinel_password) == ("hunter2", "hunter3")
    with pytest.raises(ConfigError) as caught:
        load_settings(flags={"queue": {**CLUSTER, "password": 47_110_815}})
    assert "47110815" not in caught.value.message


@pytest.mark.parametrize("url", ["http://db", "redis://:hun/ter2@db:6379/0", "db:6379"])
def test_a_url_that_can_not_be_read_is_not_quoted(url: str) -> None:
    with pytest.raises(ConfigError, match="the Redis URL can't be used") as caught:
        target_of(load_settings(flags={"queue": {"url": url}}).queue)
    assert "hun" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_credentials_of_the_service_manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "batond.queue.password").write_text("hunter2\n", encoding="utf-8")
    (tmp_path / "batond.queue.sentinel_password").write_text("hunter3\n", encoding="utf-8")
    (tmp_path / "batond.queue.tls_ca_file").write_text("a certificate", encoding="utf-8")
    queue = load_settings(flags={"queue": {**SENTINEL, "tls": True}}).queue
    assert queue.password.get_secret_value() == "hunter2"
    assert queue.sentinel_password.get_secret_value() == "hunter3"
    assert queue.tls_ca_file == tmp_path / "batond.queue.tls_ca_file"


@pytest.mark.redis
def test_check_config_asks_the_server_if_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --connect a server that is down is no fault of the configuration."""
    from batond.bench.local_redis import RedisServer  # noqa: PLC0415 - only where a server is started

    model = tmp_path / "model.gguf"
    model.touch()
    server = RedisServer(tmp_path / "redis")
    line = ["batond", "check-config", "--model", str(model), "--set", f"queue.url=redis://{server.address}/0"]

    def run(*more: str) -> int:
        monkeypatch.setattr("sys.argv", [*line, *more])
        return cli.run()

    try:
        assert run("--connect") == 0
        captured = capsys.readouterr()
        assert "servers will do: " in captured.err
        assert json.loads(captured.out[captured.out.index("{") :])["queue"]["mode"] == "standalone"
        server.ask("ACL", "SETUSER", "default", "-wait")
        assert run("--connect") == 0
        assert run("--connect", "--set", "queue.wait_replicas=1") == cli.EXIT_CONFIG
        assert "ACL SETUSER default +wait" in capsys.readouterr().err
        server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        assert run() == 0
        assert run("--connect") == cli.EXIT_CONFIG
        assert "allkeys-lru" in capsys.readouterr().err
    finally:
        server.kill()
    assert run() == 0
    assert run("--connect") == 1
    assert "can't be reached" in capsys.readouterr().err
