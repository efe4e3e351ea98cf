"""A separate weights cache for each test, and models that torchvision does not have."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fxcore import ModelEntry, WeightsInfo, get_model
from fxcore.images.presets import ImageClassification
from fxcore.memory import give_back
from fxcore.models.torchvision_models import TorchvisionEntry

Put = Callable[[str, str, Mapping[str, torch.Tensor]], Path]
OwnEntry = Callable[[Callable[[], nn.Module]], ModelEntry]


@pytest.fixture(autouse=True)
def torch_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty weights cache, so that tests neither read nor fill the user's cache."""
    home = tmp_path / "torch home"
    monkeypatch.setenv("TORCH_HOME", str(home))
    return home


@pytest.fixture
def memory_given_back() -> Iterator[None]:
    """Return memory after each test over every model; otherwise the weights of a hundred models would accumulate."""
    yield
    give_back()
    gc.freeze()  # the next one need not look through the graphs that are kept


@pytest.fixture
def put() -> Put:
    """Save a state dict under the real file name of published weights: ``put(model, weights, state)``."""

    def save(name: str, weights: str, state: Mapping[str, torch.Tensor]) -> Path:
        file = get_model(name).weights_info(weights).file
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, file)
        return file

    return save


@pytest.fixture
def own_entry() -> OwnEntry:
    """Make a catalog entry for a test's own model with images of 32 x 32 pixels."""

    def make(build: Callable[[], nn.Module]) -> ModelEntry:
        def builder(*, weights: object = None) -> nn.Module:
            return build()

        info = WeightsInfo("V1", "http://127.0.0.1:9/own-00000000.pth", 0, {}, ())
        preset = partial(ImageClassification, crop_size=32, resize_size=32)
        return TorchvisionEntry(
            "own", "classification", builder, {"V1": info}, "V1", transforms={"V1": preset}, meta={"V1": {}}
        )

    return make
