"""``fxserve serve``, and what is done around it: ``check`` and ``key``."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from service.cli.environment import device_of, settings_of

if TYPE_CHECKING:
    from service.settings import Settings

KeyScope = Literal["read", "admin"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = None,
    models: Annotated[str | None, typer.Option(help="The only models to serve, separated by commas.")] = None,
    preload: Annotated[
        str | None, typer.Option(help="Extractors to build before the service is ready, separated by semicolons.")
    ] = None,
    weights_dir: Annotated[Path | None, typer.Option(help="Folder that weights=file:NAME is read from.")] = None,
    workers: Annotated[int | None, typer.Option(help="Server processes on this port.")] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="Log lines for people, or one JSON object each.")] = None,
    log_level: Annotated[LogLevel, typer.Option(help="info and debug show each request.")] = "warning",
) -> None:
    """Serve the HTTP API until Ctrl-C or SIGTERM; what was accepted is finished first.

    Each option stands for the environment variable FXSERVE_<OPTION> and wins over it. The README lists the
    variables that have no option here: limits, timeouts, threads.

    \b
    fxserve serve
    fxserve serve --host 0.0.0.0 --port 80 --preload 'resnet50:C4,C5;vit_b_16@random:encoder'
    """
    from service.http.server import end_on_signals, run, run_workers

    end_on_signals()
    given = {
        "host": host,
        "port": port,
        "device": device,
        "models": models,
        "preload": preload,
        "weights_dir": weights_dir,
        "workers": workers,
        "log_format": log_format,
    }
    settings = settings_of(given)
    chosen = device_of(settings)
    _tell_of_misspelt_variables()
    _check(settings)
    if settings.workers > 1:
        if settings.port == 0:
            raise typer.BadParameter("--workers: several processes need one --port to share, not 0")
        # They are started anew and read what was given here from the environment.
        os.environ |= {f"FXSERVE_{name.upper()}": str(value) for name, value in given.items() if value is not None}
        run_workers(settings, chosen, log_level)
        return
    from service.app import create_app

    run(create_app(settings), settings, chosen, log_level)


def _tell_of_misspelt_variables() -> None:
    """Say on stderr which ``FXSERVE_*`` variables set nothing and look like ones that do.

    Others may be anybody's: beside a Service called fxserve, Kubernetes sets FXSERVE_SERVICE_HOST and the like.
    """
    from service.settings import Settings

    names = [name.upper() for name in Settings.model_fields]
    for variable in sorted(os.environ):
        name = variable.removeprefix("FXSERVE_")
        if name == variable or name in (*names, "API_KEY"):  # the last is what clients send
            continue
        meant = get_close_matches(name, names, n=1, cutoff=0.72)
        if meant:
            print(f"fxserve: {variable} sets nothing; is FXSERVE_{meant[0]} meant?", file=sys.stderr)


def _check(settings: Settings) -> None:
    """Try what a server process needs to start: of several, one that fails is started again without end.

    Raises:
        FxError: it cannot be had.
    """
    from fxcore.errors import FxError
    from service.app import traces_type
    from service.engine.registry.objects import StoreError
    from service.engine.registry.store import Store
    from service.http.keys import Keys

    try:
        if settings.extractors is not None:
            Store(settings.extractors).open()
        if settings.api_keys_file is not None:
            Keys(settings.api_keys_file)
        if settings.tracing:
            traces_type()
    except (ValueError, StoreError) as error:
        raise FxError(str(error)) from error


def check() -> None:
    """Show what the machine has, what the service will use of it with its settings, and why.

    \b
    fxserve check
    FXSERVE_WORKERS=2 fxserve check
    """
    from service.cli import tables
    from service.cli.check import findings

    found = findings(settings_of({}))
    tables.show(tables.findings(found))
    if any(finding.verdict == "problem" for finding in found):
        raise typer.Exit(1)


def key(
    name: Annotated[str, typer.Argument(help="Whose key it is, for the log and for taking it back.")],
    scope: Annotated[KeyScope, typer.Option(help="read asks; admin also makes, loads and deletes.")] = "read",
) -> None:
    """Make an API key: its line for FXSERVE_API_KEYS_FILE goes to stdout, the key itself to stderr, once.

    \b
    fxserve key alice
    fxserve key deployment --scope admin

    Append the line with >> FILE, and have a server that runs read it with SIGHUP.
    """
    from service.http import keys

    try:
        made, secret = keys.make(name, scope)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    print(made.line)
    print(f"{secret}\nkeep it: it is not stored; send it as Authorization: Bearer {secret[:8]}…", file=sys.stderr)
