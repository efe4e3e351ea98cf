"""The service with faults that a test can trigger: ``uvicorn tests.e2e.faults.app:create_app``.

None of the service's own code is replaced. A model, a decoder and the clock misbehave, and the published weights of
some models are on the test's own server.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from torch import Tensor, nn

import fxcore.models.downloads
import service.app
from fxcore import ModelEntry, WeightsInfo
from fxcore.images.decoding import Decoder
from fxcore.images.presets import ImageClassification
from fxcore.models.torchvision_models import TorchvisionEntry, torchvision_models

# The first value of a row selects the fault of its batch.
RAISES, NAN, HANGS, NO_MEMORY, TOO_MANY_ROWS, DIES = range(1001, 1007)

# The end of a file selects the fault of its decoder.
DECODER_DIES, DECODER_HAS_NO_MEMORY = b"<the decoder dies>", b"<the decoder has no memory>"

DOWNLOADED = ("stalls", "wrong_hash", "disk_full", "half_written")
STALL_SECONDS = 4.0


def folder() -> Path:
    """Return the folder shared with the test: ``release`` ends a hang, ``clock`` has seconds to add to the time, and
    ``hanging`` is there while a model hangs."""
    return Path(os.environ["FAULTS_DIR"])


@torch.fx.wrap
def misbehave(x: Tensor) -> Tensor:
    """Return ``x`` ``[N, 3, H, W]`` unchanged, unless a row triggers a fault."""
    if x.is_meta:
        return x
    marks = x[:, 0, 0, 0].tolist()
    if RAISES in marks:
        raise ValueError("the model does not like this row")
    if HANGS in marks:
        (folder() / "hanging").touch()
        while not (folder() / "release").exists():
            time.sleep(0.01)
        (folder() / "hanging").unlink()
    if NO_MEMORY in marks:
        torch.empty(2**50)
    if TOO_MANY_ROWS in marks and len(marks) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    if DIES in marks:
        raise SystemExit("the device thread ends here")
    return torch.where((x[:, :1, :1, :1] == NAN), torch.nan, x)


class Faulty(nn.Module):
    """A model with two outputs, ``conv`` ``[N, 8, 16, 16]`` and ``head`` ``[N, 1024]``, and 2 MB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8 * 8 * 8, 1024)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.conv(misbehave(x))).flatten(1))


def _entry(name: str) -> ModelEntry:
    def builder(*, weights: object = None) -> nn.Module:
        return Faulty()

    url = f"{os.environ['FAULTS_URL']}/{name}-{os.environ['FAULTS_HASH']}.pth"
    preset = partial(ImageClassification, crop_size=32, resize_size=32)
    return TorchvisionEntry(
        name,
        "classification",
        builder,
        {"V1": WeightsInfo("V1", url, 0, {}, ())},
        "V1",
        transforms={"V1": preset},
        meta={"V1": {}},
    )


def create_app() -> FastAPI:
    for name in ("faulty", *DOWNLOADED):
        torchvision_models()[name] = _entry(name)
    fxcore.models.downloads.STALL_TIMEOUT = STALL_SECONDS
    _spoil_decoder()
    _spoil_clock()
    return service.app.create_app()


def _spoil_decoder() -> None:
    right = Decoder.image

    def spoiled(self: Decoder, data: bytes, *args: Any) -> Tensor:
        if bytes(data).endswith(DECODER_DIES):
            raise SystemExit("the decoder's thread ends here")
        if bytes(data).endswith(DECODER_HAS_NO_MEMORY):
            raise MemoryError
        return right(self, data, *args)

    Decoder.image = spoiled  # type: ignore[method-assign]


def _spoil_clock() -> None:
    right = time.time
    clock = folder() / "clock"

    def spoiled() -> float:
        return right() + (float(clock.read_text() or 0) if clock.exists() else 0.0)

    time.time = spoiled
