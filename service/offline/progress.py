"""A progress bar for runs in a terminal, with rate and remaining time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from service.offline.run import Report

_RATE_WINDOW = 60.0
"""Seconds over which the rate is measured."""


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f} images/s")


@contextmanager
def progress() -> Iterator[Report]:
    """Show a progress bar on stderr; yields the function that updates it."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, speed_estimate_period=_RATE_WINDOW, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("building the extractor", total=None)

        def report(images: int, done: int, unreadable: int) -> None:
            description = f"{unreadable} unreadable" if unreadable else "extracting"
            if bar.tasks[0].total is None:  # exclude images of earlier runs from the rate
                bar.reset(task, total=images, completed=done + unreadable, description=description)
            else:
                bar.update(task, completed=done + unreadable, description=description)

        yield report
