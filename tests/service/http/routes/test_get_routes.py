"""Every GET route for models of every kind, and the datatypes that V2 announces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fxcore import list_models
from fxcore.memory import give_back
from fxcore.tensors import RETURNED
from service.codecs.tensors.datatypes import SAFETENSORS_NAMES, V2_NAMES
from tests.fxcore.model_list import KINDS
from tests.get_routes import failures
from tests.service.conftest import Client
from tests.service.own_models import own_models
from tests.wire import NPY, NPZ, SAFETENSORS, read, refused, sent

_ALWAYS = ("quantized_mobilenet_v2", "raft_small", "timm.test_vit")


def _models() -> Iterator[object]:
    """One of each kind of torchvision's; timm's are asked of a real server. fxcore's own tests trace all."""
    torchvisions = [entry.name for entry in list_models("torchvision") if entry.name in KINDS]
    for name in [*torchvisions, "timm.test_vit"]:
        yield pytest.param(name, marks=() if name in _ALWAYS else pytest.mark.exhaustive)


@pytest.fixture(scope="module")
def patient() -> Iterator[Client]:
    """A service in which the largest models may be traced on a slow machine."""
    client = Client(request_timeout=600)
    yield client
    client.close()


@pytest.fixture
def memory_given_back() -> Iterator[None]:
    yield
    give_back()


@pytest.mark.parametrize("name", list(_models()))
def test_no_get_route_fails(patient: Client, name: str, memory_given_back: None) -> None:
    assert failures(patient.get, patient.app.openapi(), name) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", ["none", "avg"])
def test_values_of_quantized_models_are_floats(client: Client, photos: dict[str, bytes], pool: str) -> None:
    """As they are announced, in as many bytes as are predicted, and pooled."""
    outputs = client.get("/v2/models/quantized_mobilenet_v2").json()["outputs"]
    assert {output["datatype"] for output in outputs} == {"FP32"}
    path = f"/v1/models/quantized_mobilenet_v2/features?weights=random&nodes=C3,C4&pool={pool}"
    announced = {output["name"]: output["shape"] for output in outputs}
    for key, value in read(client.post(path, **sent(photos["chelsea"], NPZ))).items():
        assert value.dtype == torch.float32
        assert list(value.shape) == [1, *announced[key][1:]][: None if pool == "none" else 2]


def test_every_dtype_of_an_output_has_a_name() -> None:
    assert set(V2_NAMES) == set(SAFETENSORS_NAMES) == RETURNED


MODULE = """
import torch
from torch import nn

class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)

    def forward(self, x):
        waves = torch.fft.rfft2(self.stem(x))
        short = waves.abs().to(torch.uint16)
        return waves, short.to(torch.float8_e4m3fn)
"""


@pytest.fixture
def spectrum(tmp_path: Path) -> Iterator[Path]:
    text = '[models.spectrum]\nbuilder = "own_models:Spectrum"\npreprocessing = { crop_size = 32 }\n'
    with own_models(tmp_path, MODULE, text):
        yield tmp_path


def test_values_of_no_named_dtype_are_not_offered(
    make_client: Callable[..., Client], spectrum: Path, photos: dict[str, bytes]
) -> None:
    """Complex numbers have no name in V2, nor floats of eight bits; uint16 has."""
    client = make_client(models_dir=spectrum)
    nodes = client.get("/v1/models/spectrum/graph").json()["nodes"]
    dtypes = {node["name"]: node["dtype"] for node in nodes}
    unnamed = {node["dtype"] for node in nodes if node["dtype"] and not node["extractable"]}
    assert unnamed == {"complex64", "float8_e4m3fn"}
    metadata = client.get("/v2/models/spectrum")
    assert metadata.status_code == 200, metadata.text
    response = client.post("/v1/models/spectrum/features?nodes=fft_rfft2", **sent(photos["chelsea"]))
    refused(response, "unknown-node", "complex64")
    whole = next(name for name, dtype in dtypes.items() if dtype == "uint16")
    for accept in ("application/json", NPY, NPZ, SAFETENSORS):
        answer = client.post(f"/v1/models/spectrum/features?nodes={whole}", **sent(photos["chelsea"], accept))
        assert answer.status_code == 200, answer.text
