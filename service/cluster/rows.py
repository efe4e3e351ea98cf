"""The Parquet files of ``fxserve extract --ray``: columns ``path``, one of each output, and ``error``; of regions a row
is one, whose place the column ``box``, ``point`` or ``mask`` has.

What is in them is not done again. A file that a killed writer left half is removed, and of an image that two runs
wrote, where the last writer of the earlier one outlived it, one row is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from service.offline.batches import Result
from service.offline.failures import driver_errors
from service.offline.folder import Folder
from service.offline.outputs.index import Index, regions_changed
from service.offline.outputs.shards import PATH, arrow_column
from service.offline.runners import Rows
from service.schemas.regions import KINDS, Kind

ERROR = "error"
"""The column that says why an image has no features; null where it has."""

SUFFIX = ".parquet"


def schema_of(probe: Rows, about: Mapping[str, str]) -> pyarrow.Schema:
    """Return the columns, where one image gives ``probe``; ``about`` is a few words about all of them."""
    fields = [pyarrow.field(PATH, pyarrow.string())]
    fields += [pyarrow.field(key, arrow_column(values).type) for key, values in probe.items()]
    return pyarrow.schema([*fields, pyarrow.field(ERROR, pyarrow.string())], metadata=dict(about))


def table_of(results: Sequence[Result], schema: pyarrow.Schema) -> pyarrow.Table:
    """Rows of all images of ``results``: first those with features, then those with an error."""
    parts = []
    for result in results:
        start = 0
        for rows in result.rows:
            count = len(next(iter(rows.values())))
            columns: dict[str, Any] = {PATH: result.paths[start : start + count]}
            columns |= {key: arrow_column(values) for key, values in rows.items()}
            parts.append(pyarrow.table({**columns, ERROR: pyarrow.nulls(count, pyarrow.string())}, schema=schema))
            start += count
    errors = [error for result in results for error in result.errors]
    nothing = {field.name: _nulls(len(errors), field.type) for field in schema}
    told = {PATH: [path for path, _ in errors], ERROR: [reason for _, reason in errors]}
    parts.append(pyarrow.table(nothing | told, schema=schema))
    return pyarrow.concat_tables(parts).combine_chunks()


class Output:
    """What a run finds in its folder, and its own rows after that.

    Args:
        folder: where the files are.
        index: has the images that there are, and is told of those that are done.
        pool: the pooling of regions that made rows; None if rows are images.

    Attributes:
        files: that rows were found in.
    """

    def __init__(self, folder: Folder, index: Index, pool: str | None) -> None:
        self.files: list[str] = []
        self._folder = folder
        self._index = index
        self._kind = None if pool is None else KINDS[pool]

    def look(self) -> None:
        """Enter the rows of all files that came since the last time.

        Raises:
            FxError: the folder cannot be read or written, or has other regions of an image.
        """
        for name in self._folder.names():
            if name.endswith(SUFFIX) and name not in self.files:
                with driver_errors(f"{self._folder}/{name}"):
                    self._enter(name)

    def _enter(self, name: str) -> None:
        place, fs = self._folder.path(name), self._folder.fs
        places = [] if self._kind is None else [self._kind.one]
        try:
            with fs.open(place, "rb") as file:
                table = pyarrow.parquet.read_table(file, columns=[PATH, *places, ERROR])
        except pyarrow.ArrowInvalid:  # it has no end
            self._folder.remove(name)
            return
        paths, errors = table.column(PATH).to_pylist(), table.column(ERROR).to_pylist()
        if self._kind is not None:
            self._check_regions(self._kind, paths, table.column(self._kind.one).to_pylist())
        known = self._index.finished(paths)
        kept = [path not in known for path in paths]
        if not any(kept):
            self._folder.remove(name)
            return
        if not all(kept):
            with fs.open(place, "rb") as file:
                rest = pyarrow.parquet.read_table(file).filter(pyarrow.array(kept))
            with fs.open(place, "wb") as file:
                pyarrow.parquet.write_table(rest, file, compression="none")
        rows = [(path, error) for path, error, keep in zip(paths, errors, kept, strict=True) if keep]
        self._index.commit(
            name,
            [path for path, error in rows if error is None],
            [(path, error) for path, error in rows if error is not None],
        )
        self.files.append(name)

    def _check_regions(self, kind: Kind, paths: Sequence[str], found: Sequence[Sequence[float] | int | None]) -> None:
        """Compare boxes and points with those that are to be done. Of masks their number is known."""
        done: dict[str, list[Sequence[float] | int]] = {}
        for path, one in zip(paths, found, strict=True):
            if one is not None:  # else there is an error in its place
                done.setdefault(path, []).append(one if isinstance(one, int) else list(one))
        for path, of_image in done.items():
            wanted = self._index.regions(path)
            if wanted is not None and (list(range(len(wanted))) if kind.one == "mask" else wanted) != of_image:
                raise regions_changed(path, kind.field)


def _nulls(count: int, type: pyarrow.DataType) -> pyarrow.Array:
    if isinstance(type, pyarrow.BaseExtensionType):
        return pyarrow.ExtensionArray.from_storage(type, pyarrow.nulls(count, type.storage_type))
    return pyarrow.nulls(count, type)
