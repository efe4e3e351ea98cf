"""What a heat-map shows, and that it takes no more memory for a large image than for a screen full."""

import io
import tracemalloc

import numpy as np
import PIL.Image
import pytest
import torch

from fxcore.graph.tokens.token_grid import TokenGrid
from fxcore.images.channels import OtherChannels
from fxcore.models.catalog import get_model
from service.codecs import heatmap
from service.problems import NoHeatMap

COLOUR = (30, 200, 100)


def png(height: int, width: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), COLOUR).save(file, "PNG")
    return file.getvalue()


def halves() -> torch.Tensor:
    """Features that are weakest on the left and strongest on the right."""
    tensor = torch.zeros(1, 5, 4, 4)
    tensor[..., 2:] = 1.0
    return tensor


def drawn(*args: object) -> np.ndarray:
    [data] = heatmap.write(*args)
    return np.asarray(PIL.Image.open(io.BytesIO(data)))


def blended(colour: tuple[int, int, int]) -> np.ndarray:
    """Inferno's ``colour`` over the grey of :data:`COLOUR`."""
    return np.round(0.35 * np.mean(COLOUR) + 0.65 * np.array(colour)).astype(np.uint8)


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [
        (100, 150, (100, 150)),
        (150, 100, (150, 100)),
        (600, 400, (150, 100)),
        (301, 199, (150, 99)),
        (9, 9000, (3, 3872)),
    ],
)
@pytest.mark.parametrize("model", [None, "raft_small"])  # which does not resize what it is given
def test_what_is_large_is_drawn_smaller(
    monkeypatch: pytest.MonkeyPatch, model: str | None, height: int, width: int, size: tuple[int, int]
) -> None:
    monkeypatch.setattr(heatmap, "MAX_PIXELS", 15_000)
    preprocessing = None if model is None else get_model(model).preprocessing()
    picture = drawn(png(height, width), preprocessing, halves(), "NCHW")
    assert picture.shape == (*size, 3)
    assert (picture[:, 0] == blended((0, 0, 4))).all()
    assert (picture[:, -1] == blended((252, 255, 164))).all()


def test_models_of_one_channel_see_grey() -> None:
    """The grey under the colours is PIL's."""
    picture = drawn(png(64, 64), OtherChannels(get_model("resnet18").preprocessing(), 1), halves(), "NCHW")
    grey = PIL.Image.new("RGB", (1, 1), COLOUR).convert("L").getpixel((0, 0))
    assert picture.shape == (224, 224, 3)
    for column, colour in ((0, (0, 0, 4)), (-1, (252, 255, 164))):
        assert np.abs(picture[:, column] - (0.35 * grey + 0.65 * np.array(colour))).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(1, 10**8), (10**8, 1), (10**4, 10**4), (2, 10**7), (1449, 1448)])
def test_no_image_is_drawn_larger_than_a_screen(height: int, width: int) -> None:
    drawn = heatmap.smaller(height, width)
    assert min(drawn) >= 1
    assert 0.99 * heatmap.MAX_PIXELS < drawn[0] * drawn[1] <= heatmap.MAX_PIXELS


def test_memory_is_for_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heatmap, "MAX_PIXELS", 15_000)
    data = png(1000, 1000)
    tracemalloc.start()
    try:
        heatmap.write(data, None, torch.rand(1, 5, 4, 4), "NCHW")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1000 * 1000 * 8 + 15_000 * 100


@pytest.mark.parametrize("tokens", [None, TokenGrid("patches", 2, 3, prefix=1, class_token=True)])
def test_tokens_of_no_known_grid_are_not_drawn(tokens: TokenGrid | None) -> None:
    with pytest.raises(NoHeatMap, match="grid"):
        heatmap.write(png(32, 48), None, torch.rand(1, 10, 5), "tokens", tokens)
