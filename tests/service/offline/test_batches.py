"""Batches of images that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch

from fxcore.images.decoding import Decoder
from service.offline import extract
from tests.service.offline.conftest import SETTINGS, errors, job, png
from tests.service.own_models import own_models


@pytest.mark.parametrize(("others", "tries"), [(0, 1), (2, 2)])
def test_an_image_is_tried_again_only_without_the_others_of_its_batch(
    others: int, tries: int, folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, tried = png(0)[:500], []
    root = folder(1 + others)
    (root / "deep/er/000.png").write_bytes(broken)
    whole = Decoder.image

    def recording(self: Decoder, data: bytes, *options: Any) -> torch.Tensor:
        tried.append(data)
        return whole(self, data, *options)

    monkeypatch.setattr(Decoder, "image", recording)
    made = extract(job(tmp_path / "out", root), SETTINGS)
    assert (made.done, made.unreadable) == (others, 1)
    assert tried.count(broken) == tries


LIMITED = """
import torch
from torch import nn

class Limited(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.places = nn.Conv2d(3, 8, 8, 8), nn.Embedding(100, 8)

    def forward(self, x):
        tokens = self.conv(x).flatten(2).transpose(1, 2)
        return (tokens + self.places(torch.arange(tokens.shape[1]))).mean(1)
"""


def test_an_image_of_a_size_that_the_model_does_not_accept_costs_no_other(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """With ``fit=native``, sizes depend on the images: 64 x 80, and one of 64 x 160."""
    root = folder(3)
    PIL.Image.open(root / "001.png").resize((160, 64)).save(root / "wide.png")
    entry = '[models.limited]\nbuilder = "own_models:Limited"\npreprocessing = { resize_size = 64, crop_size = 64 }'
    spec = {"model": "limited", "weights": "DEFAULT", "return_nodes": ["mean"], "fit": "native", "image_size": 64}
    with own_models(tmp_path, LIMITED, entry):
        settings = SETTINGS.model_copy(update={"models_dir": tmp_path})
        made = extract(job(tmp_path / "out", root, pool="none", spec=spec), settings)
    assert (made.done, made.unreadable) == (3, 1)
    [(path, error)] = errors(tmp_path / "out").items()
    assert path == str(root / "wide.png")
    assert "limited failed on an input of 3 x 64 x 160: IndexError: index out of range in self" in error
