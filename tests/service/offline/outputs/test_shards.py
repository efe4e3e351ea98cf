"""Shards are read back with the libraries that their formats are of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fxcore.errors import FxError
from service.offline.atomic import write_whole
from service.offline.folder import Folder
from service.offline.inputs.sources import Source
from service.offline.outputs.shards import FORMATS, shard_format
from service.offline.outputs.working_folder import WorkingFolder

ROWS = {
    "map": torch.arange(24, dtype=torch.float32).reshape(2, 3, 2, 2) / 7,
    "vector": torch.tensor([[1.5, -2.0], [0.0, 65504.0]], dtype=torch.float16),
    "file": torch.tensor([7, -9]),
    "mask": torch.tensor([[True, False], [False, True]]),
    "a.b/c": torch.zeros(2, 1),
}
PATHS = ["/photos/a.jpg", "/photos/größe 2.jpg"]
ABOUT = {"model": "resnet18", "nodes": '{"map": "layer1"}'}


def write(name: str, folder: Path) -> Path:
    target = folder / f"shard-000000{FORMATS[name].suffix}"
    shard_format(name, list(ROWS), [v.dtype for v in ROWS.values()]).write(target, ROWS, PATHS, ABOUT)
    return target


def assert_same(arrays: dict[str, Any]) -> None:
    assert sorted(arrays) == sorted(ROWS)
    for key, values in ROWS.items():
        np.testing.assert_array_equal(arrays[key], values.numpy(), err_msg=key)
        assert arrays[key].dtype == values.numpy().dtype or key == "mask"  # Arrow's booleans come back as bytes


def test_safetensors(tmp_path: Path) -> None:
    with safe_open(write("safetensors", tmp_path), "np") as file:
        assert_same({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        assert {**file.metadata(), "path": json.loads(file.metadata()["path"])} == {**ABOUT, "path": PATHS}


def test_npz(tmp_path: Path) -> None:
    archive = dict(np.load(write("npz", tmp_path)))
    assert archive.pop("path").tolist() == PATHS
    assert_same(archive)


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(write("parquet", tmp_path))
    assert table.column("path").to_pylist() == PATHS
    assert {key.decode(): value.decode() for key, value in table.schema.metadata.items()} == ABOUT
    arrays = {}
    for key in ROWS:
        column = table.column(key).combine_chunks()
        arrays[key] = column.to_numpy_ndarray() if ROWS[key].ndim > 1 else column.to_numpy()
    assert_same(arrays)


def test_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(write("zarr", tmp_path)), mode="r")
    assert dict(group.attrs) == {**ABOUT, "path": PATHS}
    assert_same({key: group[key][:] for key in ROWS})


def test_a_format_whose_library_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)  # what the import system does with a module that is not there
    with pytest.raises(FxError, match=r"needs zarr, which is not installed: pip install 'fxserve\[offline\]'"):
        shard_format("zarr", ["C5"], [torch.float32])


def test_unsupported_dtypes_of_a_format_are_refused_before_any_compute() -> None:
    for name in ("npz", "parquet", "zarr"):
        with pytest.raises(FxError, match="has no bfloat16"):
            shard_format(name, ["C5"], [torch.float32, torch.bfloat16])
    shard_format("safetensors", ["C5"], [torch.bfloat16])
    with pytest.raises(FxError, match="an output cannot be named 'path'"):
        shard_format("safetensors", ["path"], [torch.float32])


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    no_memory = {"a": torch.zeros(1), "b": torch.zeros(1).to_sparse()}
    for chosen in FORMATS.values():
        with pytest.raises((RuntimeError, TypeError)):
            write_whole(
                tmp_path / f"shard{chosen.suffix}", lambda file, write=chosen.write: write(file, no_memory, ["x"], {})
            )
    assert not list(tmp_path.iterdir())


def test_shards_that_do_not_count_are_removed(tmp_path: Path) -> None:
    kept = write("zarr", tmp_path)
    (tmp_path / "shard-000001.zarr/C5").mkdir(parents=True)
    (tmp_path / "shard-000002.zarr.part").mkdir()
    (tmp_path / "shard-1000000.zarr").mkdir()
    others = ["shard-000000.zarr.bak", "shard-000002.npz", "shard-000003.zarr.sha256", "shard-mine.zarr"]
    for name in others:
        (tmp_path / name).touch()
    folder = WorkingFolder(Folder(tmp_path))
    folder.index.add([Source("a", "a")])
    folder.index.commit(kept.name, ["a"], [])
    folder.match_shards(".zarr")
    folder.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index.sqlite", kept.name, *others]


@pytest.mark.parametrize("keys", [["a/../b"], [".."], ["a", "a/b"], ["a//b"]])
def test_keys_that_zarr_takes_for_folders_are_refused(keys: list[str]) -> None:
    pytest.importorskip("zarr")
    with pytest.raises(FxError, match="--format zarr takes"):
        shard_format("zarr", keys, [torch.float32] * len(keys))
    shard_format("npz", keys, [torch.float32] * len(keys))
