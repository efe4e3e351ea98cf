"""Read the boxes that ``pool=roi`` pools, from a Parquet or CSV file.

The file has the columns ``path`` and ``boxes``. Paths are absolute, URLs, or relative to the folder of the file;
members of archives are ``ARCHIVE/NAME``. Boxes are a list of ``[x1, y1, x2, y2]`` in pixels of the image, after its
EXIF orientation, as JSON in CSV files. An image may have several rows.
"""

from __future__ import annotations

import csv
import io
import math
import os
import posixpath
from collections.abc import Iterator
from typing import Any

import orjson

from fxcore.errors import FxError
from service.offline.failures import driver_errors
from service.offline.folder import is_url
from service.offline.sources import Boxes, open_binary

PATH, BOXES = "path", "boxes"
_REQUIRED = f"it needs the columns {PATH} and {BOXES}"


def read(file: str) -> Iterator[tuple[str, Boxes]]:
    """Yield (path, boxes) of each row that has boxes, without reading the whole file into memory.

    Args:
        file: a path or a URL that ends in ``.parquet`` or ``.csv``.

    Raises:
        FxError: it cannot be read, lacks a column, or a row is wrong.
    """
    folder = posixpath.dirname(file) if is_url(file) else os.path.dirname(os.path.abspath(file))
    kind = os.path.splitext(file)[1].lower()
    if kind not in (".parquet", ".csv"):
        raise FxError(f"{file}: boxes must be in a .parquet or .csv file")
    for number, (path, boxes) in enumerate(_parquet(file) if kind == ".parquet" else _csv(file), 1):
        if not isinstance(path, str) or not path:
            raise FxError(f"{file}, row {number}: {PATH} must be the path of an image, not {path!r:.100}")
        if boxes:
            yield _absolute(folder, path), _checked(boxes, f"{file}, row {number}")


def _parquet(file: str) -> Iterator[tuple[Any, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise FxError(f"{file} needs pyarrow, which is not installed: pip install 'fxserve[offline]'") from error
    with driver_errors(file), open_binary(file) as stream:
        try:
            table = pyarrow.parquet.ParquetFile(stream)
        except pyarrow.ArrowInvalid as error:
            raise FxError(f"{file} is not a Parquet file: {error}") from error
        _check_columns(file, table.schema_arrow.names)
        for batch in table.iter_batches(columns=[PATH, BOXES]):
            columns = batch.to_pydict()
            yield from zip(columns[PATH], columns[BOXES], strict=True)


def _csv(file: str) -> Iterator[tuple[Any, Any]]:
    with driver_errors(file), open_binary(file) as stream:
        rows = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""))
        try:
            _check_columns(file, rows.fieldnames or ())
            for number, row in enumerate(rows, 1):
                text = (row[BOXES] or "").strip()
                try:
                    yield row[PATH], orjson.loads(text) if text else None
                except orjson.JSONDecodeError as error:
                    raise _wrong(f"{file}, row {number}", text) from error
        except (csv.Error, UnicodeDecodeError) as error:
            raise FxError(f"{file}, line {rows.line_num}: {error}") from error


def _check_columns(file: str, found: Any) -> None:
    if not {PATH, BOXES} <= set(found):
        raise FxError(f"{file} has the columns {', '.join(map(str, found)) or 'none'}; {_REQUIRED}")


def _checked(boxes: Any, place: str) -> Boxes:
    checked = []
    for box in boxes if isinstance(boxes, list) else [boxes]:
        numbers = isinstance(box, list) and len(box) == 4 and all(type(value) in (int, float) for value in box)
        if not numbers or not all(map(math.isfinite, box)):
            raise _wrong(place, boxes)
        checked.append([float(value) for value in box])
    return checked


def _wrong(place: str, boxes: object) -> FxError:
    shown = boxes if isinstance(boxes, str) else orjson.dumps(boxes, default=str).decode()
    return FxError(
        f"{place}: {BOXES} must be a list of [x1, y1, x2, y2], such as [[10, 20, 110, 220]], not {shown:.100}"
    )


def _absolute(folder: str, path: str) -> str:
    if is_url(path) or os.path.isabs(path):
        return path
    if is_url(folder):
        scheme, _, rest = folder.partition("://")
        return f"{scheme}://{posixpath.normpath(posixpath.join(rest, path))}"
    return os.path.normpath(os.path.join(folder, path))
