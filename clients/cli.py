"""The commands of batonctl."""

from __future__ import annotations

import contextlib
import sys
from datetime import datetime  # noqa: TC003 -- typer reads annotations at run time
from pathlib import Path  # noqa: TC003 -- typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from batond.clients import batch_view, cli_admin, cli_daemons, cli_dead, cli_output, cli_print, outcome
from batond.clients.cli_input import (
    ChatOption,
    ChoicesOption,
    ClassOption,
    IdOption,
    IgnoreEosOption,
    JobArgument,
    JsonOption,
    LabelOption,
    LogprobsOption,
    MaxTokensOption,
    ModelOption,
    PromptArgument,
    PromptLogprobsOption,
    SeedOption,
    SessionOption,
    Settings,
    StopOption,
    SystemOption,
    TemperatureOption,
    TenantOption,
    TimeLimitOption,
    TokenFileOption,
    TokenIdsOption,
    TokenOption,
    TopKOption,
    TopPOption,
    VerboseOption,
    add_prompt,
    chosen_token,
    job_options,
    job_state,
    open_client,
)
from batond.clients.errors import BatondClientError
from batond.clients.transport import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, ClientTLS

if TYPE_CHECKING:
    from batond.clients.model import JobInfo

app = typer.Typer(
    name="batonctl",
    help="Submit, follow and steer jobs of a batond daemon.",
    epilog=cli_output.EXIT_CODES_HELP,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(cli_admin.tenant_app)
app.add_typer(cli_admin.policy_app)
app.add_typer(cli_dead.dead_app)
app.command()(cli_daemons.daemons)

#: Base of every error of usage. Some releases of typer bring their own copy of click, others import it: this
#: is right for both, importing click would not be.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]


def run() -> int:
    """Runs batonctl; returns the exit code. Every expected error is one line on standard error."""
    try:
        result = app(standalone_mode=False)
    except BatondClientError as error:
        sys.stderr.write(f"batonctl: {cli_output.error_line(error)}\n")
        return cli_output.exit_code(error)
    except USAGE_ERROR as error:
        sys.stderr.write(f"batonctl: {cli_output.usage_line(error)}\n")
        return cli_output.EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return cli_output.EXIT_INTERRUPTED
    # Without standalone mode typer gives the exit code of typer.Exit back as the result.
    return result if isinstance(result, int) else 0


@app.callback()
def settings(
    ctx: typer.Context,
    *,
    server: Annotated[
        str,
        typer.Option(
            envvar="BATOND_SERVER",
            help="host:port, unix:///path or a socket's path; several, with commas, of daemons of one queue.",
        ),
    ] = DEFAULT_TARGET,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    root_ca: Annotated[
        Path | None, typer.Option(envvar="BATOND_ROOT_CA", help="PEM file that vouches for the daemon.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(envvar="BATOND_CERTIFICATE", help="PEM file of your certificate.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(envvar="BATOND_KEY", help="PEM file of your certificate's key.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS with the system's certificates.")] = False,
    timeout_s: Annotated[
        float, typer.Option(help="Longest time of a call, in seconds.", min=0.001)
    ] = DEFAULT_TIMEOUT_S,
    allow_plaintext_token: Annotated[
        bool, typer.Option("--allow-plaintext-token", help="Send the token without TLS to another host.")
    ] = False,
) -> None:
    """Submit, follow and steer jobs of a batond daemon."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(cli_output.EXIT_USAGE)
    try:
        token = chosen_token(ctx, token, token_file)
        secure = tls or root_ca is not None or certificate is not None or key is not None
        ctx.obj = Settings(
            server=server,
            token=token or None,
            tls=ClientTLS.from_files(root_ca, certificate, key) if secure else None,
            timeout_s=timeout_s,
            allow_plaintext_token=allow_plaintext_token,
        )
    except OSError as error:
        raise typer.BadParameter(f"can't read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def submit(
    ctx: typer.Context,
    prompt: PromptArgument = None,
    *,
    system: SystemOption = None,
    chat: ChatOption = False,
    token_ids: TokenIdsOption = None,
    sla_class: ClassOption = None,
    model: ModelOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    choices: ChoicesOption = None,
    logprobs: LogprobsOption = None,
    prompt_logprobs: PromptLogprobsOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    session_id: SessionOption = None,
    time_limit_s: TimeLimitOption = None,
    job_id: IdOption = None,
    label: LabelOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job is final.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a job and print its id; it runs whether anybody watches or not."""
    options = job_options(
        label,
        sla_class=sla_class,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        n=choices,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=stop,
        ignore_eos=ignore_eos,
        session_id=session_id,
        time_limit_s=time_limit_s,
        job_id=job_id,
    )
    text = add_prompt(options, prompt, system=system, chat=chat, token_ids=token_ids)
    with open_client(ctx) as client:
        job = client.submit(text, **options)
        if not wait:
            typer.echo(cli_output.to_json(job) if as_json else job.job_id)
            return
        job = client.wait(job.job_id)
    cli_print.show(job, as_json=as_json)
    outcome.succeeded(job)


@app.command()
def generate(
    ctx: typer.Context,
    prompt: PromptArgument = None,
    *,
    system: SystemOption = None,
    chat: ChatOption = False,
    token_ids: TokenIdsOption = None,
    sla_class: ClassOption = None,
    model: ModelOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    choices: ChoicesOption = None,
    logprobs: LogprobsOption = None,
    prompt_logprobs: PromptLogprobsOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    session_id: SessionOption = None,
    time_limit_s: TimeLimitOption = None,
    job_id: IdOption = None,
    label: LabelOption = None,
    detached: Annotated[
        bool, typer.Option("--detached", help="Let the job go on if this command is interrupted.")
    ] = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a job and stream its text; interrupting this cancels it."""
    options = job_options(
        label,
        sla_class=sla_class,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        n=choices,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=stop,
        ignore_eos=ignore_eos,
        session_id=session_id,
        time_limit_s=time_limit_s,
        job_id=job_id,
    )
    text = add_prompt(options, prompt, system=system, chat=chat, token_ids=token_ids)
    with open_client(ctx) as client, client.generate(text, detached=detached, **options) as stream:
        cli_print.follow(stream, as_json=as_json, verbose=verbose)


@app.command()
def watch(
    ctx: typer.Context,
    job_id: JobArgument,
    *,
    from_token_index: Annotated[
        int, typer.Option("--from", min=0, help="Index of the first token wanted.")
    ] = 0,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stream the text of a job; interrupting this leaves the job alone."""
    with open_client(ctx) as client, client.watch(job_id, from_token_index) as stream:
        cli_print.follow(stream, as_json=as_json, verbose=verbose)


@app.command()
def get(ctx: typer.Context, job_id: JobArgument, *, as_json: JsonOption = False) -> None:
    """Show a job."""
    with open_client(ctx) as client:
        cli_print.show(client.get(job_id), as_json=as_json)


@app.command("list")
def list_jobs(
    ctx: typer.Context,
    *,
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state; repeatable.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most jobs to show.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List your jobs, newest first."""
    states = [job_state(name) for name in state or ()]
    jobs: list[JobInfo] = []
    with open_client(ctx) as client:
        for job in client.list(states, page_size=limit):
            jobs.append(job)
            if len(jobs) == limit:
                break
    if as_json:
        for job in jobs:
            typer.echo(cli_output.to_json(job))
    else:
        cli_print.table(cli_output.jobs_table(jobs))


@app.command()
def update(
    ctx: typer.Context,
    job_id: JobArgument,
    *,
    sla_class: Annotated[
        str | None, typer.Option("--class", "-c", help="A class less urgent than the present one.")
    ] = None,
    deadline: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%dT%H:%M:%S%z"], help="When it must have ended: 2030-01-31T12:00:00+0000."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Give a job a less urgent class, or another deadline."""
    with open_client(ctx) as client:
        cli_print.brief(client.update(job_id, sla_class=sla_class, deadline=deadline), as_json=as_json)


@app.command()
def cancel(ctx: typer.Context, job_id: JobArgument, *, as_json: JsonOption = False) -> None:
    """End a job; what it has emitted is kept."""
    with open_client(ctx) as client:
        cli_print.brief(client.cancel(job_id), as_json=as_json)


@app.command()
def park(
    ctx: typer.Context, job_id: JobArgument, *, tenant: TenantOption = "", as_json: JsonOption = False
) -> None:
    """Take the row of a running job and hold the job until `resume`."""
    with open_client(ctx) as client:
        cli_print.brief(client.park(job_id, tenant=tenant), as_json=as_json)


@app.command()
def resume(
    ctx: typer.Context, job_id: JobArgument, *, tenant: TenantOption = "", as_json: JsonOption = False
) -> None:
    """Let a job parked by hand compete for a row again."""
    with open_client(ctx) as client:
        cli_print.brief(client.resume(job_id, tenant=tenant), as_json=as_json)


@app.command()
def drain(
    ctx: typer.Context,
    *,
    drain_timeout_s: Annotated[
        float | None, typer.Option("--for", min=0.0, help="Seconds running jobs may take to finish.")
    ] = None,
) -> None:
    """Tell the daemon to take no more jobs, finish or hand back what it has, and stop."""
    with open_client(ctx) as client:
        typer.echo(f"draining; jobs in the engine: {client.drain(drain_timeout_s)}")


@app.command()
def info(ctx: typer.Context, *, as_json: JsonOption = False) -> None:
    """Show what the daemon serves, and within which limits."""
    with open_client(ctx) as client:
        found = client.server_info()
    if as_json:
        typer.echo(cli_output.to_json(found))
    else:
        cli_print.table(cli_output.info_table(found))


@app.command()
def top(
    ctx: typer.Context,
    *,
    interval_s: Annotated[float, typer.Option(min=0.05, help="Least time between two pictures.")] = 0.25,
    snapshots: Annotated[int, typer.Option(min=0, help="End after so many; 0 goes on for ever.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Watch the batch live: rows, queries without a row, host pool."""
    with open_client(ctx) as client:
        title = f"batond {client.server_info().model}"
        console = cli_print.console()
        # A terminal gets one picture that is drawn over; a pipe gets one after the other.
        live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
        with live or contextlib.nullcontext():
            for count, snapshot in enumerate(client.watch_batch(interval_s), start=1):
                if as_json:
                    typer.echo(cli_output.to_json(snapshot))
                elif live is not None:
                    live.update(batch_view.render(snapshot, title=title), refresh=True)
                else:
                    framed = console.is_terminal
                    cli_print.table(batch_view.render(snapshot, title=title, framed=framed))
                if count == snapshots:
                    break
