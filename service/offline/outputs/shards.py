"""Shards: feature files in four formats, written atomically."""

from __future__ import annotations

import importlib
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from fxcore.errors import FxError
from service.codecs.tensors import npy, safetensors
from service.offline.atomic import write_whole

PATH = "path"
"""Key of the image paths in a shard, next to the outputs."""


class ShardFormat(ABC):
    """A file format for rows of features.

    Attributes:
        suffix: suffix of its files.
        library: the optional package it needs, if any.
        bfloat16: whether it supports bfloat16, which NumPy lacks.
    """

    suffix: str
    library: str | None = None
    bfloat16 = False

    @abstractmethod
    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]) -> None:
        """Write ``rows`` (key → ``[n, ...]``), the paths of their ``n`` images, and metadata."""


class Safetensors(ShardFormat):
    """Paths are a JSON list in the metadata."""

    suffix = ".safetensors"
    bfloat16 = True

    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]) -> None:
        with file.open("wb") as stream:
            stream.writelines(safetensors.write(rows, {**metadata, PATH: orjson.dumps(list(paths)).decode()}))


class Npz(ShardFormat):
    """Paths are an array of strings. ``numpy.savez`` is not used because it does not accept a key called ``file``."""

    suffix = ".npz"

    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]) -> None:
        arrays = {PATH: np.array(paths, dtype=np.str_), **{key: values.numpy() for key, values in rows.items()}}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for key, array in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)


class Parquet(ShardFormat):
    """A column of paths and one per output, of numbers or of tensors of fixed shape.

    Readers other than Arrow see such tensors as lists.
    """

    suffix = ".parquet"
    library = "pyarrow"

    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]) -> None:
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


class Zarr(ShardFormat):
    """A group with an array per output; paths are in its attributes."""

    suffix = ".zarr"
    library = "zarr"

    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]) -> None:
        import zarr

        group = zarr.open_group(str(file), mode="w")
        group.attrs.update({**metadata, PATH: list(paths)})
        for key, values in rows.items():
            group.create_array(key, data=values.numpy(), compressors=None)


FORMATS: dict[str, ShardFormat] = {
    "safetensors": Safetensors(),
    "npz": Npz(),
    "parquet": Parquet(),
    "zarr": Zarr(),
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


def write_shard(
    chosen: ShardFormat, target: Path, rows: Mapping[str, Tensor], paths: Sequence[str], metadata: Mapping[str, str]
) -> None:
    """Write a shard atomically; see :func:`write_whole`.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(target, lambda file: chosen.write(file, rows, paths, metadata))


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
