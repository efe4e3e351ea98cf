"""Files decoded together against PIL and the weights' own transform, here by what stands in for nvJPEG on a CPU."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import PIL.Image
import pytest
import skimage.data
import torch
import torchvision
from torch import Tensor

from fxcore import get_model
from fxcore.images.decoding import Decoder
from fxcore.images.files import open_image
from fxcore.images.nvjpeg import JpegBatches

CPU = torch.device("cpu")


def encoded(image: PIL.Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 90, **options})
    return buffer.getvalue()


def batches(model: str = "mobilenet_v3_small", device: torch.device = CPU) -> JpegBatches:
    return JpegBatches(Decoder(get_model(model).preprocessing()), device)


def transformed(model: str, data: bytes) -> Tensor:
    """By torchvision's transform of the weights, in grey levels ``[3, H, W]``."""
    preset = torchvision.models.get_model_weights(model).DEFAULT.transforms()
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (preset.mean, preset.std))
    return (preset(open_image(data)) * std + mean) * 255


@pytest.fixture(scope="module")
def coffee() -> PIL.Image.Image:
    return PIL.Image.fromarray(skimage.data.coffee())


@pytest.fixture(scope="module")
def files(coffee: PIL.Image.Image) -> list[bytes]:
    """Of several sizes and kinds: wide, high, smaller and far larger than what models want."""
    chelsea = PIL.Image.fromarray(skimage.data.chelsea())
    return [
        encoded(coffee),
        encoded(coffee.convert("L")),
        encoded(coffee.rotate(90, expand=True), progressive=True),
        encoded(chelsea.resize((1801, 1203)), subsampling=0),
        encoded(chelsea.resize((101, 61))),
        encoded(chelsea.crop((0, 0, 256, 256)), restart_marker_rows=1),
    ]


@pytest.mark.parametrize("model", ["mobilenet_v3_small", "resnet50", "inception_v3"])
def test_rows_are_those_of_the_weights_transform(files: list[bytes], model: str) -> None:
    assert all(batches(model).takes(data) for data in files)
    rows = batches(model).rows(files)
    assert rows.dtype == torch.uint8
    assert rows.is_contiguous()
    for row, data in zip(rows, files, strict=True):
        check(row, transformed(model, data))


def test_rows_without_a_crop(coffee: PIL.Image.Image) -> None:
    """As a segmentation model wants them: any width."""
    files = [encoded(coffee.resize((301, 200))), encoded(coffee.resize((602, 400)))]
    for row, data in zip(batches("fcn_resnet50").rows(files), files, strict=True):
        assert row.shape == (520, 782, 3)
        check(row, transformed("fcn_resnet50", data))


def check(row: Tensor, expected: Tensor) -> None:
    """One grey level; two only where both of PIL's passes meet a tie. None of it is one-sided."""
    assert row.shape == (*expected.shape[1:], 3)
    difference = row.permute(2, 0, 1) - expected
    assert difference.abs().max() < 2.01
    assert (difference.abs() > 1.01).float().mean() < 2e-4
    assert difference.mean().abs() < 0.1


def test_what_only_the_cpu_decoder_may_judge(coffee: PIL.Image.Image) -> None:
    """Its answer needs no pixels, so that no file of these ever reaches a device."""
    file = encoded(coffee)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    png = io.BytesIO()
    coffee.save(png, "PNG")
    others = {
        "cut": file[: len(file) // 2],
        "without its end": file[:-2],
        "with more after its end": file + b"\0",
        "header": file[:200],
        "empty": b"",
        "text": b"no image at all",
        "four colours": encoded(coffee.convert("CMYK")),
        "RGB, not YCbCr": encoded(coffee, keep_rgb=True),
        "turned": encoded(coffee, exif=exif),
        "PNG": png.getvalue(),
    }
    assert batches().takes(file)
    assert [name for name, data in others.items() if batches().takes(data)] == []


def test_a_file_that_cannot_be_decoded_fails_the_call(files: list[bytes], coffee: PIL.Image.Image) -> None:
    cut = encoded(coffee)[:300] + b"\xff\xd9"
    with pytest.raises(RuntimeError):
        batches().rows([*files, cut])


def test_rows_of_several_sizes_fail_the_call(coffee: PIL.Image.Image) -> None:
    with pytest.raises(RuntimeError):
        batches("fcn_resnet50").rows([encoded(coffee), encoded(coffee.rotate(90, expand=True))])


def test_from_several_threads(files: list[bytes]) -> None:
    together = batches()
    expected = together.rows(files)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(rows, expected) for rows in pool.map(together.rows, [files] * 6))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_nvjpeg(files: list[bytes]) -> None:
    """Its pixels differ, by most where it repeats chroma; each image is still that image, and complete when given."""
    cuda = batches(device=torch.device("cuda"))
    expected = batches().rows(files)
    for _ in range(10):  # memory is used again
        rows = cuda.rows(files)
        with torch.cuda.stream(torch.cuda.Stream()):
            difference = (rows.cpu().float() - expected).abs()
        assert rows.is_cuda
        assert difference.mean(dim=(1, 2, 3)).max() < 2
        assert np.quantile(difference.flatten().numpy(), 0.99) < 12
