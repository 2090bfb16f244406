"""Commands of `batond`: serve, gateway, check-config, doctor, hash-token, simulate, install-service."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from batond.clients.cli_gateway import gateway
from batond.daemon.config_load import load_settings, parse_assignments, redacted
from batond.daemon.doctor.command import doctor
from batond.daemon.doctor.configured import CONFIGURED
from batond.daemon.errors import BatondError, ConfigError
from batond.daemon.queue.check import check_target
from batond.daemon.queue.target import target_of
from batond.daemon.simulator.command import simulate
from batond.daemon.telemetry.logging import configure_logging
from batond.systemd.command import install_service

EXIT_CONFIG = 2
TOKEN_BYTES = 32
#: A plain hash is tried billions of times a second by who has it: 16 random bytes pass, in any notation.
FEWEST_CHARS = 20
FEWEST_DIFFERENT_CHARS = 8
CONNECT_TIMEOUT_S = 3.0

app = typer.Typer(
    name="batond",
    help="A preemptive multi-tenant scheduling daemon for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="TOML file; else BATOND_CONFIG, else /etc/batond/batond.toml."),
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="Any key, such as engine.rows=4; may be repeated.")
]


def _version(value: bool) -> None:  # noqa: FBT001 - typer's callback
    if value:
        typer.echo(f"batond {metadata.version('batond')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[  # noqa: FBT002 - typer wants a default
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A preemptive multi-tenant scheduling daemon for LLM inference."""


Model = Annotated[str, typer.Option(help="Local folder, .gguf file, or smollm2.")]
Rows = Annotated[int | None, typer.Option(help="Rows of the batch.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Listen = Annotated[list[str] | None, typer.Option(help="host:port or unix:/path; may be repeated.")]
Policy = Annotated[str, typer.Option(help="Scheduling policy.")]
Connect = Annotated[bool, typer.Option("--connect", help="Ask the queue's Redis servers, too.")]
NoCompile = Annotated[bool, typer.Option("--no-compile", help="Compile no parts of decode steps on a card.")]
NoGraphs = Annotated[bool, typer.Option("--no-graphs", help="Capture no decode steps and prompts on a card.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


@app.command()
def serve(  # noqa: PLR0917 - typer passes by name
    config: Config = None,
    model: Model = "",
    rows: Rows = None,
    device: Device = "",
    listen: Listen = None,
    policy: Policy = "",
    log_level: LogLevel = "",
    no_graphs: NoGraphs = False,  # noqa: FBT002 - typer wants a default
    no_compile: NoCompile = False,  # noqa: FBT002 - typer wants a default
    assign: Assignments = None,
) -> None:
    """Serve a model until SIGTERM, which drains; a second one ends at once. SIGHUP reloads.

    Flags go before the environment (BATOND_SECTION__KEY), which goes before the file.
    """
    flags = _flags(
        assign, model, rows, device, listen, policy, log_level, no_graphs=no_graphs, no_compile=no_compile
    )
    settings = load_settings(config, flags)
    configure_logging(settings.log.level, settings.log.format)
    from batond.daemon.front.app import serve as serve_forever  # noqa: PLC0415 - takes a second

    asyncio.run(serve_forever(settings, lambda: load_settings(config, flags)))


@app.command("check-config")
def check_config(  # noqa: PLR0917 - typer passes by name
    config: Config = None,
    model: Model = "",
    rows: Rows = None,
    device: Device = "",
    listen: Listen = None,
    policy: Policy = "",
    log_level: LogLevel = "",
    no_graphs: NoGraphs = False,  # noqa: FBT002 - typer wants a default
    no_compile: NoCompile = False,  # noqa: FBT002 - typer wants a default
    assign: Assignments = None,
    connect: Connect = False,  # noqa: FBT002 - typer wants a default
) -> None:
    """Check the configuration and show it as resolved, secrets left out. Takes the flags of `serve`.

    No model is loaded. Where `model.device` names a card, torch is asked for it, which takes seconds.
    """
    settings = load_settings(
        config,
        _flags(
            assign, model, rows, device, listen, policy, log_level, no_graphs=no_graphs, no_compile=no_compile
        ),
    )
    for check in CONFIGURED.values():
        check(settings)
    if connect and settings.queue.named:
        found = asyncio.run(
            check_target(
                target_of(settings.queue),
                replicas=settings.queue.wait_replicas,
                timeout_s=CONNECT_TIMEOUT_S,
            )
        )
        typer.echo(f"the queue's servers will do: {found}", err=True)
    typer.echo(json.dumps(redacted(settings), indent=2, default=str))


def _flags(  # noqa: PLR0917 - the two commands' own order
    assign: list[str] | None,
    model: str,
    rows: int | None,
    device: str,
    listen: list[str] | None,
    policy: str,
    log_level: str,
    *,
    no_graphs: bool,
    no_compile: bool,
) -> dict[str, Any]:
    """What was given on the command line, as the configuration has it."""
    flags = parse_assignments(assign or [])
    for section, key, value in (
        ("model", "path", model or None),
        ("model", "device", device or None),
        ("engine", "rows", rows),
        ("engine", "graphs", False if no_graphs else None),
        ("engine", "compiled", False if no_compile else None),
        ("engine", "policy", policy or None),
        ("server", "listen", listen or None),
        ("log", "level", log_level or None),
    ):
        if value is not None:
            flags.setdefault(section, {})[key] = value
    return flags


@app.command("hash-token")
def hash_token(
    allow_weak: Annotated[  # noqa: FBT002 - typer wants a default
        bool, typer.Option("--allow-weak", help="Hash a token that could be guessed, too: for trials alone.")
    ] = False,
) -> None:
    """Hash a token read from standard input; on a terminal, make a new one and show it once."""
    token = "" if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not token:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        typer.echo(f"token         {token}   (shown once: give it to the tenant)")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError("the token can't be sent in a call's metadata: take printable ASCII characters")
    if not allow_weak and (len(token) < FEWEST_CHARS or len(set(token)) < FEWEST_DIFFERENT_CHARS):
        raise ConfigError(
            f"the token could be guessed: take at least {FEWEST_CHARS} characters,"
            f" {FEWEST_DIFFERENT_CHARS} of them different, drawn at random; run on a terminal, this command"
            " makes one"
        )
    typer.echo(f"token_sha256  {hashlib.sha256(token.encode()).hexdigest()}")


app.command()(gateway)
app.command()(doctor)
app.command()(simulate)
app.command("install-service")(install_service)


def run() -> int:
    """Run the command line; an error of ours is one line on standard error."""
    try:
        result: Any = app(standalone_mode=False)
    except typer.Exit as end:
        return int(end.exit_code)
    except (BatondError, ExceptionGroup) as error:
        return _fail(error)
    except Exception as error:
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        sys.stderr.write(f"batond: {explain()}\n")  # The toolkit's own: a wrong flag.
        return EXIT_CONFIG
    return result if isinstance(result, int) else 0


def _fail(error: BaseException) -> int:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, BatondError):
        raise error
    sys.stderr.write(f"batond: {error.message}\n")
    return EXIT_CONFIG if isinstance(error, ConfigError) else 1
