"""``fxserve merge``: merge the statistics of several runs."""

from __future__ import annotations

from typing import Annotated

import typer


def merge(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="FOLDERS...", help="Folders or URLs created by [bold]fxserve extract --reduce[/bold]."),
    ],
    out: Annotated[str, typer.Option(help="A new folder or URL.")],
) -> None:
    """Merge statistics of different images, as if one run had reduced them all.

    Each machine reduces its share of the images with the same options; then one merges the folders. What it makes can
    be resumed with further images, and merged again. An image that two of them have counted is an error.

    \b
    fxserve merge statistics-0/ statistics-1/ --out statistics/
    """
    from service.offline.merge import merge

    summary = merge(folders, out)
    unreadable = f", {summary.unreadable} could not be read: see {out}/errors.jsonl" if summary.unreadable else ""
    print(f"{out.rstrip('/')}: statistics of {summary.done} of {summary.images} images{unreadable}")
