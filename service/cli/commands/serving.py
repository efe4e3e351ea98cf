"""``fxserve serve``, ``check`` and ``key``: run the server, check its settings, create API keys."""

from __future__ import annotations

import gc
import os
import socket
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from service.choices import KeyScope, LogFormat, LogLevel
from service.cli.environment import device_of, settings_of

if TYPE_CHECKING:
    from service.settings import Settings


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = None,
    models: Annotated[str | None, typer.Option(help="The only models to serve, separated by commas.")] = None,
    preload: Annotated[
        str | None, typer.Option(help="Extractors to build before the service is ready, separated by semicolons.")
    ] = None,
    weights_dir: Annotated[Path | None, typer.Option(help="Folder that weights file:NAME are loaded from.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of server processes.")] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Format of the log: text, or json with one object per line.")
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Log level; info and debug log each request.")] = None,
) -> None:
    """Serve the HTTP API until Ctrl-C or SIGTERM, then finish accepted requests.

    Each option overrides the environment variable FXSERVE_<OPTION>. The settings without an option, such as limits,
    timeouts and threads, are listed in service/README.md of the source.

    \b
    fxserve serve
    fxserve serve --preload 'resnet50:C4,C5;vit_b_16@random:encoder' --log-level info
    FXSERVE_API_KEYS_FILE=keys.txt fxserve serve --host 0.0.0.0
    """
    from service.http.server.signals import end, end_on_signals, hold_reloads, release_reloads

    end_on_signals()
    hold_reloads()

    from service.http.server.run import run, run_workers

    options = {
        "host": host,
        "port": port,
        "device": device,
        "models": models,
        "preload": preload,
        "weights_dir": weights_dir,
        "workers": workers,
        "log_format": log_format,
        "log_level": log_level,
    }
    settings = settings_of(options)
    if settings.api_keys_file is None:
        release_reloads()
    chosen = device_of(settings)
    _warn_misspelt_variables()
    _warn_of_memory(settings)
    _check_dependencies(settings)
    if settings.workers > 1:
        if settings.port == 0:
            raise typer.BadParameter("--workers: several processes need a fixed --port, not 0")
        # The server processes read these options from the environment.
        os.environ |= {f"FXSERVE_{name.upper()}": str(value) for name, value in options.items() if value is not None}
        run_workers(settings, chosen)
        end()
    from service.app import create_app

    run(create_app(settings), settings, chosen)


def _warn_misspelt_variables() -> None:
    """Warn on stderr about unknown ``FXSERVE_*`` variables that resemble known ones.

    Other unknown ones may be legitimate: for a Service named fxserve, Kubernetes sets FXSERVE_SERVICE_HOST and others.
    """
    from service.settings import Settings

    names = [name.upper() for name in Settings.model_fields]
    for variable in sorted(os.environ):
        name = variable.removeprefix("FXSERVE_")
        if name == variable or name in (*names, "API_KEY"):  # the last is for clients
            continue
        similar = get_close_matches(name, names, n=1, cutoff=0.72)
        if similar:
            print(f"fxserve: unknown variable {variable}; did you mean FXSERVE_{similar[0]}?", file=sys.stderr)


def _warn_of_memory(settings: Settings) -> None:
    """Warn on stderr about limits that allow more memory than is available, so that the system may end the process."""
    from service.machine import available_memory
    from service.settings import GiB

    needed, available = settings.needed_memory(), available_memory()
    if needed > available:
        print(
            f"fxserve: FXSERVE_MEMORY_BUDGET and FXSERVE_MAX_INFLIGHT_BYTES allow {needed / GiB:.1f} GiB, but only "
            f"{available / GiB:.1f} GiB are available",
            file=sys.stderr,
        )


def _check_dependencies(settings: Settings) -> None:
    """Open the resources that server processes need before starting any.

    Later errors would only be in the log of a process.

    Raises:
        FxError: the host, the store, the file of keys or OpenTelemetry is not usable, or an extractor to preload is not
            described as it must be.
    """
    from fxcore.errors import FxError
    from service.app import traces_type
    from service.engine.extractors.objects import StoreError
    from service.http.access.keys import Keys

    try:
        _check_host(settings.host)
        for text in settings.preload:
            _check_preload(text)
        if settings.extractors is not None:
            _check_store(settings.extractors)
            # s3fs closes its connections when it is collected. On the server's event loop, to which they do not belong,
            # that would log an error.
            gc.collect()
        if settings.weights_dir is not None and not settings.weights_dir.is_dir():
            print(
                f"fxserve: FXSERVE_WEIGHTS_DIR: there is no folder {settings.weights_dir}; weights file:NAME are not "
                "available",
                file=sys.stderr,
            )
        if settings.api_keys_file is not None:
            Keys(settings.api_keys_file)
        if settings.tracing:
            traces_type()
    except (ValueError, StoreError) as error:
        raise FxError(str(error)) from error


def _check_store(url: str) -> None:
    """Open the store of extractors, and warn on stderr if it cannot be written.

    Raises:
        ValueError, StoreError: it cannot be used.
    """
    from service.engine.extractors.objects import StoreError
    from service.engine.extractors.store import Store

    store = Store(url)
    store.check()
    try:
        store.check(write=True)
    except StoreError as error:
        print(f"fxserve: {error}; existing extractors are served, but none can be added or deleted", file=sys.stderr)


def _check_host(host: str) -> None:
    """Check that the host to listen on can be resolved.

    Raises:
        ValueError: it cannot.
    """
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:  # the latter for names such as a..b
        raise ValueError(
            f"host: {host!r} cannot be resolved; use an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all "
            "interfaces"
        ) from error


def _check_preload(text: str) -> None:
    """Check that an extractor to preload can be parsed.

    Raises:
        ValueError: it cannot; the message names the setting.
    """
    from service.schemas.specs import model_of_text, spec_of_text

    try:
        if model_of_text(text) is None:
            spec_of_text(text)
    except ValidationError as error:
        raise ValueError(f"FXSERVE_PRELOAD: {text[:100]!r}: {error.errors()[0]['msg']}") from error
    except ValueError as error:
        raise ValueError(f"FXSERVE_PRELOAD: {error}") from error


def check() -> None:
    """Show the machine's resources, what the service will use of them, and why.

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
    name: Annotated[str, typer.Argument(help="Name of the key's owner, for logs and to revoke it.")],
    scope: Annotated[
        KeyScope, typer.Option(help="read: query and compute; admin: also create, load and delete.")
    ] = "read",
) -> None:
    """Create an API key: its line for FXSERVE_API_KEYS_FILE goes to stdout, the key itself to stderr.

    \b
    fxserve key alice
    fxserve key deployment --scope admin

    Append the line to the file with >> FILE, and send SIGHUP to a running server.
    """
    from service.http.access import keys

    try:
        created, secret = keys.make(name, scope)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    print(created.line)
    print(
        f"{secret}\nkeep this key, the server does not store it; send it as Authorization: Bearer {secret[:8]}…",
        file=sys.stderr,
    )
