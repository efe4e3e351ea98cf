"""Boxes, points or masks of images from a Parquet or CSV file.

The file has the column ``path`` and at least one of ``boxes``, ``points`` and ``masks``; a run reads one of these.
Paths are absolute, URLs, or relative to the folder of the file; members of archives are ``ARCHIVE/NAME``. Regions are
lists as in JSON bodies, encoded as JSON in CSV files; in Parquet files, PNG masks may be binary. An image may have
several rows.
"""

from __future__ import annotations

import base64
import csv
import io
import math
import os
import posixpath
from collections.abc import Iterator
from typing import Any

import orjson

from fxcore.errors import FxError
from service.choices import RegionPooling
from service.codecs.requests import regions as body_regions
from service.offline.failures import driver_errors
from service.offline.folder import is_url
from service.offline.inputs.sources import Regions, open_binary
from service.problems import Problem
from service.schemas.regions import KINDS

PATH = "path"

_MAX_FIELD = 2**31 - 1
"""Maximum characters of a field of a CSV file: masks are longer than Python's limit."""

_EXAMPLES = {"boxes": "[[10, 20, 110, 220]]", "points": "[[10, 20]]", "masks": '["<base64 PNG>"]'}


def read(file: str, pool: RegionPooling) -> Iterator[tuple[str, Regions]]:
    """Yield (path, regions) of each row that has regions, without reading the whole file into memory.

    Args:
        file: a path or a URL that ends in ``.parquet`` or ``.csv``.
        pool: the pooling of the regions.

    Raises:
        FxError: it cannot be read, lacks a column, or has an invalid row.
    """
    folder = posixpath.dirname(file) if is_url(file) else os.path.dirname(os.path.abspath(file))
    kind = os.path.splitext(file)[1].lower()
    if kind not in (".parquet", ".csv"):
        raise FxError(f"{file}: {KINDS[pool].field} must be in a .parquet or .csv file")
    column = KINDS[pool].field
    rows = _parquet(file, column) if kind == ".parquet" else _csv(file, column)
    for number, (path, given) in enumerate(rows, 1):
        if not isinstance(path, str) or not path:
            raise FxError(f"{file}, row {number}: {PATH} must be the path of an image, not {path!r:.100}")
        if given is not None and given != []:
            yield _absolute(folder, path), _checked(given, pool, f"{file}, row {number}")


def _parquet(file: str, column: str) -> Iterator[tuple[Any, Any]]:
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
        _check_columns(file, table.schema_arrow.names, column)
        for batch in table.iter_batches(columns=[PATH, column]):
            columns = batch.to_pydict()
            yield from zip(columns[PATH], columns[column], strict=True)


def _csv(file: str, column: str) -> Iterator[tuple[Any, Any]]:
    with driver_errors(file), open_binary(file) as stream:
        csv.field_size_limit(_MAX_FIELD)
        rows = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""))
        try:
            _check_columns(file, rows.fieldnames or (), column)
            for number, row in enumerate(rows, 1):
                text = (row[column] or "").strip()
                try:
                    yield row[PATH], orjson.loads(text) if text else None
                except orjson.JSONDecodeError as error:
                    raise _wrong(f"{file}, row {number}", column, text) from error
        except (csv.Error, UnicodeDecodeError) as error:
            raise FxError(f"{file}, line {rows.line_num}: {error}") from error


def _check_columns(file: str, found: Any, column: str) -> None:
    if not {PATH, column} <= set(found):
        have = ", ".join(map(str, found)) or "none"
        raise FxError(f"{file} has the columns {have}; it needs the columns {PATH} and {column}")


def _checked(given: Any, pool: RegionPooling, place: str) -> Regions:
    """Validate the regions of a row and return them in JSON form.

    Raises:
        FxError: they are invalid.
    """
    listed = given if isinstance(given, list) else [given]
    if pool == "mask":
        listed = [_mask(one) for one in listed]
        try:
            body_regions.given(pool, [listed])
        except Problem as error:
            raise FxError(f"{place}: {error.detail.removeprefix('image 0: ')}") from error
        return listed
    numbers = 4 if pool == "roi" else 2
    for one in listed:
        right = isinstance(one, list) and len(one) == numbers and all(type(n) in (int, float) for n in one)
        if not right or not all(map(math.isfinite, one)):
            raise _wrong(place, KINDS[pool].field, given)
    return [[float(value) for value in one] for one in listed]


def _mask(mask: Any) -> Any:
    if isinstance(mask, bytes):
        return base64.b64encode(mask).decode()
    if isinstance(mask, dict) and isinstance(mask.get("counts"), bytes):  # pycocotools returns bytes
        return {**mask, "counts": mask["counts"].decode("ascii", "replace")}
    return mask


def _wrong(place: str, column: str, given: object) -> FxError:
    shown = given if isinstance(given, str) else orjson.dumps(given, default=str).decode()
    form = next(kind.form for kind in KINDS.values() if kind.field == column)
    return FxError(f"{place}: {column} must be a list of {form}, such as {_EXAMPLES[column]}, not {shown:.100}")


def _absolute(folder: str, path: str) -> str:
    if is_url(path):
        return path
    if is_url(folder) and not os.path.isabs(path):
        scheme, _, rest = folder.partition("://")
        return f"{scheme}://{posixpath.normpath(posixpath.join(rest, path))}"
    return os.path.normpath(os.path.join(folder, path))
