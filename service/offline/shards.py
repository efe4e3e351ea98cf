"""Shards: files of features, in four formats, each of which appears whole or not at all."""

from __future__ import annotations

import importlib
import os
import shutil
import sqlite3
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from fxcore.errors import FxError
from service.codecs import npy, safetensors

PATH = "path"
"""The name that the paths of a shard's images have beside the outputs."""

BOX = "box"
"""The name that the boxes of its rows have there, where rows are boxes and not images."""

UNFINISHED = ".part"
"""The end of the name of a file that is being written."""


class ShardFormat(ABC):
    """A way to write rows of features down.

    Attributes:
        suffix: of the files.
        library: what has to be installed beside the service, if anything.
        bfloat16: whether it can hold that dtype, which NumPy does not have.
    """

    suffix: str
    library: str | None = None
    bfloat16 = False

    @abstractmethod
    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], about: Mapping[str, str]) -> None:
        """Write ``rows`` (key → ``[n, ...]``), the ``n`` paths that they are of, and a few words about all of them."""


class Safetensors(ShardFormat):
    """Paths are a JSON list in the metadata."""

    suffix = ".safetensors"
    bfloat16 = True

    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], about: Mapping[str, str]) -> None:
        with file.open("wb") as stream:
            stream.writelines(safetensors.write(rows, {**about, PATH: orjson.dumps(list(paths)).decode()}))


class Npz(ShardFormat):
    """Paths are an array of strings; ``numpy.savez`` itself takes no key called ``file``."""

    suffix = ".npz"

    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], about: Mapping[str, str]) -> None:
        arrays = {PATH: np.array(paths, dtype=np.str_), **{key: values.numpy() for key, values in rows.items()}}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for key, array in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)


class Parquet(ShardFormat):
    """A column of paths and one of each output: numbers, or tensors of a fixed shape (lists, to readers other than
    Arrow)."""

    suffix = ".parquet"
    library = "pyarrow"

    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], about: Mapping[str, str]) -> None:
        import pyarrow
        import pyarrow.parquet

        columns: dict[str, Any] = {PATH: pyarrow.array(paths, pyarrow.string())}
        for key, values in rows.items():
            columns[key] = arrow_column(values)
        table = pyarrow.table(columns).replace_schema_metadata(dict(about))
        # Floating numbers hardly ever repeat: dictionaries and compression would cost time and save nothing.
        pyarrow.parquet.write_table(table, file, compression="none", use_dictionary=[PATH])


def arrow_column(values: Tensor) -> Any:
    """``[n, ...]`` as a column of ``n`` numbers, or of tensors of a fixed shape."""
    import pyarrow

    if values.dtype is torch.bool:  # Arrow's booleans are bits
        values = values.to(torch.uint8)
    if values.ndim == 1:
        return pyarrow.array(values.numpy())
    return pyarrow.FixedShapeTensorArray.from_numpy_ndarray(values.numpy())


class Zarr(ShardFormat):
    """A group with an array of each output; paths are in its attributes."""

    suffix = ".zarr"
    library = "zarr"

    def write(self, file: Path, rows: Mapping[str, Tensor], paths: Sequence[str], about: Mapping[str, str]) -> None:
        import zarr

        group = zarr.open_group(str(file), mode="w")
        group.attrs.update({**about, PATH: list(paths)})
        for key, values in rows.items():
            group.create_array(key, data=values.numpy(), compressors=None)


FORMATS: dict[str, ShardFormat] = {
    "safetensors": Safetensors(),
    "npz": Npz(),
    "parquet": Parquet(),
    "zarr": Zarr(),
}


def shard_format(name: str, keys: Sequence[str], dtypes: Sequence[torch.dtype]) -> ShardFormat:
    """The format called ``name``.

    Raises:
        FxError: its library is not installed, or it cannot hold these outputs.
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
        raise FxError(f"an output cannot be called {PATH!r}, which is where a shard keeps its images' paths")
    if not chosen.bfloat16 and not all(map(npy.has_numpy_dtype, dtypes)):
        raise FxError(
            f"--format {name} has no bfloat16; write safetensors, or use --dtype float32 or --precision float16"
        )
    return chosen


def write_shard(
    chosen: ShardFormat, target: Path, rows: Mapping[str, Tensor], paths: Sequence[str], about: Mapping[str, str]
) -> None:
    """Write a shard to the disk; ``target`` appears when it is whole and would survive the power going out.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = target.with_name(target.name + UNFINISHED)
    remove(unfinished)
    try:
        chosen.write(unfinished, rows, paths, about)
        for part in sorted(unfinished.rglob("*")) if unfinished.is_dir() else ():
            _synchronise(part)
        _synchronise(unfinished)
        os.replace(unfinished, target)
        _synchronise(target.parent)
    finally:
        remove(unfinished)


def write_text(target: Path, text: str) -> None:
    """Write a small file so that it is there as a whole or not at all."""
    unfinished = target.with_name(target.name + UNFINISHED)
    try:
        unfinished.write_text(text, encoding="utf-8")
        _synchronise(unfinished)
        os.replace(unfinished, target)
        _synchronise(target.parent)
    finally:
        remove(unfinished)


@contextmanager
def writing(folder: object) -> Iterator[None]:
    """Turn errors of writing into ones that name ``folder``; the system's own may be no more than a number.

    Raises:
        FxError: it cannot be written.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise FxError(f"{folder} cannot be written: {said}") from error


def remove_all_but(folder: Path, suffix: str, kept: Sequence[str]) -> None:
    """Remove shards that were begun and never entered in the index."""
    for file in folder.glob(f"shard-*{suffix}*"):
        if file.name not in kept:
            remove(file)


def shard_name(number: int, suffix: str) -> str:
    """``shard-000012.npz``."""
    return f"shard-{number:06d}{suffix}"


def remove(file: Path) -> None:
    """Remove a file, or a folder with all in it, if it is there."""
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def _synchronise(file: Path) -> None:
    """Flush to the disk what was written to ``file``, or the names that are in a folder."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not file.is_dir():  # some file systems cannot do it for folders
            raise
    finally:
        os.close(handle)
