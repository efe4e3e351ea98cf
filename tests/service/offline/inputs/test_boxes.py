"""Files of boxes, and runs that pool them: against torchvision's roi_align on the whole maps."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torchvision.ops import roi_align

from fxcore.errors import FxError
from service.offline import extract
from service.offline.inputs import regions as files
from tests.service.offline.conftest import (
    SETTINGS,
    Regions,
    csv,
    errors,
    job,
    places,
    png,
    regions,
    regions_in,
    shards,
)

# In pixels of images of 80 x 64: one inside, one that the crop cuts, one of fractions.
BOXES = [[20, 10, 60, 50], [0, 0, 40, 64], [30.5, 12.25, 41, 30]]


def assert_right(found: Regions, wanted: dict[str, Any], reference: Callable[..., Any], size: int = 7) -> None:
    assert {path: [box for box, _ in rows] for path, rows in found.items()} == wanted
    for path, rows in found.items():
        # 80 x 64 becomes 320 x 256, of which 224 x 224 are seen.
        moved = torch.tensor(wanted[path], dtype=torch.float64) * 4 - torch.tensor([48, 16] * 2)
        for key, node, stride in (("C4", "layer3.1.relu_1", 16), ("C5", "layer4.1.relu_1", 32)):
            maps = reference("resnet18", node, [png(int(Path(path).stem))])
            pooled = roi_align(maps, [moved.float()], size, 1 / stride, aligned=True)
            right = pooled.flatten(1).numpy() if size == 1 else pooled.numpy()
            actual = np.stack([features[key] for _, features in rows])
            assert actual.shape == right.shape
            np.testing.assert_allclose(actual, right, rtol=1e-3, atol=1e-4 * np.abs(right).max(), err_msg=path)


@pytest.mark.exhaustive
def test_rows_are_the_regions_of_the_whole_maps(
    folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]
) -> None:
    root, out = folder(5), tmp_path / "out"
    # 6 boxes do not fit into a shard of four, and no image is in two shards.
    lines = {"001.png": BOXES, "deep/er/003.png": BOXES * 2, str(root / "002.png"): BOXES[:1], "004.png": []}
    made = extract(regions(out, csv(root / "boxes.csv", lines), root), SETTINGS)
    assert (made.images, made.done, made.unreadable, made.shards) == (3, 3, 0, 2)
    assert [output["shape"] for output in made.outputs] == [[256, 7, 7], [512, 7, 7]]
    wanted = {str(root / path): value for path, value in lines.items() if value}
    assert_right(regions_in(out), wanted, reference)
    assert places(out) == {
        str(root / "001.png"): ("shard-000000.safetensors", 0),
        str(root / "002.png"): ("shard-000000.safetensors", 3),
        str(root / "deep/er/003.png"): ("shard-000001.safetensors", 0),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("named", ["x.tar/{}", "{root}/x.tar/./{}"])
def test_boxes_of_an_archive_of_a_whole_folder(
    named: str, folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]
) -> None:
    """``tar -C photos -cf x.tar .`` writes the names ``./000.png``."""
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(folder(3), ".")
    lines = {named.format("001.png", root=tmp_path): BOXES}
    extract(regions(tmp_path / "out", csv(tmp_path / "boxes.csv", lines), tmp_path / "x.tar"), SETTINGS)
    assert_right(regions_in(tmp_path / "out"), {f"{tmp_path}/x.tar/001.png": BOXES}, reference)


@pytest.mark.exhaustive
def test_a_run_goes_on_and_other_boxes_are_refused(
    folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]
) -> None:
    root, out = folder(6), tmp_path / "out"
    lines = {f"{n:03d}.png": BOXES[: 1 + n % 3] for n in (1, 2, 4, 5)}
    extract(regions(out, csv(root / "boxes.csv", lines), root), SETTINGS)
    (out / "shard-000001.safetensors").unlink()
    lines |= {"deep/er/000.png": BOXES[1:]}
    made = extract(regions(out, csv(root / "boxes.csv", lines), root), SETTINGS)
    assert (made.images, made.done) == (5, 5)
    assert_right(regions_in(out), {str(root / path): value for path, value in lines.items()}, reference)
    before = shards(out), places(out)
    lines["001.png"] = [[1, 2, 30, 40]]
    with pytest.raises(FxError, match=r"001\.png was extracted with different boxes; use a new folder"):
        extract(regions(out, csv(root / "boxes.csv", lines), root), SETTINGS)
    with pytest.raises(FxError, match="made with pool roi, not avg"):
        extract(job(out, root, spec={"model": "resnet18", "return_nodes": {"C4": "C4", "C5": "C5"}}), SETTINGS)
    assert (shards(out), places(out)) == before


@pytest.mark.exhaustive
def test_vectors_from_a_parquet_file_with_a_row_for_each_box(
    folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]
) -> None:
    root, out = folder(3), tmp_path / "out"
    paths = ["../photos/001.png", "../photos/002.png", "../photos/001.png"]
    table = pyarrow.table(
        {
            "boxes": pyarrow.array([[box] for box in BOXES], pyarrow.list_(pyarrow.list_(pyarrow.float64(), 4))),
            "path": paths,
        }
    )
    (tmp_path / "tables").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "tables" / "boxes.parquet")
    extract(regions(out, tmp_path / "tables" / "boxes.parquet", root, roi_size=1), SETTINGS)
    wanted = {str(root / "001.png"): [BOXES[0], BOXES[2]], str(root / "002.png"): [BOXES[1]]}
    assert_right(regions_in(out), wanted, reference, size=1)


def test_boxes_that_are_wrong_cost_no_other_image_its_place(
    folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]
) -> None:
    root, out = folder(6), tmp_path / "out"
    (root / "005.png").write_bytes(b"junk")
    lines: dict[str, Any] = {
        "001.png": [[0, 0, 81.5, 64]],
        "002.png": BOXES,
        "deep/er/003.png": [BOXES[0], [50, 10, 20, 40]],
        "004.png": [[0, 10, 10, 30]],  # the crop leaves 12 columns out
        "005.png": BOXES,
        "gone.png": BOXES,
    }
    made = extract(regions(out, csv(root / "boxes.csv", lines), root), SETTINGS)
    assert (made.images, made.done, made.unreadable) == (6, 1, 5)
    assert_right(regions_in(out), {str(root / "002.png"): BOXES}, reference)
    assert {Path(path).name: error for path, error in errors(out).items()} == {
        "001.png": "box 0, [0, 0, 81.5, 64], reaches out of its image, which is 80 x 64 pixels",
        "003.png": "box 1, [50, 10, 20, 40], is empty or inverted: write [x1, y1, x2, y2] with x1 < x2 and y1 < y2",
        "004.png": "box 0, [0, 10, 10, 30], lies outside of the part of its image that the model sees: leave it out",
        "005.png": "these 4 bytes are not an image; send one of JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, JPEG2000, AVIF",
        "gone.png": "it has boxes but is not among the images",
    }


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("boxes.txt", "", r"must be in a \.parquet or \.csv file"),
        ("gone.csv", None, "No such file"),
        ("gone.parquet", None, "No such file"),
        ("boxes.parquet", "path,boxes\n", "is not a Parquet file"),
        ("boxes.csv", "", "has the columns none; it needs the columns path and boxes"),
        ("boxes.csv", "image,x1,y1,x2,y2\na.png,1,2,3,4\n", "has the columns image, x1, y1, x2, y2; it needs"),
        ("boxes.csv", "path,boxes\na.png,1 2 3 4\n", r"row 1: boxes must be a list of .*, not 1 2 3 4"),
        ("boxes.csv", 'path,boxes\na.png,\nb.png,"[1,2,3,4]"\n', r"row 2: boxes must be a list of .*, not \[1,2,3,4\]"),
        ("boxes.csv", 'path,boxes\na.png,"[[1,2,3]]"\n', r"row 1: .*, not \[\[1,2,3\]\]"),
        ("boxes.csv", 'path,boxes\na.png,"[[1,2,3,1e999]]"\n', "row 1: "),
        ("boxes.csv", 'path,boxes\na.png,"[[1,2,3,true]]"\n', "row 1: "),
        ("boxes.csv", 'path,boxes\n,"[[1,2,3,4]]"\n', "row 1: path must be the path of an image, not ''"),
        ("boxes.csv", b"path,boxes\n\xff.png,\n", "utf-8"),
        ("boxes.csv", "path,boxes\na.png,0\n", "row 1: boxes must be a list of .*, not 0"),
        ("boxes.csv", "path,boxes\na.png,{}\n", r"row 1: boxes must be a list of .*, not \{\}"),
    ],
)
def test_an_invalid_file_is_reported_before_any_work(
    name: str, text: str | bytes | None, said: str, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png(0))
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FxError, match=said):
        list(files.read(str(tmp_path / name), "roi"))
    with pytest.raises(FxError, match=said):
        extract(regions(tmp_path / "out", tmp_path / name, tmp_path / "a.png"), SETTINGS)
    assert not (tmp_path / "out").exists()


def test_boxes_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    table = pyarrow.table({"path": ["a.png", "b.png"], "boxes": [None, [[1.0, 2.0, float("nan"), 4.0]]]})
    pyarrow.parquet.write_table(table, tmp_path / "boxes.parquet")
    with pytest.raises(FxError, match="row 2: boxes must be a list of"):
        list(files.read(str(tmp_path / "boxes.parquet"), "roi"))


@pytest.mark.exhaustive
def test_a_file_naming_none_of_the_images_is_reported(folder: Callable[..., Path], tmp_path: Path) -> None:
    root, out = folder(2), tmp_path / "out"
    elsewhere = csv(tmp_path / "boxes.csv", {"001.png": BOXES})  # beside the folder, not in it
    with pytest.raises(
        FxError, match=rf"none of the images in .* can be read; {tmp_path}/001\.png: it has boxes but is not among"
    ):
        extract(regions(out, elsewhere, root), SETTINGS)
    with pytest.raises(FxError, match=r"boxes\.csv contains no boxes"):
        extract(regions(out, csv(tmp_path / "boxes.csv", {"001.png": []}), root), SETTINGS)
    assert extract(regions(out, csv(tmp_path / "boxes.csv", {"photos/001.png": BOXES}), root), SETTINGS).done == 1


def test_an_output_cannot_have_the_name_of_the_boxes(folder: Callable[..., Path], tmp_path: Path) -> None:
    root = folder(1)
    file = csv(root / "boxes.csv", {"deep/er/000.png": BOXES})
    asked = job(tmp_path / "out", root, pool="roi", regions=str(file), spec={"return_nodes": {"features.5": "box"}})
    with pytest.raises(FxError, match="an output cannot be named 'box'"):
        extract(asked, SETTINGS)
