"""Runs from and to buckets, beside the same run on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import s3fs
from safetensors import safe_open

from fxcore.errors import FxError
from service.offline import extract
from service.offline.inputs.reader import Reader
from service.offline.inputs.sources import find
from tests.service.offline.conftest import SETTINGS, archive, errors, job, png, rows


@pytest.fixture
def fs(bucket: str) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(use_listings_cache=False)


@pytest.fixture
def photos(bucket: str, fs: s3fs.S3FileSystem, tmp_path: Path) -> str:
    """Images and archives under a URL."""
    for number in range(6):
        fs.pipe_file(f"{bucket}/photos/{'deep/' * (number % 2)}{number}.png", png(number))
    for name, mode in (("a.tar", "w"), ("b.tar.gz", "w:gz")):
        packed = archive(tmp_path / name, {"in/6.png": png(6)}, mode)
        fs.pipe_file(f"{bucket}/photos/{name}", packed.read_bytes())
    fs.pipe_file(f"{bucket}/photos/broken.png", png(0)[:500])
    fs.pipe_file(f"{bucket}/photos/notes.txt", b"no image")
    return f"{bucket}/photos"


@pytest.mark.exhaustive
def test_a_run_between_buckets_gives_what_one_on_the_disk_does(
    bucket: str, photos: str, fs: s3fs.S3FileSystem, folder: Callable[..., Path], tmp_path: Path
) -> None:
    extract(job(tmp_path / "out", folder(7)), SETTINGS)
    right = {int(Path(path).stem): features for path, features in rows(tmp_path / "out").items()}
    made = extract(job(f"{bucket}/out", photos), SETTINGS)
    assert (made.images, made.done, made.unreadable) == (9, 8, 1)
    fs.get(f"{bucket}/out", str(tmp_path / "copy"), recursive=True)
    found = rows(tmp_path / "copy")
    assert sorted(found) == sorted(
        [f"{photos}/{'deep/' * (number % 2)}{number}.png" for number in range(6)]
        + [f"{photos}/a.tar/in/6.png", f"{photos}/b.tar.gz/in/6.png"]
    )
    for path, features in found.items():
        for key, values in features.items():
            np.testing.assert_allclose(values, right[int(Path(path).stem)][key], rtol=1e-4, atol=1e-5)
    assert list(errors(tmp_path / "copy")) == [f"{photos}/broken.png"]


@pytest.mark.exhaustive
def test_a_run_into_a_bucket_goes_on(bucket: str, photos: str, fs: s3fs.S3FileSystem, tmp_path: Path) -> None:
    out = f"{bucket}/resumed"
    extract(job(out, f"{photos}/*.png"), SETTINGS)
    fs.get(out, str(tmp_path / "first"), recursive=True)
    fs.pipe_file(f"{out}/shard-000007.safetensors", b"of a run that was killed before its index was there")
    made = extract(job(out, photos), SETTINGS)
    assert (made.done, made.unreadable) == (8, 1)
    fs.get(out, str(tmp_path / "then"), recursive=True)
    found = rows(tmp_path / "then")
    assert rows(tmp_path / "first").keys() < found.keys()
    assert len(found) == 8


def test_an_empty_member_of_an_archive_reads_none_of_it(bucket: str, fs: s3fs.S3FileSystem, tmp_path: Path) -> None:
    """HTTP has no empty range: servers send the whole archive for one."""
    packed = archive(tmp_path / "a.tar", {"empty.png": b"", "1.png": png(1)})
    fs.pipe_file(f"{bucket}/empty/a.tar", packed.read_bytes())
    made = extract(job(tmp_path / "out", f"{bucket}/empty/a.tar"), SETTINGS)
    assert (made.done, made.unreadable) == (1, 1)
    assert errors(tmp_path / "out") == {f"{bucket}/empty/a.tar/empty.png": "the image is empty (0 bytes)"}


def test_names_that_look_like_patterns(bucket: str, fs: s3fs.S3FileSystem) -> None:
    names = ["rome [2021]/0.png", "where?/1.png", "plain/[2].png", "app::Cat/3::b.png"]
    for name in names:
        fs.pipe_file(f"{bucket}/named/{name}", png(0))
    for asked, name in zip(["rome [2021]", "where?/", "plain/[2].png", "app::Cat"], names, strict=True):
        [source] = find([f"{bucket}/named/{asked}"])
        assert source.path == f"{bucket}/named/{name}"
        assert Reader(10**6).read(source) == png(0)
    with pytest.raises(FxError, match=r"named/rome\*: no images there"):  # it matches a folder only
        list(find([f"{bucket}/named/rome*"]))


def test_boxes_lie_beside_the_images(photos: str, fs: s3fs.S3FileSystem, tmp_path: Path) -> None:
    lines = b'path,boxes\na.tar/in/6.png,"[[20,10,60,50]]"\n./deep/1.png,"[[20,10,60,50],[0,0,40,64]]"\n'
    fs.pipe_file(f"{photos}/boxes.csv", lines)
    spec = {"return_nodes": {"features.5": "mid"}}
    asked = job(tmp_path / "out", photos, pool="roi", regions=f"{photos}/boxes.csv", spec=spec, roi_size=1)
    assert extract(asked, SETTINGS).done == 2
    [shard] = (tmp_path / "out").glob("shard-*.safetensors")
    with safe_open(shard, "np") as opened:
        assert json.loads(opened.metadata()["path"]) == [f"{photos}/a.tar/in/6.png", *[f"{photos}/deep/1.png"] * 2]
        assert opened.get_tensor("box").tolist() == [[20, 10, 60, 50], [20, 10, 60, 50], [0, 0, 40, 64]]


def test_an_unreachable_server_is_a_one_line_error(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(FxError, match=r"s3://nobodys/photos: .*bucket does not exist|s3://nobodys/photos: no images"):
        extract(job(tmp_path / "out", "s3://nobodys/photos"), SETTINGS)
    with pytest.raises(FxError, match=r"gs://photos/: .*gcsfs.*pip install"):
        extract(job(tmp_path / "out", "gs://photos/"), SETTINGS)
    with pytest.raises(FxError, match=r"nothing://here/: .*nothing"):
        extract(job("nothing://here/", tmp_path), SETTINGS)
    with pytest.raises(FxError, match="s3://nobodys/out"):
        extract(job("s3://nobodys/out", f"{bucket}/photos"), SETTINGS)
