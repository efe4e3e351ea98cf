"""The Parquet files of ``fxserve extract --ray``: columns ``path``, one of each output, and ``error``; of regions a row
is a box, which the column ``box`` has.

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
from service.offline.index import Index, boxes_changed
from service.offline.runners import Rows
from service.offline.shards import BOX, PATH, arrow_column

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
        regions: whether rows are boxes.

    Attributes:
        files: that rows were found in.
    """

    def __init__(self, folder: Folder, index: Index, regions: bool) -> None:
        self.files: list[str] = []
        self._folder = folder
        self._index = index
        self._boxes = [BOX] if regions else []

    def look(self) -> None:
        """Enter the rows of all files that came since the last time.

        Raises:
            FxError: the folder cannot be read or written, or has other boxes of an image.
        """
        for name in self._folder.names():
            if name.endswith(SUFFIX) and name not in self.files:
                with driver_errors(f"{self._folder}/{name}"):
                    self._enter(name)

    def _enter(self, name: str) -> None:
        place, fs = self._folder.path(name), self._folder.fs
        try:
            with fs.open(place, "rb") as file:
                table = pyarrow.parquet.read_table(file, columns=[PATH, *self._boxes, ERROR])
        except pyarrow.ArrowInvalid:  # it has no end
            self._folder.remove(name)
            return
        paths, errors = table.column(PATH).to_pylist(), table.column(ERROR).to_pylist()
        if self._boxes:
            self._check_boxes(paths, table.column(BOX).to_pylist())
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

    def _check_boxes(self, paths: Sequence[str], boxes: Sequence[Sequence[float] | None]) -> None:
        done: dict[str, list[Sequence[float]]] = {}
        for path, box in zip(paths, boxes, strict=True):
            if box is not None:  # else there is an error in its place
                done.setdefault(path, []).append(list(box))
        for path, of_image in done.items():
            if (wanted := self._index.boxes(path)) is not None and wanted != of_image:
                raise boxes_changed(path)


def _nulls(count: int, type: pyarrow.DataType) -> pyarrow.Array:
    if isinstance(type, pyarrow.BaseExtensionType):
        return pyarrow.ExtensionArray.from_storage(type, pyarrow.nulls(count, type.storage_type))
    return pyarrow.nulls(count, type)
