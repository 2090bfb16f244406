"""The command line of batonctl: what stands before a command, the commands, and how errors end it."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path  # noqa: TC003 -- typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from batond.clients import (
    cli_admin,
    cli_bulk,
    cli_complete,
    cli_daemons,
    cli_dead,
    cli_doctor,
    cli_jobs,
    cli_output,
    cli_top,
)
from batond.clients.cli_input import TokenFileOption, TokenOption, settings_of
from batond.clients.errors import BatondClientError
from batond.clients.transport import DEFAULT_TARGET, DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NAME: Final = "batonctl"
JOBS, DAEMON, ADMINISTRATION, SHELL = "Jobs", "The daemon", "Administration", "This program"

app = typer.Typer(
    name=NAME,
    help="Submit, follow and steer jobs of a batond daemon.",
    epilog=cli_output.EXIT_CODES_HELP,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)

#: Base of every error of usage. Some releases of typer bring their own copy of click, others import it: this
#: is right for both, importing click would not be.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]


def run() -> int:
    """Runs batonctl; returns the exit code. Every expected error is one line on standard error."""
    as_json = _wants_json(sys.argv[1:])
    try:
        result = app(standalone_mode=False, prog_name=NAME)
    except BatondClientError as error:
        _say(error, cli_output.error_line(error), as_json=as_json)
        return cli_output.exit_code(error)
    except USAGE_ERROR as error:
        _say(error, cli_output.usage_line(error), as_json=as_json)
        return cli_output.EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return cli_output.EXIT_INTERRUPTED
    # Without standalone mode typer gives the exit code of typer.Exit back as the result.
    return result if isinstance(result, int) else 0


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether errors are to be JSON; known before the arguments are read, which may be what is wrong."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def _say(error: Exception, line: str, *, as_json: bool) -> None:
    shown = cli_output.to_json({"error": cli_output.error_object(error)}) if as_json else f"{NAME}: {line}"
    sys.stderr.write(f"{shown}\n")


def _show_version(wanted: bool) -> None:  # noqa: FBT001 -- typer's callback
    if wanted:
        typer.echo(f"{NAME} {metadata.version('batond')}")
        raise typer.Exit


@app.callback()
def settings(
    ctx: typer.Context,
    *,
    server: Annotated[
        str,
        typer.Option(
            envvar="BATOND_SERVER",
            metavar="ADDRESS",
            help="host:port, unix:///path or a socket's path; several, with commas, of daemons of one queue.",
        ),
    ] = DEFAULT_TARGET,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    root_ca: Annotated[
        Path | None,
        typer.Option(envvar="BATOND_ROOT_CA", metavar="FILE", help="PEM file that vouches for the daemon."),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(envvar="BATOND_CERTIFICATE", metavar="FILE", help="PEM file of your certificate."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(envvar="BATOND_KEY", metavar="FILE", help="PEM file of your certificate's key."),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS with the system's certificates.")] = False,
    timeout_s: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest time of a call.", min=0.001)
    ] = DEFAULT_TIMEOUT_S,
    allow_plaintext_token: Annotated[
        bool, typer.Option("--allow-plaintext-token", help="Send the token without TLS to another host.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Submit, follow and steer jobs of a batond daemon."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(cli_output.EXIT_USAGE)
    try:
        ctx.obj = settings_of(
            ctx,
            server=server,
            token=token,
            token_file=token_file,
            root_ca=root_ca,
            certificate=certificate,
            key=key,
            tls=tls,
            timeout_s=timeout_s,
            allow_plaintext_token=allow_plaintext_token,
        )
    except OSError as error:
        raise typer.BadParameter(f"can't read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.", show_default=False)],
) -> None:
    """Print the script that lets a shell complete commands, options and names.

    bash: source <(batonctl completion bash) in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit;
    fish: batonctl completion fish > ~/.config/fish/completions/batonctl.fish
    """
    cli_complete.script(shell, lambda: app(prog_name=NAME))


COMMANDS: Final[Mapping[str, Mapping[str, Callable[..., None]]]] = {
    JOBS: {
        "submit": cli_jobs.submit,
        "generate": cli_jobs.generate,
        "bulk": cli_bulk.bulk,
        "watch": cli_jobs.watch,
        "get": cli_jobs.get,
        "list": cli_jobs.list_jobs,
        "update": cli_jobs.update,
        "cancel": cli_jobs.cancel,
    },
    DAEMON: {
        "info": cli_daemons.info,
        "top": cli_top.top,
        "daemons": cli_daemons.daemons,
        "drain": cli_daemons.drain,
        "doctor": cli_doctor.doctor,
    },
    ADMINISTRATION: {"park": cli_jobs.park, "resume": cli_jobs.resume},
    SHELL: {"completion": completion},
}
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
for group in (cli_admin.tenant_app, cli_admin.policy_app, cli_dead.dead_app):
    app.add_typer(group, rich_help_panel=ADMINISTRATION)
