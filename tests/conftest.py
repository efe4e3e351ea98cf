"""Photographs and reference values for every test."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace

# Read when torch is loaded. Several test processes run at once, and idle threads of one would spin on another's core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import PIL.Image
import pytest
import skimage.data
import torch
import torchvision
from torchvision.models.feature_extraction import create_feature_extractor

from fxcore.backends import process
from tests.decoding import decoded
from tests.e2e.forked import popen
from tests.seeded import seeded


@pytest.fixture(autouse=True, scope="module")
def _what_others_left_is_exempt() -> None:
    """Freeze existing objects before the tests of a file, so that garbage collections examine only new objects.

    Tests import several times as much as a service does.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _children_are_forked() -> Iterator[None]:
    """Fork the processes that lower and export, since a new interpreter needs seconds for its imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))
        yield


@pytest.fixture
def interpreted_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start them as the product does."""
    monkeypatch.setattr(process, "subprocess", subprocess)


@pytest.fixture(scope="session")
def photos() -> dict[str, bytes]:
    """Real photographs as JPEG files, by name."""
    encoded = {}
    for name in ("chelsea", "coffee", "rocket"):
        buffer = io.BytesIO()
        PIL.Image.fromarray(getattr(skimage.data, name)()).save(buffer, "JPEG", quality=92)
        encoded[name] = buffer.getvalue()
    return encoded


Reference = Callable[..., torch.Tensor]


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Compute reference values with torchvision itself: ``reference(model, node, [photo, …])``.

    torchvision's extractor is built for one node at a time (HAZARDS 1), for a model built with seed 0 or loaded from
    ``state``, with images preprocessed by the default weights' own transform. ``node`` is an exact node name.
    """
    models: dict[str, torch.nn.Module] = {}

    def compute(
        name: str, node: str, images: list[bytes], state: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        if name not in models:
            models[name] = seeded(torchvision.models.get_model, name, weights=None)
        model = models[name]
        if state is not None:
            model = copy.deepcopy(model)
            model.load_state_dict(state)
        transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        batch = torch.stack([transform(decoded(data)) for data in images])
        extractor = create_feature_extractor(model, [node]).eval()
        with torch.inference_mode():
            value: torch.Tensor = extractor(batch)[node]
        return value.clone()

    return compute
