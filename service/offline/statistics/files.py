"""The files of statistics: ``stats.safetensors`` and ``top.parquet``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fxcore.errors import FxError
from service.codecs.tensors import safetensors
from service.offline.atomic import write_whole
from service.offline.outputs.spec_file import SpecFile
from service.offline.statistics.statistics import Statistics

STATISTICS = "stats.safetensors"
TOP = "top.parquet"


def check_installed(reduce: str) -> None:
    """Check that the packages required for the files are installed.

    Raises:
        FxError: pyarrow is not installed.
    """
    if "top" in reduce:
        try:
            importlib.import_module("pyarrow")
        except ImportError as error:
            raise FxError(
                "--reduce top needs pyarrow, which is not installed: pip install 'fxserve[offline]'"
            ) from error


def write_statistics(folder: Path, statistics: Statistics, spec: SpecFile, images: int) -> None:
    """Write the files atomically. A file without content is not written.

    Args:
        folder: the folder to write to.
        statistics: statistics of at least one image.
        spec: describes them.
        images: number of images.

    Raises:
        OSError: they cannot be written.
    """
    assert spec.reduce is not None
    about = {**spec.metadata(), "reduce": spec.reduce, "images": str(images)}
    tensors = _tensors(statistics, spec.reduce.split(","))
    if tensors:
        write_whole(folder / STATISTICS, lambda file: _write_safetensors(file, tensors, about))
    if "top" in spec.reduce:
        write_whole(folder / TOP, lambda file: _write_parquet(file, statistics, spec, about))


def _tensors(statistics: Statistics, names: Sequence[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, one in statistics.outputs.items():
        if (moments := one.moments) is not None:
            tensors[f"{key}.count"] = torch.tensor(moments.count)
            tensors[f"{key}.mean"] = moments.mean
            if "std" in names:
                tensors[f"{key}.std"] = moments.std()
            if "cov" in names:
                tensors[f"{key}.cov"] = moments.cov()
    return tensors


def _write_safetensors(file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    with file.open("wb") as stream:
        stream.writelines(safetensors.write(tensors, about))


def _write_parquet(file: Path, statistics: Statistics, spec: SpecFile, about: Mapping[str, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        {
            "output": pyarrow.string(),
            "node": pyarrow.string(),
            "channel": pyarrow.int32(),
            "rank": pyarrow.int32(),
            "path": pyarrow.string(),
            "value": pyarrow.float64(),
            "place": pyarrow.list_(pyarrow.int32()),
        }
    ).with_metadata(dict(about))
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for output in spec.outputs:
            largest = statistics.outputs[output["key"]].largest
            names = {"output": output["key"], "node": output["node"]}
            rows = [] if largest is None else [{**names, **entry._asdict()} for entry in largest]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
