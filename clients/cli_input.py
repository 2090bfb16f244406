"""What batonctl understands: the options that commands share, and how they become a client and a job."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batond.clients import cli_complete
from batond.clients.aio import AsyncClient
from batond.clients.client import Client
from batond.clients.model import JobState
from batond.clients.transport import ClientTLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batond.clients.build import JobOptions
    from batond.clients.retry import RetryPolicy


@dataclass(frozen=True)
class Settings:
    """What the options before the command say."""

    server: str
    token: str | None
    tls: ClientTLS | None
    timeout_s: float
    allow_plaintext_token: bool

    def client(self, retry: RetryPolicy | None = None) -> Client:
        """Makes the client; sends nothing yet.

        Raises:
            ValueError: The token would cross a network in plain text, or no header can carry it.
        """
        return Client(
            self._addresses,
            token=self.token,
            tls=self.tls,
            timeout_s=self.timeout_s,
            allow_plaintext_token=self.allow_plaintext_token,
            retry=retry,
        )

    def async_client(self, retry: RetryPolicy | None = None) -> AsyncClient:
        """The same for asyncio."""
        return AsyncClient(
            self._addresses,
            token=self.token,
            tls=self.tls,
            timeout_s=self.timeout_s,
            allow_plaintext_token=self.allow_plaintext_token,
            retry=retry,
        )

    @property
    def _addresses(self) -> list[str]:
        return [address.strip() for address in self.server.split(",")]


def settings_of(
    ctx: typer.Context,
    *,
    server: str,
    token: str | None,
    token_file: Path | None,
    root_ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    tls: bool,
    timeout_s: float,
    allow_plaintext_token: bool,
) -> Settings:
    """Puts together what the options before the command say.

    Raises:
        OSError: A file can't be read.
        ValueError: Half a key pair, or a token that is not UTF-8.
    """
    token = chosen_token(ctx, token, token_file)
    secure = tls or root_ca is not None or certificate is not None or key is not None
    return Settings(
        server=server,
        token=token or None,
        tls=ClientTLS.from_files(root_ca, certificate, key) if secure else None,
        timeout_s=timeout_s,
        allow_plaintext_token=allow_plaintext_token,
    )


TokenOption = Annotated[
    str | None,
    typer.Option(envvar="BATOND_TOKEN", metavar="TOKEN", help="Your token; goes before --token-file."),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="BATOND_TOKEN_FILE",
        metavar="FILE",
        help="File that holds your token; as an option it goes before BATOND_TOKEN, as a variable after it.",
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Say on standard error when the job waits, starts or is parked, and why."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one value a line.")]
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's id.", autocompletion=cli_complete.job_ids)
]
TenantOption = Annotated[str, typer.Option(help="Whose job it is; your own tenant if left out.")]
PromptArgument = Annotated[
    str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; '-' reads standard input.")
]
SystemOption = Annotated[
    str | None, typer.Option(help="A system message; makes it a chat, the prompt being the user's turn.")
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="Send the prompt through the model's chat template.")
]
TokenIdsOption = Annotated[
    str | None, typer.Option(help="Token ids instead of a prompt, separated by commas.")
]
ClassOption = Annotated[
    str | None,
    typer.Option(
        "--class", "-c", help="Class of service; see `info`.", autocompletion=cli_complete.sla_classes
    ),
]
ModelOption = Annotated[str | None, typer.Option(help="The model; the one served if left out.")]
MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Most tokens to emit.")]
TemperatureOption = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")]
TopPOption = Annotated[float | None, typer.Option(help="Keep the smallest set reaching this probability.")]
SeedOption = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]
ChoicesOption = Annotated[
    int | None, typer.Option("--choices", help="Generations wanted of the same prompt.")
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(help="Show each token's log-probability and so many of the likeliest tokens', 0 to 20."),
]
PromptLogprobsOption = Annotated[int | None, typer.Option(help="The same for the tokens of the prompt.")]
SessionOption = Annotated[
    str | None,
    typer.Option("--session", help="Name of a conversation; its next turn need not compute this one again."),
]
StopOption = Annotated[list[str] | None, typer.Option(help="String that ends the generation; repeatable.")]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Don't end at the model's end-of-sequence ids.")
]
IdOption = Annotated[
    str | None, typer.Option("--id", help="Your own id; the same id again attaches to the job.")
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option("--time-limit", min=0.001, help="Seconds after which the job fails if it has not ended."),
]
LabelOption = Annotated[list[str] | None, typer.Option("--label", help="NAME=VALUE; repeatable.")]


def chosen_token(ctx: typer.Context, token: str | None, file: Path | None) -> str | None:
    """Gives the token: --token, else --token-file, else BATOND_TOKEN, else BATOND_TOKEN_FILE.

    Raises:
        OSError: The file that counts can't be read.
        ValueError: It is not UTF-8.
    """
    if file is not None and (token is None or (_typed(ctx, "token_file") and not _typed(ctx, "token"))):
        return file.read_text(encoding="utf-8").strip()
    return token


def _typed(ctx: typer.Context, option: str) -> bool:
    """Whether an option stands on the command line, not in the environment."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


@contextlib.contextmanager
def open_client(ctx: typer.Context) -> Iterator[Client]:
    """Gives the client that the options before the command describe."""
    chosen: Settings = ctx.obj
    try:
        client = chosen.client()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with client:
        yield client


def job_options(labels: list[str] | None, **given: object) -> JobOptions:
    """Gathers what the caller set; the rest is left to the daemon."""
    options: JobOptions = {}
    for name, value in given.items():
        if value is not None and value is not False:
            options[name] = value  # type: ignore[literal-required]  # commands name their options as JobOptions does
    if labels:
        options["labels"] = dict(_label(text) for text in labels)
    return options


def _label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--label")
    return name, value


def add_prompt(
    options: JobOptions, prompt: str | None, *, system: str | None, chat: bool, token_ids: str | None
) -> str | None:
    """Puts the input in its form; gives the prompt if it goes as plain text."""
    if prompt == "-":
        prompt = sys.stdin.read()
    if token_ids is not None:
        try:
            options["token_ids"] = [int(part) for part in token_ids.split(",")]
        except ValueError as error:
            raise typer.BadParameter("must be whole numbers and commas", param_hint="--token-ids") from error
        return prompt
    if prompt is None:
        raise typer.BadParameter("give a prompt, '-' for standard input, or --token-ids")
    if not chat and system is None:
        return prompt
    turns = [{"role": "system", "content": system}] if system is not None else []
    options["messages"] = [*turns, {"role": "user", "content": prompt}]
    return None


def job_state(name: str) -> JobState:
    """Reads the name of a state."""
    known = [state.value for state in JobState if state is not JobState.UNKNOWN]
    if name.lower() not in known:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--state")
    return JobState(name.lower())
