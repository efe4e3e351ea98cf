"""Shards: feature files in four formats."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import torch
from torch import Tensor

from fxcore.errors import FxError
from service.codecs.tensors import npy, safetensors

PATH = "path"
"""Key of the image paths in a shard, next to the outputs."""


Write = Callable[[Path, Mapping[str, Tensor], Sequence[str], Mapping[str, str]], None]
"""Writes to a file: rows, key → ``[n, ...]``; the paths of their ``n`` images; and metadata."""


class ShardFormat(NamedTuple):
    """A file format for rows of features.

    Attributes:
        suffix: suffix of its files.
        write: writes a file.
        library: the optional package it needs, if any.
        bfloat16: whether it supports bfloat16, which NumPy lacks.
    """

    suffix: str
    write: Write
    library: str | None = None
    bfloat16: bool = False


def _safetensors(file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]) -> None:
    """Paths are a JSON list in the metadata."""
    with file.open("wb") as stream:
        stream.writelines(safetensors.write(rows, {**metadata, PATH: orjson.dumps(list(paths)).decode()}))


def _npz(file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]) -> None:
    """Paths are an array of strings; there is no metadata."""
    names = io.BytesIO()
    np.lib.format.write_array(names, np.array(paths, dtype=np.str_), allow_pickle=False)
    npy.write_archive(file, {PATH: [names.getbuffer()], **{key: npy.write(values) for key, values in rows.items()}})


def _parquet(file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]) -> None:
    """A column of paths and one per output, of numbers or of tensors of fixed shape.

    Readers other than Arrow see such tensors as lists.
    """
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = {PATH: pyarrow.array(paths, pyarrow.string())}
    for key, values in rows.items():
        columns[key] = arrow_column(values)
    table = pyarrow.table(columns).replace_schema_metadata(dict(metadata))
    # Floating-point values rarely repeat: dictionaries and compression would take time and save nothing.
    pyarrow.parquet.write_table(table, file, compression="none", use_dictionary=[PATH])


def arrow_column(values: Tensor) -> Any:
    """Convert ``[n, ...]`` to a column of ``n`` numbers or of ``n`` tensors of fixed shape."""
    import pyarrow

    if values.dtype is torch.bool:  # Arrow packs booleans into bits
        values = values.to(torch.uint8)
    if values.ndim == 1:
        return pyarrow.array(values.numpy())
    return pyarrow.FixedShapeTensorArray.from_numpy_ndarray(values.numpy())


def _zarr(file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]) -> None:
    """A group with an array per output; paths are in its attributes."""
    import zarr

    group = zarr.open_group(str(file), mode="w")
    group.attrs.update({**metadata, PATH: list(paths)})
    for key, values in rows.items():
        group.create_array(key, data=values.numpy(), compressors=None)


FORMATS: dict[str, ShardFormat] = {
    "safetensors": ShardFormat(".safetensors", _safetensors, bfloat16=True),
    "npz": ShardFormat(".npz", _npz),
    "parquet": ShardFormat(".parquet", _parquet, library="pyarrow"),
    "zarr": ShardFormat(".zarr", _zarr, library="zarr"),
}


def shard_format(name: str, keys: Sequence[str], dtypes: Sequence[torch.dtype]) -> ShardFormat:
    """Look up the format ``name`` and check that it can hold the outputs.

    Raises:
        FxError: its package is not installed, or it does not support a key or a dtype.
    """
    chosen = FORMATS[name]
    if chosen.library is not None:
        try:
            importlib.import_module(chosen.library)
        except ImportError as error:
            raise FxError(
                f"--format {name} needs {chosen.library}, which is not installed: pip install 'fxserve[offline]'"
            ) from error
    if PATH in keys:
        raise FxError(f"an output cannot be named {PATH!r}, which is the column of paths")
    if not chosen.bfloat16 and not all(map(npy.has_numpy_dtype, dtypes)):
        raise FxError(
            f"--format {name} has no bfloat16; use --format safetensors, --dtype float32 or --precision float16"
        )
    if name == "zarr":
        for key in keys:
            if not {"", ".", ".."}.isdisjoint(key.split("/")) or any(other.startswith(f"{key}/") for other in keys):
                raise FxError(
                    f"--format zarr takes {key!r} for a folder; give that output another name, or use another format"
                )
    return chosen


def shard_name(number: int, suffix: str) -> str:
    """Return the file name of a shard, such as ``shard-000012.npz``."""
    return f"shard-{number:06d}{suffix}"


def is_shard(name: str, suffix: str) -> bool:
    """Return whether ``name`` is one of :func:`shard_name`.

    >>> is_shard("shard-000012.npz", ".npz"), is_shard("shard-000012.npz.sha256", ".npz")
    (True, False)
    """
    return re.fullmatch(rf"shard-\d{{6,}}{re.escape(suffix)}", name) is not None


def shard_number(name: str) -> int:
    """Return the number in the file name of a shard.

    >>> shard_number("shard-000012.npz")
    12
    """
    return int(name.removeprefix("shard-").partition(".")[0])
