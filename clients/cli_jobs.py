"""The commands of batonctl for jobs."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 -- typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from batond.clients import cli_complete, cli_output, cli_print, outcome
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
    StopOption,
    SystemOption,
    TemperatureOption,
    TenantOption,
    TimeLimitOption,
    TokenIdsOption,
    TopKOption,
    TopPOption,
    VerboseOption,
    add_prompt,
    job_options,
    job_state,
    open_client,
)

if TYPE_CHECKING:
    from batond.clients.model import JobInfo


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


def get(ctx: typer.Context, job_id: JobArgument, *, as_json: JsonOption = False) -> None:
    """Show a job."""
    with open_client(ctx) as client:
        cli_print.show(client.get(job_id), as_json=as_json)


def list_jobs(
    ctx: typer.Context,
    *,
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs in this state; repeatable.", autocompletion=cli_complete.states),
    ] = None,
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


def update(
    ctx: typer.Context,
    job_id: JobArgument,
    *,
    sla_class: Annotated[
        str | None,
        typer.Option(
            "--class",
            "-c",
            help="A class less urgent than the present one.",
            autocompletion=cli_complete.sla_classes,
        ),
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


def cancel(ctx: typer.Context, job_id: JobArgument, *, as_json: JsonOption = False) -> None:
    """End a job; what it has emitted is kept."""
    with open_client(ctx) as client:
        cli_print.brief(client.cancel(job_id), as_json=as_json)


def park(
    ctx: typer.Context, job_id: JobArgument, *, tenant: TenantOption = "", as_json: JsonOption = False
) -> None:
    """Take the row of a running job and hold the job until `resume`."""
    with open_client(ctx) as client:
        cli_print.brief(client.park(job_id, tenant=tenant), as_json=as_json)


def resume(
    ctx: typer.Context, job_id: JobArgument, *, tenant: TenantOption = "", as_json: JsonOption = False
) -> None:
    """Let a job parked by hand compete for a row again."""
    with open_client(ctx) as client:
        cli_print.brief(client.resume(job_id, tenant=tenant), as_json=as_json)
