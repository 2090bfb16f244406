"""`python -m batond.bench trace`."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from batond.bench.traces import figures, run, show
from batond.bench.traces.options import HOST_POOL_BYTES, Options, OwnDaemon, RunningDaemon
from batond.bench.traces.workload import write_requests
from batond.daemon.errors import ConfigError
from batond.daemon.simulator.command import policy_list
from batond.daemon.simulator.figures import load_plotter
from batond.daemon.simulator.options import numbers, pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN_SHRINK = 16.0  # A small model on a CPU can't serve the lengths of a card.
WIDTH = 144  # Of the tables, with "simulated" behind a policy's name: cut figures help nobody.
WHAT = "What is replayed"
WHEN = "When requests come: one of"
WHERE = "On a daemon that runs already"
OWN = "On a daemon that is started (without --address)"
FILES = "Files"


def trace_command(  # noqa: PLR0917 - typer calls it by name
    csv: Annotated[
        Path,
        typer.Argument(help="CSV: arrival_s,prompt_tokens,output_tokens[,tenant][,class][,time_limit_s]."),
    ],
    policies: Annotated[
        str | None,
        typer.Option(
            help="One after the other, with commas between. [default: priority,fcfs; a running daemon's own]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    classes: Annotated[
        str,
        typer.Option(help="Class by tenant, such as code=interactive,conv=batch.", rich_help_panel=WHAT),
    ] = "",
    share: Annotated[
        str,
        typer.Option(help="Class by lot, such as interactive=0.1,batch=0.9.", rich_help_panel=WHAT),
    ] = "",
    ttft: Annotated[
        str,
        typer.Option(
            help="Target of the first token by class, such as interactive=2, s.", rich_help_panel=WHAT
        ),
    ] = "",
    tpot: Annotated[
        str,
        typer.Option(
            help="Target of a token's time by class, such as interactive=0.2, s.", rich_help_panel=WHAT
        ),
    ] = "",
    fit: Annotated[
        int,
        typer.Option(help="Leave out rows of more tokens, prompt and output; 0 none.", rich_help_panel=WHAT),
    ] = 0,
    window: Annotated[
        float, typer.Option(help="Only so many seconds, the busiest; 0 is all.", rich_help_panel=WHAT)
    ] = 600.0,
    start: Annotated[
        float | None,
        typer.Option(help="Where the window begins, s; not the busiest then.", rich_help_panel=WHAT),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Kept of them, evenly; 0 is all.", rich_help_panel=WHAT)
    ] = 240,
    shrink: Annotated[
        float | None,
        typer.Option(
            help="Divides prompt and output lengths. [default: 16; 1 on a running daemon]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="So many times as fast as the trace.", rich_help_panel=WHEN)
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(help="Arrivals over capacity. [default: 1.1, where simulated]", rich_help_panel=WHEN),
    ] = None,
    saturate: Annotated[  # noqa: FBT002 - typer
        bool, typer.Option("--saturate", help="All at once: throughput at saturation.", rich_help_panel=WHEN)
    ] = False,
    address: Annotated[
        str,
        typer.Option(
            help="host:port, unix:///path; several, with commas, of one queue.", rich_help_panel=WHERE
        ),
    ] = "",
    token: Annotated[
        str,
        typer.Option(envvar="BATOND_TOKEN", help="Of whom --tokens does not name.", rich_help_panel=WHERE),
    ] = "",
    tokens: Annotated[
        Path | None,
        typer.Option(
            help='JSON file of tokens by tenant; "operator" exchanges policies.', rich_help_panel=WHERE
        ),
    ] = None,
    root_ca: Annotated[
        Path | None,
        typer.Option(envvar="BATOND_ROOT_CA", help="PEM file that vouches for it.", rich_help_panel=WHERE),
    ] = None,
    allow_plaintext_token: Annotated[  # noqa: FBT002 - typer
        bool,
        typer.Option(
            "--allow-plaintext-token", help="Send tokens without TLS to another host.", rich_help_panel=WHERE
        ),
    ] = False,
    rows: Annotated[int, typer.Option(help="Rows of the batch.", rich_help_panel=OWN)] = 4,
    chunk_tokens: Annotated[
        str, typer.Option(help="Prompt tokens between two decode steps, or auto.", rich_help_panel=OWN)
    ] = "128",
    quantum_tokens: Annotated[
        int, typer.Option(help="Tokens before a row may be taken.", rich_help_panel=OWN)
    ] = 2,
    host_pool_bytes: Annotated[
        int, typer.Option(help="Host RAM for parked KV.", rich_help_panel=OWN)
    ] = HOST_POOL_BYTES,
    model: Annotated[
        str, typer.Option(help='"smollm2" (SmolLM2-135M), or a path.', rich_help_panel=OWN)
    ] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=OWN)] = "cpu",
    dtype: Annotated[str, typer.Option(help="As in the configuration.", rich_help_panel=OWN)] = "auto",
    threads: Annotated[
        int, typer.Option(help="CPU threads of the engine; 0 is torch's choice.", rich_help_panel=OWN)
    ] = 0,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Further keys, such as engine.arena=plain; repeat.", rich_help_panel=OWN),
    ] = None,
    simulate: Annotated[  # noqa: FBT002 - typer
        bool,
        typer.Option(help="Measure step times, and say what the simulator predicts.", rich_help_panel=OWN),
    ] = True,
    alone: Annotated[
        bool | None,
        typer.Option(
            "--alone/--no-alone",
            help="Replay the most urgent class alone too. [default: not at saturation]",
            rich_help_panel=OWN,
        ),
    ] = None,
    costs: Annotated[
        str, typer.Option(help="Step times as for batond simulate, not measured ones.", rich_help_panel=OWN)
    ] = "",
    seed: Annotated[int, typer.Option(help="Of prompts and lots.", rich_help_panel=WHAT)] = 0,
    output: Annotated[Path | None, typer.Option(help="Every figure as JSON.", rich_help_panel=FILES)] = None,
    csv_output: Annotated[
        Path | None, typer.Option("--csv", help="A row for each request and run.", rich_help_panel=FILES)
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(help="Folder for figures, each as PNG and SVG (matplotlib).", rich_help_panel=FILES),
    ] = None,
    save_requests: Annotated[
        Path | None,
        typer.Option(help="What is replayed, as JSON, for other systems.", rich_help_panel=FILES),
    ] = None,
) -> None:
    """Replay a trace on a real daemon over gRPC, open loop, policy after policy.

    Each request is sent at its time, whatever has become of the others, with a prompt of random tokens, and
    puts out exactly its output tokens. Ctrl-C ends the replay and shows what there is.
    """
    daemon: OwnDaemon | RunningDaemon
    if address:
        daemon = RunningDaemon(
            address=address,
            token=token,
            tokens=_tokens(tokens),
            root_ca=root_ca,
            allow_plaintext_token=allow_plaintext_token,
        )
    else:
        daemon = OwnDaemon(
            rows=rows,
            chunk_tokens=_chunk_tokens(chunk_tokens),
            quantum_tokens=quantum_tokens,
            host_pool_bytes=host_pool_bytes,
            model=model,
            device=device,
            dtype=dtype,
            threads=threads,
            settings=_settings(setting or ()),
        )
    options = Options(
        trace=csv,
        policies=_policies(policies, running=bool(address)),
        classes=pairs(classes, "classes"),
        share=numbers(share, "share"),
        fit_tokens=fit,
        start_s=start,
        window_s=window,
        requests=requests,
        shrink=(1.0 if address else OWN_SHRINK) if shrink is None else shrink,
        rate=rate,
        load=load,
        saturate=saturate,
        ttft_s=numbers(ttft, "ttft"),
        tpot_s=numbers(tpot, "tpot"),
        simulate=simulate and not address,
        alone=not saturate if alone is None else alone,
        costs=costs,
        seed=seed,
        daemon=daemon,
    )
    replay_and_show(options, output=output, csv=csv_output, plots=plots, save_requests=save_requests)


def replay_and_show(
    options: Options,
    *,
    output: Path | None = None,
    csv: Path | None = None,
    plots: Path | None = None,
    save_requests: Path | None = None,
) -> None:
    """Replay, print, and write the files that are asked for.

    Raises:
        ConfigError: Something that is asked for can't be, or a file can't be written.
        StateError: A running daemon is not reached, or not ready.
        Exit: Status 1 if a request failed in the daemon, 130 if it was stopped.
    """
    console = Console()
    console.width = max(console.width, WIDTH)
    if plots is not None:
        load_plotter()  # Missing: known before minutes of replay, not after.
    result = run.run(options, console)
    show.show(console, options, result)
    try:
        if output is not None:
            show.write_json(output, options, result)
        if csv is not None:
            show.write_csv(csv, result)
        if save_requests is not None:
            write_requests(save_requests, result.requests)
        if plots is not None:
            for path in figures.draw(plots, options, result):
                console.print(f"drawn: {path.name}", markup=False, highlight=False)
    except OSError as error:
        raise ConfigError(f"{error.filename} can't be written: {error.strerror}", field="output") from error
    if result.stopped:
        raise typer.Exit(130)


def _policies(given: str | None, *, running: bool) -> tuple[str, ...]:
    if given is None:
        return () if running else ("priority", "fcfs")
    # A running daemon may know policies of distributions that are not installed here.
    if running:
        return tuple(name for part in given.split(",") if (name := part.strip()))
    return tuple(policy_list(given))


def _chunk_tokens(given: str) -> Literal["auto"] | int:
    if given == "auto":
        return "auto"
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(
            f"chunk_tokens must be auto or a number from 1 on, not {given!r}", field="chunk_tokens"
        )
    return int(given)


def _settings(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read `section.key=value`; a value that is no JSON is a string."""
    found: dict[str, dict[str, Any]] = {}
    for one in given:
        place, equals, text = one.partition("=")
        section, dot, key = place.strip().partition(".")
        if not (section and dot and key and equals):
            raise ConfigError(f"{one!r} is not of the form section.key=value", field="setting")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found.setdefault(section, {})[key] = value
    return found


def _tokens(path: Path | None) -> dict[str, str]:
    """Tokens by tenant, from a file that only its owner should read."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokens {path} can't be read: {error}", field="tokens") from error
    if not isinstance(found, dict) or not all(isinstance(one, str) and one for one in found.values()):
        raise ConfigError(f'tokens {path} must be a JSON object such as {{"code": "TOKEN"}}', field="tokens")
    return found
