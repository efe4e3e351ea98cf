"""How far a run is: a bar with its rate and the time it will still take, where there is a terminal to draw it on."""

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

_RATE_OVER = 60.0
"""Seconds that the rate is measured over."""


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f} images/s")


@contextmanager
def progress() -> Iterator[Report]:
    """Draw on stderr what the function that this gives is told."""
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
    with Progress(*columns, console=console, speed_estimate_period=_RATE_OVER, disable=not console.is_terminal) as bar:
        task = bar.add_task("building the extractor", total=None)

        def report(images: int, done: int, unreadable: int) -> None:
            description = f"{unreadable} unreadable" if unreadable else "extracting"
            if bar.tasks[0].total is None:  # what an earlier run did says nothing of the rate
                bar.reset(task, total=images, completed=done + unreadable, description=description)
            else:
                bar.update(task, completed=done + unreadable, description=description)

        yield report
