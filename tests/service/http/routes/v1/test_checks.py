"""``checks`` of extractors on eager: measured, or null."""

from __future__ import annotations

import threading

import pytest
import torch
import torchvision
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.transforms.functional import pil_to_tensor

from fxcore import get_model, load_model
from fxcore.photos import photos
from service.schemas.v1.extractors import Checks
from tests.service.conftest import Client, checked
from tests.wire import NPY, created, read, sent


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_eager_is_measured_against_the_model_whose_batch_norms_are_not_folded(client: Client, backend: str) -> None:
    """Against torchvision's own extractor on the first photograph, as far as the service's values are from it."""
    made = created(client, model="resnet18", weights="random", return_nodes=["layer3"], backend=backend)
    checks = checked(client, made["id"])
    assert checks["reference"] == "eager float32"
    assert [c["backend"] for c in checks["candidates"]] == ["eager"]

    model = torchvision.models.resnet18().eval()
    model.load_state_dict(load_model(get_model("resnet18"), "random").state_dict())
    image = torchvision.models.ResNet18_Weights.DEFAULT.transforms()(pil_to_tensor(photos()[0]))[None]
    with torch.no_grad():
        expected = create_feature_extractor(model.eval(), ["layer3"])(image)["layer3"].numpy()
    response = client.post(f"/v1/extractors/{made['id']}/features?preprocess=none", **sent(image, NPY))
    error = abs(read(response) - expected).max()
    assert 0 < error < 1e-4
    assert error / 10 < checks["max_abs_error"] < 10 * error
    assert 0 < checks["max_rel_error"] < 1e-5


def test_checks_are_waited_for_as_long_as_asked(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.routes.v1.extractors.CHECK_SECONDS", 0.0)
    spec = {"model": "resnet18", "weights": "random", "return_nodes": ["layer1.0.bn1"], "backend": "eager"}
    made = client.post("/v1/extractors?wait=120", json=spec).json()
    assert made["checks"]["max_abs_error"] < 1e-4
    assert made["checks"].keys() <= Checks.model_fields.keys()


@pytest.mark.exhaustive
def test_unmeasured_figures_are_null_and_delay_no_request(client: Client) -> None:
    """While the device is busy an extractor is made, and answers once it is free."""
    engine, free = client.app.state.fxserve.engine, threading.Event()
    spec = {"model": "resnet18", "weights": "random", "return_nodes": ["layer1.0.conv2"], "backend": "eager"}
    engine._queue.run_idle(lambda: free.wait(120))
    try:
        made = client.post("/v1/extractors", json=spec).json()
        assert made["state"] == "ready"
        checks = {key: made["checks"][key] for key in ("reference", "max_abs_error", "max_rel_error")}
        assert checks == {"reference": "eager float32", "max_abs_error": None, "max_rel_error": None}
    finally:
        free.set()
    assert checked(client, made["id"])["max_abs_error"] < 1e-4
