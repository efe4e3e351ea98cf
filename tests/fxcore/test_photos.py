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
from torchvision.transforms.functional import center_crop, pil_to_tensor, resize

import fxcore.photos
from fxcore import get_model, model_graph
from fxcore.images.channels import OtherChannels
from fxcore.images.files import open_image
from fxcore.photos import NoPhotographs, calibration_rows, photos
from fxcore.tensors import TensorSpec


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


def test_a_grey_model_is_calibrated_on_the_luma() -> None:
    preprocessing = OtherChannels(get_model("squeezenet1_1").preprocessing(), 1)
    spec = TensorSpec("x", "NCHW", (None, 1, 224, 224))
    for image, (row,) in zip(photos(), calibration_rows(preprocessing, [spec], (224, 224), count=4), strict=True):
        assert torch.equal(row[0], preprocessing.pixels(pil_to_tensor(image)))
        luma = pil_to_tensor(center_crop(resize(image.convert("L"), 256), 224)) / 255
        assert torch.allclose(row[0], (luma - 0.449) / 0.226, atol=0.06)  # averages of the published numbers


@pytest.mark.parametrize("channels", [2, 4])
def test_other_channels_are_those_of_rgb(channels: int) -> None:
    rgb = get_model("squeezenet1_1").preprocessing()
    spec = TensorSpec("x", "NCHW", (None, channels, 224, 224))
    [(row,)] = calibration_rows(OtherChannels(rgb, channels), [spec], (224, 224), count=1)
    assert torch.equal(row[0], rgb.pixels(pil_to_tensor(photos()[0]))[[0, 1, 2, 0][:channels]])


def test_a_folder_without_any_is_named(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "gone", "No such file"), (tmp_path, "it has no .jpg")):
        with pytest.raises(NoPhotographs) as caught:
            rows_of(folder, 2)
        assert str(folder) in caught.value.detail
        assert said in caught.value.detail
    (tmp_path / "a.jpg").write_bytes(b"nope")
    with pytest.raises(NoPhotographs, match="none of its 1 can be read"):
        rows_of(tmp_path, 2)
