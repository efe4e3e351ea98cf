"""Batches of images that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxcore.images.decoding import Decoder
from service.offline import extract
from tests.service.offline.conftest import SETTINGS, job, png


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
