"""Small images, all different, and jobs over them."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import skimage.data
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from service.engine import FeatureOptions
from service.offline import Job
from service.schemas.specs import ExtractorSpec
from service.settings import Settings
from tests.hostile_images import saved
from tests.service.engine.extractors.conftest import bucket

__all__ = ["bucket"]

SETTINGS = Settings(device="cpu", lowering=False, compute_threads=1)


def png(number: int) -> bytes:
    """Encode a piece of a photograph that is different for each number."""
    top, left = divmod(number, 20)
    piece = skimage.data.coffee()[8 * top : 8 * top + 64, 16 * left : 16 * left + 80]
    return saved(PIL.Image.fromarray(piece), "PNG")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder of images: ``folder(8)`` has the images 0 to 7, some of them in subfolders."""

    def make(count: int) -> Path:
        root = tmp_path / "photos"
        for number in range(count):
            file = root / ("deep/er" if number % 3 == 0 else ".") / f"{number:03d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png(number))
        return root

    return make


def numbered(root: Path) -> dict[str, int]:
    """Return the number of each image of such a folder by its path."""
    return {str(file): int(file.stem) for file in root.rglob("[0-9]*.png")}


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", link: str = "", kind: bytes = tarfile.LNKTYPE) -> None:
    """Add a file to an archive, or a link of that kind."""
    member = tarfile.TarInfo(name)
    if link:
        member.type, member.linkname = kind, link
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def archive(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    """Write an archive of files."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            add(tar, name, data)
    return path


EXTRACT = "--model squeezenet1_1 --nodes features.5:mid,features.12:top --weights random --pool avg --device cpu"
"""The options of ``fxserve extract`` for what :func:`job` computes."""


def job(out: Path | str, *inputs: Path | str, **changed: Any) -> Job:
    """Return a job for pooled features of squeezenet with random weights, four rows per shard."""
    options = FeatureOptions(
        pool=changed.pop("pool", "avg"),
        preprocess=changed.pop("preprocess", "default"),
        roi_size=changed.pop("roi_size", 7),
    )
    spec = {"model": "squeezenet1_1", "weights": "random", "return_nodes": {"features.5": "mid", "features.12": "top"}}
    spec |= changed.pop("spec", {})
    fields: dict[str, Any] = {"format": "safetensors", "shard_rows": 4, **changed}
    return Job(tuple(map(str, inputs)), out, spec=ExtractorSpec(**spec), options=options, **fields)


def regions(out: Path | str, file: Path | str, *inputs: Path | str, pool: str = "roi", **changed: Any) -> Job:
    """Return a job for resnet18's C4 and C5 of regions, four to a shard."""
    spec = {"model": "resnet18", "return_nodes": {"C4": "C4", "C5": "C5"}}
    return job(out, *inputs, pool=pool, regions=str(file), spec=spec, **changed)


def csv(file: Path, lines: dict[str, Any], column: str = "boxes") -> Path:
    """Write a file of the regions of each path, with another column."""
    values = {path: json.dumps(value).replace('"', '""') for path, value in lines.items()}
    quoted = (f'{path},"{value}",cat\n' for path, value in values.items())
    file.write_text(f"path,{column},label\n" + "".join(quoted))
    return file


Regions = dict[str, list[tuple[Any, dict[str, NDArray[Any]]]]]
"""Path → region and features of each of its rows."""


def regions_in(out: Path, column: str = "box") -> Regions:
    """Return the regions and features of all shards."""
    found: Regions = {}
    for file in sorted(out.glob("shard-*.safetensors")):
        with safe_open(file, "np") as shard:
            arrays = {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118
            paths = json.loads(shard.metadata()["path"])
        given = arrays.pop(column)
        assert given.dtype == (np.int64 if column == "mask" else np.float64)
        for row, path in enumerate(paths):
            found.setdefault(path, []).append((given[row].tolist(), {k: v[row] for k, v in arrays.items()}))
    return found


def errors(out: Path) -> dict[str, str]:
    """Return why images could not be read, by path."""
    return {line["path"]: line["error"] for line in map(json.loads, (out / "errors.jsonl").read_text().splitlines())}


def shards(out: Path) -> dict[str, bytes]:
    """Return the shards by name."""
    return {file.name: file.read_bytes() for file in out.glob("shard-*.safetensors")}


def places(out: Path) -> dict[str, tuple[str, int]]:
    """Return shard and first row by path, from the index."""
    with sqlite3.connect(f"file:{out}/index.sqlite?mode=ro", uri=True) as database:
        found = database.execute('SELECT path, shard, "row" FROM images WHERE shard IS NOT NULL').fetchall()
    return {path: (shard, row) for path, shard, row in found}


def rows(out: Path) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the features by path, from the places given by the index."""
    tensors = {file.name: load_file(file) for file in out.glob("shard-*.safetensors")}
    found = places(out)
    assert sum(len(shard["top"]) for shard in tensors.values()) == len(found)  # every row has a path
    return {path: {key: values[row] for key, values in tensors[shard].items()} for path, (shard, row) in found.items()}


def assert_right(
    found: dict[str, dict[str, NDArray[Any]]], numbers: dict[str, int], reference: Callable[..., Any]
) -> None:
    """Assert that exactly the paths of ``numbers`` were found, with torchvision's values for the images."""
    assert sorted(found) == sorted(numbers)
    images = [png(number) for number in numbers.values()]
    for key, node in (("mid", "features.5"), ("top", "features.12.cat")):
        right = reference("squeezenet1_1", node, images).mean((2, 3)).numpy()
        for path, expected in zip(numbers, right, strict=True):
            np.testing.assert_allclose(found[path][key], expected, rtol=1e-3, atol=1e-4, err_msg=path)
