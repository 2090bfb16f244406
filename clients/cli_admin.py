"""The commands of batonctl for tenants and policies."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from batond.clients import cli_complete, cli_output, cli_print
from batond.clients.cli_input import JsonOption, open_client
from batond.clients.tenants import TenantLimits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from batond.clients.tenants import TenantInfo, TenantToken

tenant_app = typer.Typer(
    name="tenant",
    help="Add tenants, change what they may, and refuse them; no restart.",
    no_args_is_help=True,
)
policy_app = typer.Typer(name="policy", help="Show and exchange the scheduling policy.", no_args_is_help=True)

NewNameArgument = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]
NameArgument = Annotated[
    str,
    typer.Argument(metavar="TENANT", help="The tenant's name.", autocompletion=cli_complete.tenants),
]
WeightOption = Annotated[float, typer.Option(help="Share among tenants that compete.")]
ClassesOption = Annotated[
    list[str] | None, typer.Option("--class", "-c", help="A class it may ask for; repeatable; none is all.")
]
HighestOption = Annotated[
    str, typer.Option("--highest-class", help="It may ask for nothing more urgent than this class.")
]
DefaultClassOption = Annotated[str, typer.Option(help="Class of a job that names none.")]
LowerOption = Annotated[
    bool,
    typer.Option("--lower-class", help="Serve too urgent a class under the highest one, don't refuse it."),
]
QueuedOption = Annotated[int, typer.Option(min=0, help="Most jobs that wait; 0 is no limit of its own.")]
RunningOption = Annotated[int, typer.Option(min=0, help="Most jobs that run at the same time.")]
TokensOption = Annotated[
    int, typer.Option("--tokens-per-minute", min=0, help="Most tokens of prompts and outputs a minute.")
]
PromptOption = Annotated[int, typer.Option("--longest-prompt", min=0, help="Longest prompt, in tokens.")]
AdminOption = Annotated[bool, typer.Option("--admin", help="It may use the admin service.")]


@tenant_app.command("add")
def add(
    ctx: typer.Context,
    name: NewNameArgument,
    *,
    weight: WeightOption = 1.0,
    sla_class: ClassesOption = None,
    highest_class: HighestOption = "",
    default_class: DefaultClassOption = "",
    lower_class: LowerOption = False,
    max_queued: QueuedOption = 0,
    max_running: RunningOption = 0,
    tokens_per_minute: TokensOption = 0,
    longest_prompt_tokens: PromptOption = 0,
    admin: AdminOption = False,
    certificate_subject: Annotated[
        str, typer.Option("--certificate", help="Common name or subject of its client certificate.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Add a tenant and print its token, which is not shown again."""
    limits = _limits(locals())
    with open_client(ctx) as client:
        made = client.create_tenant(name, limits, certificate_subject=certificate_subject)
    _show_token(made, as_json=as_json)


@tenant_app.command("set")
def set_limits(
    ctx: typer.Context,
    name: NameArgument,
    *,
    weight: WeightOption = 1.0,
    sla_class: ClassesOption = None,
    highest_class: HighestOption = "",
    default_class: DefaultClassOption = "",
    lower_class: LowerOption = False,
    max_queued: QueuedOption = 0,
    max_running: RunningOption = 0,
    tokens_per_minute: TokensOption = 0,
    longest_prompt_tokens: PromptOption = 0,
    admin: AdminOption = False,
    as_json: JsonOption = False,
) -> None:
    """Replace all limits of a tenant that was added; what is left out goes back to its default."""
    limits = _limits(locals())
    with open_client(ctx) as client:
        _show([client.update_tenant(name, limits)], as_json=as_json)


@tenant_app.command("rotate")
def rotate(ctx: typer.Context, name: NameArgument, *, as_json: JsonOption = False) -> None:
    """Print a new token, which is not shown again; the old one is refused from now on."""
    with open_client(ctx) as client:
        _show_token(client.rotate_tenant_token(name), as_json=as_json)


@tenant_app.command("disable")
def disable(
    ctx: typer.Context,
    name: NameArgument,
    *,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel its waiting and running jobs too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Refuse a tenant's calls from now on and end its streams; its accepted jobs run, or are cancelled."""
    with open_client(ctx) as client:
        _show([client.disable_tenant(name, cancel_jobs=cancel)], as_json=as_json)


@tenant_app.command("enable")
def enable(ctx: typer.Context, name: NameArgument, *, as_json: JsonOption = False) -> None:
    """Let a disabled tenant in again."""
    with open_client(ctx) as client:
        _show([client.enable_tenant(name)], as_json=as_json)


@tenant_app.command("list")
def list_tenants(ctx: typer.Context, *, as_json: JsonOption = False) -> None:
    """List all tenants; never their tokens."""
    with open_client(ctx) as client:
        _show(client.tenants(), as_json=as_json)


@policy_app.command("show")
def show_policy(ctx: typer.Context, *, as_json: JsonOption = False) -> None:
    """Show the active policy, marked, among all registered ones."""
    with open_client(ctx) as client:
        found = client.policy()
    if as_json:
        typer.echo(cli_output.to_json(found))
        return
    for name in found.known_policies:
        typer.echo(f"{'*' if name == found.policy else ' '} {name}")


@policy_app.command("set")
def set_policy(
    ctx: typer.Context,
    policy: Annotated[
        str, typer.Argument(help="Name of a registered policy.", autocompletion=cli_complete.policies)
    ],
    *,
    as_json: JsonOption = False,
) -> None:
    """Exchange this daemon's policy until its restart; no query is lost."""
    with open_client(ctx) as client:
        before = client.set_policy(policy)
    if as_json:
        typer.echo(cli_output.to_json({"policy": policy, "previous_policy": before}))
    else:
        typer.echo(f"{policy} (was {before})")


def _limits(options: Mapping[str, Any]) -> TenantLimits:
    """Gathers the limits among a command's options, which are named as the fields."""
    given = {one.name: options[one.name] for one in fields(TenantLimits) if one.name in options}
    return TenantLimits(sla_classes=tuple(options["sla_class"] or ()), **given)


def _show_token(made: TenantToken, *, as_json: bool) -> None:
    """The token alone on standard output, so that it can be piped to where it belongs."""
    if as_json:
        typer.echo(cli_output.to_json(made))
        return
    typer.echo(f"token of {made.tenant.name}, not shown again:", err=True)
    typer.echo(made.token)


def _show(tenants: Iterable[TenantInfo], *, as_json: bool) -> None:
    if as_json:
        for one in tenants:
            typer.echo(cli_output.to_json(one))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "tenant",
        "state",
        "weight",
        "classes",
        "queued",
        "running",
        "tokens/min",
        "prompt",
        "token",
    ):
        table.add_column(name, no_wrap=name == "tenant")
    for one in tenants:
        table.add_row(*(Text(cell) for cell in _cells(one)))
    cli_print.table(table)


def _cells(one: TenantInfo) -> list[str]:
    limits = one.limits
    words = [
        "disabled" if one.disabled else "enabled",
        "admin" if limits.admin else "",
        "configured" if one.configured else "",
    ]
    classes = ", ".join(limits.sla_classes) or "all"
    quotas = (
        limits.max_queued,
        limits.max_running,
        limits.tokens_per_minute,
        limits.longest_prompt_tokens,
    )
    return [
        one.name,
        " ".join(filter(None, words)),
        f"{limits.weight:g}",
        f"{classes} up to {limits.highest_class}" if limits.highest_class else classes,
        *(str(quota) if quota else "-" for quota in quotas),
        one.token_hint or one.certificate_subject,
    ]
