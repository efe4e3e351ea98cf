"""``fxserve merge``: merge folders of statistics into one, as if one run had reduced all their images."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from fxcore.errors import FxError
from service.offline.failures import write_errors
from service.offline.folder import Folder
from service.offline.outputs import index as index_file
from service.offline.outputs.index import Index
from service.offline.outputs.spec_file import FILE, SpecFile
from service.offline.outputs.working_folder import WorkingFolder
from service.offline.run import Summary
from service.offline.statistics.files import check_installed
from service.offline.statistics.reducer import Reduction
from service.offline.statistics.statistics import Statistics


def merge(folders: Sequence[str], out: str | os.PathLike[str]) -> Summary:
    """Merge the statistics of several runs. None of them may be running.

    Args:
        folders: paths or URLs of folders that ``fxserve extract --reduce`` made with the same options from different
            images. They are not changed.
        out: path or URL of a new folder. It can be resumed and merged like any other.

    Raises:
        FxError: they cannot be merged, or ``out`` cannot be written.
    """
    target = Folder(out)
    if SpecFile.read(target) is not None or target.names():
        raise FxError(f"{target} is not empty; name a new folder")
    spec = None
    for folder in folders:
        found = SpecFile.read(Folder(folder))
        if found is None or found.reduce is None:
            held = f"no {FILE}" if found is None else "features"
            raise FxError(f"{folder} holds {held}; name folders created by fxserve extract --reduce")
        spec = spec or found
        if differences := found.differences(spec):
            raise FxError(f"{folder} was made with {'; '.join(differences)} as in {folders[0]}; they cannot be merged")
    if spec is None or spec.reduce is None:
        raise FxError("name the folders to merge")
    check_installed(spec.reduce)
    with write_errors(target):
        working = WorkingFolder(target)
        try:
            reduction = None
            for folder in folders:
                with _opened(Folder(folder)) as other:
                    counts = other.counts()
                    if counts.left:
                        raise FxError(
                            f"{counts.left} of {counts.images} images of {folder} are not done yet; finish that run "
                            "first"
                        )
                    other_statistics = Statistics.from_states(other.statistics())
                    working.index.add_finished(other)
                if not other_statistics.outputs:  # this folder has no images yet
                    continue
                if reduction is None:
                    reduction = Reduction(working, other_statistics, spec)
                else:
                    reduction.merge([], other_statistics, [])
            if reduction is not None:
                reduction.finish()
            working.list_errors()
            counts = working.index.counts()
        except BaseException:
            working.discard()
            raise
        working.close()
        spec.write(target)  # last: without it, other runs cannot use the folder
    return Summary(spec.outputs, *counts, 0)


@contextmanager
def _opened(folder: Folder) -> Iterator[Index]:
    """Open the index of ``folder``, or a copy if it is in a bucket.

    Raises:
        FxError: it does not exist, or a run is writing to it.
    """
    with tempfile.TemporaryDirectory(prefix="fxserve-") as scratch:
        place = folder.disk or Path(scratch)
        if folder.disk is None:
            folder.get(index_file.FILE, place / index_file.FILE)
        if not (place / index_file.FILE).exists():
            raise FxError(f"{folder} holds no {index_file.FILE}; name folders that fxserve extract --reduce made")
        with closing(Index(place, read_only=True)) as index:
            yield index
