"""The Parquet files of ``fxserve extract --ray``.

Their columns are ``path``, one per output, and ``error``. A row is an image, or a region with its location in the
column ``box``, ``point`` or ``mask``.

Images with features in these files are skipped; those with an error are tried again. Partial files are deleted. If two
runs wrote the same image, because a writer outlived its run, one row is kept. Other files in the folder are neither
read nor changed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyarrow
import pyarrow.parquet

from fxcore.errors import FxError
from service.offline.batches import Result
from service.offline.failures import driver_errors
from service.offline.folder import Folder
from service.offline.outputs.index import Index, regions_changed
from service.offline.outputs.shards import PATH, arrow_column
from service.offline.outputs.spec_file import FILE as SPEC_FILE
from service.offline.runners.runner import Rows
from service.schemas.regions import KINDS, Kind

ERROR = "error"
"""The column with the reason why an image has no features; null if it has features."""

_NAME = re.compile(r".*[0-9a-f]{32}_.*\.parquet")
"""Names that Ray gives to files: they contain the id of the write."""


def schema_of(probe: Rows, about: Mapping[str, str]) -> pyarrow.Schema:
    """Return the schema of the files.

    Args:
        probe: the features of one image.
        about: metadata of the files.
    """
    fields = [pyarrow.field(PATH, pyarrow.string())]
    fields += [pyarrow.field(key, arrow_column(values).type) for key, values in probe.items()]
    return pyarrow.schema([*fields, pyarrow.field(ERROR, pyarrow.string())], metadata=dict(about))


def table_of(results: Sequence[Result], schema: pyarrow.Schema) -> pyarrow.Table:
    """Return the rows of all images of ``results``: first those with features, then those with an error."""
    parts = []
    for result in results:
        if result.paths:
            columns = {key: arrow_column(values) for key, values in result.rows.items()}
            columns |= {PATH: result.paths, ERROR: pyarrow.nulls(len(result.paths), pyarrow.string())}
            parts.append(pyarrow.table(columns, schema=schema))
    errors = [error for result in results for error in result.errors]
    nothing = {field.name: _nulls(len(errors), field.type) for field in schema}
    told = {PATH: [path for path, _ in errors], ERROR: [reason for _, reason in errors]}
    parts.append(pyarrow.table(nothing | told, schema=schema))
    return pyarrow.concat_tables(parts).combine_chunks()


@contextmanager
def locked(folder: Folder) -> Iterator[None]:
    """Lock a folder on disk, which has a spec file, against other runs: they would remove files being written.

    Raises:
        FxError: another run has locked it.
    """
    if folder.disk is None or sys.platform == "win32":
        yield
        return
    import fcntl

    with (folder.disk / SPEC_FILE).open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FxError(f"{folder}: another run is writing to this folder") from error
        except OSError:  # not every file system has locks
            pass
        yield


class Output:
    """The rows in the folder of a run: those of earlier runs and its own.

    Args:
        folder: the folder of the files.
        index: the index of all images, in which finished ones are recorded.
        schema: the schema of the files, with their metadata.
        pool: the region pooling of the rows; None if rows are images.

    Attributes:
        files: names of the files with rows.
    """

    def __init__(self, folder: Folder, index: Index, schema: pyarrow.Schema, pool: str | None) -> None:
        self.files: list[str] = []
        self._schema = schema
        self._folder = folder
        self._index = index
        self._kind = None if pool is None else KINDS[pool]

    def look(self, keep_errors: bool = True) -> None:
        """Add the rows of all files that are new since the last call to the index.

        Args:
            keep_errors: if not, remove the rows of images without features, which are then computed again.

        Raises:
            FxError: the folder cannot be read or written, or has other regions of an image.
        """
        for name in self._folder.names():
            if _NAME.fullmatch(name) and name not in self.files:
                with driver_errors(f"{self._folder}/{name}"):
                    self._enter(name, keep_errors)

    def _enter(self, name: str, keep_errors: bool) -> None:
        place, fs = self._folder.path(name), self._folder.fs
        places = [] if self._kind is None else [self._kind.one]
        try:
            with fs.open(place, "rb") as file:
                written = pyarrow.parquet.ParquetFile(file)
                if not self._is_ours(written.schema_arrow):
                    return
                table = written.read(columns=[PATH, *places, ERROR])
        except pyarrow.ArrowInvalid:  # it is incomplete
            self._folder.remove(name)
            return
        paths, errors = table.column(PATH).to_pylist(), table.column(ERROR).to_pylist()
        if self._kind is not None:
            self._check_regions(self._kind, paths, table.column(self._kind.one).to_pylist())
        known = self._index.finished(paths)
        kept = [path not in known and (keep_errors or error is None) for path, error in zip(paths, errors, strict=True)]
        if not any(kept):
            self._folder.remove(name)
            return
        if not all(kept):
            with fs.open(place, "rb") as file:
                rest = pyarrow.parquet.read_table(file).filter(pyarrow.array(kept))
            buffer = pyarrow.BufferOutputStream()
            pyarrow.parquet.write_table(rest, buffer, compression="none")
            self._folder.write(name, buffer.getvalue().to_pybytes())
        rows = [(path, error) for path, error, keep in zip(paths, errors, kept, strict=True) if keep]
        self._index.commit(
            name,
            [path for path, error in rows if error is None],
            [(path, error) for path, error in rows if error is not None],
        )
        self.files.append(name)

    def _is_ours(self, schema: pyarrow.Schema) -> bool:
        same_columns = set(schema.names) == set(self._schema.names)
        return same_columns and self._schema.metadata.items() <= (schema.metadata or {}).items()

    def _check_regions(self, kind: Kind, paths: Sequence[str], found: Sequence[Sequence[float] | int | None]) -> None:
        """Compare boxes and points with the requested ones. For masks only their number is compared."""
        done: dict[str, list[Sequence[float] | int]] = {}
        for path, one in zip(paths, found, strict=True):
            if one is not None:  # otherwise the row is an error
                done.setdefault(path, []).append(one if isinstance(one, int) else list(one))
        for path, of_image in done.items():
            wanted = self._index.regions(path)
            if wanted is not None and (list(range(len(wanted))) if kind.one == "mask" else wanted) != of_image:
                raise regions_changed(path, kind.field)


def _nulls(count: int, type: pyarrow.DataType) -> pyarrow.Array:
    if isinstance(type, pyarrow.BaseExtensionType):
        return pyarrow.ExtensionArray.from_storage(type, pyarrow.nulls(count, type.storage_type))
    return pyarrow.nulls(count, type)
