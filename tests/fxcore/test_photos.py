"""Photographs that int8 is calibrated on."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

import fxcore.photos
from fxcore import model_graph
from fxcore.images.files import open_image
from fxcore.photos import NoPhotographs, calibration_rows


def rows_of(folder: Path, count: int) -> list[tuple[Tensor, ...]]:
    graph = model_graph("squeezenet1_1")
    return calibration_rows(graph.preprocessing, graph.inputs, graph.input_size, folder, count)


def photograph(file: Path, value: int) -> PIL.Image.Image:
    image = PIL.Image.fromarray(np.full((40, 60, 3), value, np.uint8))
    image.save(file)
    return image


def test_the_first_by_name_that_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = {name: photograph(tmp_path / f"{name}.png", 10 * i) for i, name in enumerate("dcba")}
    (tmp_path / "a.png").write_bytes(b"nope")
    (tmp_path / "0.txt").write_text("no photograph")
    (tmp_path / "0.jpg").mkdir()
    preprocessing = model_graph("squeezenet1_1").preprocessing
    with caplog.at_level(logging.WARNING, "fxcore.photos"):
        rows = rows_of(tmp_path, 2)
    assert [len(row) for row in rows] == [1, 1]
    for (row,), name in zip(rows, "bc", strict=True):
        assert torch.equal(row, preprocessing.pixels(pil_to_tensor(images[name]))[None])
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" is not")[0] for line in told] == [str(tmp_path / "0.jpg"), str(tmp_path / "a.png")]


@pytest.mark.exhaustive
def test_one_is_decoded_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(6):
        photograph(tmp_path / f"{i}.png", i)
    opened: list[weakref.ref[PIL.Image.Image]] = []
    most = 0

    def counted(data: bytes) -> PIL.Image.Image:
        nonlocal most
        image = open_image(data)
        opened.append(weakref.ref(image))
        gc.collect()
        most = max(most, sum(one() is not None for one in opened))
        return image

    monkeypatch.setattr(fxcore.photos, "open_image", counted)
    assert len(rows_of(tmp_path, 4)) == 4
    assert (len(opened), most) == (4, 1)


def test_a_folder_without_any_is_named(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "gone", "No such file"), (tmp_path, "it has no .jpg")):
        with pytest.raises(NoPhotographs) as caught:
            rows_of(folder, 2)
        assert str(folder) in caught.value.detail
        assert said in caught.value.detail
    (tmp_path / "a.jpg").write_bytes(b"nope")
    with pytest.raises(NoPhotographs, match="none of its 1 can be read"):
        rows_of(tmp_path, 2)
