"""The ``fxserve`` command and its subcommands."""

from __future__ import annotations

import gc
import os
import threading
from importlib.metadata import version
from typing import Annotated

import typer

from service.cli.commands import extract, merge, models, serving, why
from service.cli.interrupts import end_imports_on_interrupt
from service.cli.usage import Commands
from service.garbage import collect_rarely
from service.http.server.signals import end

app = typer.Typer(
    name="fxserve", cls=Commands, rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False
)


def main() -> None:
    """Run the console script."""
    end_imports_on_interrupt()
    collect_rarely()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as in service.app
    try:
        app()
    except SystemExit as ended:
        if any(thread.daemon and thread.name.startswith("fxserve") for thread in threading.enumerate()):
            # After an interrupt it may be computing, and would abort the process: before Python 3.14, a thread that
            # returns from C++ while the interpreter finalizes is ended within it.
            end(int(ended.code or 0))
        raise
    finally:
        gc.freeze()  # else two collections at exit visit all objects of torch, for a second or two


def _print_version(wanted: bool) -> None:
    if wanted:
        parts = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchvision"))
        print(f"fxserve {version('fxserve')} ({parts})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Every inner activation of a vision model: name the nodes of its torch.fx graph, send images, get tensors.

    \b
    fxserve nodes resnet50                         list the nodes of a model
    fxserve extract photos/ --model resnet50 --nodes C4,C5 --out features/
    fxserve serve                                  serve the same over HTTP

    Each command has its own --help with examples.
    """
    if context.invoked_subcommand is None:
        context.get_help()  # with rich, this prints the help itself


for command in (
    serving.serve,
    serving.check,
    models.models,
    models.nodes,
    models.graph,
    extract.extract,
    merge.merge,
    why.why,
    serving.key,
):
    app.command()(command)
