"""Runs that pool points and masks, against the means and samples of the whole maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.nn.functional import grid_sample

from fxcore.errors import FxError
from service.offline import extract
from service.offline.inputs import regions as files
from tests.hostile_images import saved
from tests.service.offline.conftest import SETTINGS, csv, errors, png, regions, regions_in
from tests.wire import b64

POINTS = [[40, 32], [30.5, 12.25]]  # in pixels of images of 80 x 64


def test_points_of_a_csv_file(folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]) -> None:
    root, out = folder(4), tmp_path / "out"
    lines = {"001.png": POINTS, "002.png": POINTS[:1], "deep/er/003.png": [[1, 40]]}  # the crop leaves the last out
    file = csv(root / "points.csv", lines, "points")
    made = extract(regions(out, file, root, pool="points"), SETTINGS)
    assert (made.done, made.unreadable) == (2, 1)
    found = regions_in(out, "point")
    assert {path: [place for place, _ in rows] for path, rows in found.items()} == {
        str(root / "001.png"): POINTS,
        str(root / "002.png"): POINTS[:1],
    }
    for path, rows in found.items():
        maps = reference("resnet18", "layer3.1.relu_1", [png(int(Path(path).stem))])
        # 80 x 64 becomes 320 x 256, of which 224 x 224 are seen.
        at = (torch.tensor([place for place, _ in rows]) * 4 - torch.tensor([48, 16])) / 112 - 1
        right = grid_sample(maps, at[None, None], align_corners=False)[0, :, 0].T.numpy()
        np.testing.assert_allclose([row["C4"] for _, row in rows], right, rtol=1e-3, atol=1e-4 * np.abs(right).max())
    [error] = errors(out).values()
    assert error == "point 0, [1, 40], lies outside of the part of its image that the model sees: leave it out"
    csv(file, {"001.png": [[1, 2]]}, "points")
    with pytest.raises(FxError, match=r"001\.png was extracted with different points; use a new folder"):
        extract(regions(out, file, root, pool="points"), SETTINGS)


def mask_png() -> bytes:
    """All of an image of 80 x 64."""
    return saved(PIL.Image.new("L", (80, 64), 1), "PNG")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_masks_of_a_file(folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any], kind: str) -> None:
    """A mask of everything is the mean; one of no pixel costs its image its place."""
    root, out = folder(3), tmp_path / "out"
    runs, empty = {"size": [64, 80], "counts": [0, 5120]}, {"size": [64, 80], "counts": [5120]}
    if kind == "csv":
        csv(root / "masks.csv", {"001.png": [b64(mask_png()), runs], "002.png": [empty]}, "masks")
    else:
        masks = pyarrow.array([[mask_png(), mask_png()], [b"junk"]], pyarrow.list_(pyarrow.binary()))
        table = pyarrow.table({"path": ["001.png", "002.png"], "masks": masks})
        pyarrow.parquet.write_table(table, root / "masks.parquet")
    made = extract(regions(out, root / f"masks.{kind}", root, pool="mask"), SETTINGS)
    assert (made.done, made.unreadable) == (1, 1)
    ((path, rows_of),) = regions_in(out, "mask").items()
    assert (path, [place for place, _ in rows_of]) == (str(root / "001.png"), [0, 1])
    right = reference("resnet18", "layer3.1.relu_1", [png(1)]).mean((2, 3))[0].numpy()
    for _, row in rows_of:
        np.testing.assert_allclose(row["C4"], right, rtol=1e-3, atol=1e-4 * np.abs(right).max())
    assert ("is empty" if kind == "csv" else "not a PNG file") in (out / "errors.jsonl").read_text()


@pytest.mark.parametrize(
    ("pool", "text", "said"),
    [
        ("points", "path,boxes\n", "it needs the columns path and points"),
        (
            "points",
            'path,points\na.png,"[[1,2,3]]"\n',
            r"row 1: points must be a list of \[x, y\], such as \[\[10, 20\]\]",
        ),
        ("mask", 'path,masks\na.png,"[7]"\n', "row 1: mask 0 is neither base64 nor run lengths"),
        ("mask", 'path,masks\na.png,"[""?""]"\n', "row 1: mask 0 is neither a data URL nor base64"),
    ],
)
def test_an_invalid_file_is_reported(pool: Any, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text(text)
    with pytest.raises(FxError, match=said):
        list(files.read(str(tmp_path / "file.csv"), pool))
