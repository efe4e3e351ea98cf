"""The images with the largest values of a channel, of the folder that the server is given."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from fxcore.errors import FxError
from service.app import create_app
from service.engine import FeatureOptions
from service.offline import Job, extract
from service.schemas.specs import ExtractorSpec
from service.settings import Settings
from tests.service.conftest import Client
from tests.wire import refused

parquet = pytest.importorskip("pyarrow.parquet")

AT = "/v1/models/squeezenet1_1/statistics"


@pytest.fixture(scope="module")
def folder(photos: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of photographs, of which one is in an archive."""
    root = tmp_path_factory.mktemp("photos")
    for name, data in photos.items():
        (root / f"{name}.jpg").write_bytes(data)
    with tarfile.open(root / "more.tar", "w") as archive:
        archive.add(root / "coffee.jpg", "in/coffee.jpg")
    (root / "coffee.jpg").unlink()
    spec = ExtractorSpec(model="squeezenet1_1", weights="random", return_nodes={"features.4": "mid"})
    job = Job((str(root),), root / "out", "safetensors", spec, FeatureOptions(), reduce="mean,top:3")
    extract(job, Settings(device="cpu", lowering=False))
    return root / "out"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Client]:
    client = Client(device="cpu", statistics=folder)
    yield client
    client.close()


@pytest.mark.exhaustive
def test_the_largest_of_a_channel_are_listed_and_shown(server: Client, folder: Path, photos: dict[str, bytes]) -> None:
    rows = [row for row in parquet.read_table(folder / "top.parquet").to_pylist() if row["channel"] == 70]
    answers = [server.get(AT, params={"node": node, "channel": 70}) for node in ("features.4.cat", "mid")]
    assert answers[0].content == answers[1].content
    found = answers[0].json()
    assert (found["node"], found["channels"], found["weights"], found["images"]) == (
        *("features.4.cat", 128, "random", len(photos)),
    )
    names = [(one["rank"], one["name"], one["value"], one["place"]) for one in found["top"]]
    assert names == [(row["rank"], Path(row["path"]).name, row["value"], row["place"]) for row in rows]
    assert len(rows) == 3
    shown = server.get(f"{AT}?node=mid&channel=70").json()["top"]
    shown += [one for channel in range(20) for one in server.get(f"{AT}?node=mid&channel={channel}").json()["top"]]
    by_name = {one["name"]: one["image"] for one in shown}
    assert "coffee.jpg" in by_name  # from the archive
    for name, address in by_name.items():
        answer = server.get(address)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/jpeg")
        picture = PIL.Image.open(io.BytesIO(answer.content))
        whole = PIL.Image.open(io.BytesIO(photos[Path(name).stem])).convert("RGB")
        assert max(picture.size) == 256
        assert np.abs(np.asarray(whole.resize(picture.size), float) - np.asarray(picture, float)).mean() < 8
    detail = server.get("/v1/models/squeezenet1_1").json()
    assert detail["statistics"] == {"weights": "random", "images": len(photos), "nodes": ["features.4.cat"]}
    assert server.get("/v1/models/resnet18").json()["statistics"] is None


@pytest.mark.parametrize("name", ["features.4.cat", "features.4", "C2", "mid"])
def test_a_node_has_all_its_names(server: Client, name: str) -> None:
    assert server.get(AT, params={"node": name, "channel": 0}).json()["node"] == "features.4.cat"


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        (f"{AT}?node=features.6&channel=0", 422, "there are no top images of 'features.6', only of features.4.cat"),
        (f"{AT}?node=mid&channel=128", 422, "channel must be from 0 to 127 for features.4.cat, not 128"),
        (f"{AT}?node=mid&channel=-1", 422, "channel"),
        (f"{AT}/images/{'0' * 16}", 404, "there is no image 0000"),
        (f"{AT}/images/..%2F..%2Fspec.json", 404, "there is nothing at"),
        (f"{AT}/images/chelsea.jpg", 422, "image"),
        ("/v1/models/resnet18/statistics?node=mid&channel=0", 404, "no statistics of resnet18"),
        ("/v1/models/resnet5/statistics?node=mid&channel=0", 404, "there is no model 'resnet5'"),
    ],
)
def test_what_is_not_listed_is_refused(server: Client, path: str, status: int, told: str) -> None:
    answer = server.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert told in answer.json()["detail"]


def test_files_that_have_changed_are_not_sent(server: Client, folder: Path) -> None:
    numbers = {
        one["name"]: one["image"]
        for channel in range(20)
        for one in server.get(f"{AT}?node=mid&channel={channel}").json()["top"]
    }
    first, second = (name for name in numbers if name != "coffee.jpg" and name in ("chelsea.jpg", "rocket.jpg"))
    kept = {name: (folder.parent / name).read_bytes() for name in (first, second)}
    (folder.parent / first).write_text("secret: not an image any more")
    (folder.parent / second).unlink()
    try:
        changed, gone = server.get(numbers[first]), server.get(numbers[second])
    finally:
        for name, data in kept.items():
            (folder.parent / name).write_bytes(data)
    assert changed.status_code == 422
    assert b"secret" not in changed.content
    refused(gone, "not-found", f"{second} can no longer be read", status=404)


def test_a_folder_without_top_images_is_refused(folder: Path, tmp_path: Path) -> None:
    for there in (tmp_path / "gone", tmp_path):
        with pytest.raises(FxError, match="holds no readable statistics"):
            create_app(Settings(device="cpu", statistics=there))
    (tmp_path / "spec.json").write_bytes((folder / "spec.json").read_bytes())
    (tmp_path / "top.parquet").write_bytes((folder / "top.parquet").read_bytes()[:-9])
    with pytest.raises(FxError, match="holds no readable statistics"):
        create_app(Settings(device="cpu", statistics=tmp_path))
