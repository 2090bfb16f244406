"""`batond gateway`. Light at import: what it serves with is an extra, and is read when it runs."""

from __future__ import annotations

import logging
import signal
import sys
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from batond.clients.transport import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, ClientTLS

if TYPE_CHECKING:
    from batond.clients.gateway import GatewaySettings

EXTRA: Final = "batond: the gateway is not installed here: pip install 'batond[gateway]'"
NEEDED: Final = ("starlette", "uvicorn", "python_multipart")
EXIT_CONFIG: Final = 2
#: Beside the daemon's own 7431.
LISTEN: Final = "127.0.0.1:8431"
_PREFIX: Final = "BATOND_GATEWAY_"
_LOCAL: Final = frozenset({"127.0.0.1", "::1", "localhost"})

app = typer.Typer(name="batond", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
#: The base of usage errors, of typer's own copy of click or the other one.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]


def _option(*names: str, env: str, text: str, **rules: Any) -> Any:
    return typer.Option(*names, envvar=_PREFIX + env, help=text, **rules)


Server = Annotated[
    str,
    typer.Option(
        envvar="BATOND_SERVER",
        help="Address of the daemon, as for batonctl; several, with commas, of daemons of one queue.",
    ),
]
Listen = Annotated[str, _option(env="LISTEN", text="host:port or unix:/path.")]
RootCa = Annotated[
    Path | None, typer.Option(envvar="BATOND_ROOT_CA", help="PEM that vouches for the daemon.")
]
Certificate = Annotated[
    Path | None, typer.Option(envvar="BATOND_CERTIFICATE", help="The gateway's own certificate, PEM.")
]
Key = Annotated[Path | None, typer.Option(envvar="BATOND_KEY", help="The key of that certificate, PEM.")]
Tls = Annotated[bool, _option("--tls", env="TLS", text="TLS to the daemon, by the system's certificates.")]
Plaintext = Annotated[
    bool,
    _option(
        "--allow-plaintext-token",
        env="ALLOW_PLAINTEXT_TOKEN",
        text="Send callers' tokens to a daemon on another host without TLS.",
    ),
]
ServeCertificate = Annotated[
    Path | None, _option(env="SERVE_CERTIFICATE", text="Serve HTTPS with this certificate, PEM.")
]
ServeKey = Annotated[Path | None, _option(env="SERVE_KEY", text="The key of that certificate, PEM.")]
Tiers = Annotated[
    str,
    _option(
        env="TIERS",
        text="SLA classes by service_tier over the defaults, such as flex=batch,scale=interactive; an empty"
        " class is the tenant's default.",
    ),
]
Temperature = Annotated[
    float, _option(env="DEFAULT_TEMPERATURE", text="Of requests that name none; 0 is greedy.", min=0)
]
Timeout = Annotated[
    float, _option(env="TIMEOUT_S", text="Longest time of a short call to a daemon.", min=0.001)
]
Drain = Annotated[
    int, _option(env="DRAIN_S", text="How long open requests may go on after SIGTERM, seconds.", min=0)
]
BodyBytes = Annotated[int, _option(env="MAX_BODY_BYTES", text="Largest body of a request.", min=1024)]
AccessLog = Annotated[bool, _option("--access-log", env="ACCESS_LOG", text="Log every request.")]
LogLevel = Annotated[str, _option(env="LOG_LEVEL", text="debug, info, warning or error.")]


@app.callback()
def _root() -> None:
    """A preemptive multi-tenant scheduling daemon for LLM inference."""


@app.command()
def gateway(  # noqa: PLR0917 - typer passes by name
    server: Server = DEFAULT_TARGET,
    listen: Listen = LISTEN,
    root_ca: RootCa = None,
    certificate: Certificate = None,
    key: Key = None,
    tls: Tls = False,  # noqa: FBT002 - typer wants a default
    allow_plaintext_token: Plaintext = False,  # noqa: FBT002 - typer wants a default
    serve_certificate: ServeCertificate = None,
    serve_key: ServeKey = None,
    tiers: Tiers = "",
    default_temperature: Temperature = 1.0,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    drain_s: Drain = 30,
    max_body_bytes: BodyBytes = 16 << 20,
    access_log: AccessLog = False,  # noqa: FBT002 - typer wants a default
    log_level: LogLevel = "info",
) -> None:
    """Serve OpenAI's API before a daemon, until SIGTERM. Needs the extra `gateway`, no model and no torch."""
    if any(util.find_spec(name) is None for name in NEEDED):
        typer.echo(EXTRA, err=True)
        raise typer.Exit(EXIT_CONFIG)
    from batond.clients.gateway.settings import GatewaySettings, read_tiers  # noqa: PLC0415 - an extra

    try:
        secure = tls or root_ca is not None or certificate is not None or key is not None
        settings = GatewaySettings(
            daemons=tuple(filter(None, server.split(","))),
            tls=ClientTLS.from_files(root_ca, certificate, key) if secure else None,
            allow_plaintext_token=allow_plaintext_token,
            timeout_s=timeout_s,
            tiers=read_tiers([pair for pair in tiers.split(",") if pair]),
            default_temperature=default_temperature,
            max_body_bytes=max_body_bytes,
        )
        options = _socket_options(listen, serve_certificate, serve_key)
    except OSError as error:
        raise typer.BadParameter(f"can't read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if log_level not in {"debug", "info", "warning", "error"}:
        raise typer.BadParameter(f"there is no log level {log_level!r}")
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    raise typer.Exit(_serve(settings, drain_s, options, access_log=access_log, log_level=log_level))


def _socket_options(listen: str, certificate: Path | None, key: Path | None) -> dict[str, Any]:
    from batond.clients.gateway.settings import read_listen  # noqa: PLC0415 - an extra

    if (certificate is None) != (key is None):
        raise ValueError("HTTPS needs a certificate and its key; give both or neither")
    if listen.startswith("unix:"):
        return {"uds": listen.removeprefix("unix:")}
    host, port = read_listen(listen)
    if certificate is None:
        if host not in _LOCAL:
            typer.echo(
                f"batond gateway: {host} is reached without TLS: tokens are readable on the way, unless"
                " something before it ends TLS",
                err=True,
            )
        return {"host": host, "port": port}
    return {"host": host, "port": port, "ssl_certfile": certificate, "ssl_keyfile": key}


def _serve(
    settings: GatewaySettings, drain_s: int, options: dict[str, Any], *, access_log: bool, log_level: str
) -> int:
    from batond.clients.gateway.serving import serve  # noqa: PLC0415 - an extra

    # uvicorn raises the signal again when it is done; a shutdown that was asked for is no failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    return serve(
        settings,
        timeout_graceful_shutdown=drain_s,
        access_log=access_log,
        log_level=log_level,
        **options,
    )


def run() -> int:
    """Runs the command where the daemon is not installed; returns the exit status."""
    try:
        result = app(standalone_mode=False)
    except USAGE_ERROR as error:
        sys.stderr.write(f"batond: {getattr(error, 'message', error)}\n")
        return EXIT_CONFIG
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return result if isinstance(result, int) else 0
