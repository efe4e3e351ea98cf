"""Models of the operator's own whose inputs or parameters are not those of torchvision's models."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from captum.attr import IntegratedGradients
from torchvision.transforms import functional as F

from tests.service.conftest import Client
from tests.service.own_models import own_models
from tests.wire import NPY, SAFETENSORS, created, images, read, refused, sent

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels=3, dtype="float32"):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(channels, 8, 3, 2), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 3, 1)
        self.to(getattr(torch, dtype))

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu())

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(32 * 32, 5))

    def forward(self, x):
        return self.layers(x)

class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.second = nn.Conv2d(12, 3, 3)

    def forward(self, x):
        return self.second(nn.functional.pixel_unshuffle(x, 2))

class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 4)

    def forward(self, x):
        cells = self.first(x).unflatten(3, (-1, 4)).unflatten(2, (-1, 4))
        return self.second(cells.permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 8))

class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x):
        size = torch.fft.rfft2(self.first(x)).abs()
        return self.second(size.mean((2, 3)))

class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.second = nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        self.relu(x)
        return self.second(x.sum((2, 3)))

class Converting(Net):
    def forward(self, x):
        x = self.first(x)
        size = x.float().pow(2).mean(1, keepdim=True)
        x = x * torch.rsqrt(size + 1e-6).to(x.dtype)
        return self.second(x.double().cumsum(1).to(x.dtype))

class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.1, 2, 8, dtype=torch.float64)[:, None, None])

    def forward(self, x):
        x = self.first(x)
        return self.second((x * self.scale).to(x.dtype))

class PositionalOnly(Net):
    def forward(self, x, /, mask=None):
        return super().forward(x) if mask is None else x * mask

class KeywordOnly(Net):
    def forward(self, *, pixel_values, mask=None):
        return super().forward(pixel_values) if mask is None else pixel_values * mask
"""

ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grey": ("Net", {"channels": 1}),
    "two": ("Net", {"channels": 2}),
    "six": ("Net", {"channels": 6}),
    "mlp": ("Mlp", {}),
    "shuffled": ("Shuffled", {}),
    "windows": ("Windows", {}),
    "spectrum": ("Spectrum", {}),
    "summed": ("Summed", {}),
    "bfloat16": ("Net", {"dtype": "bfloat16"}),
    "float16": ("Net", {"dtype": "float16"}),
    "float64": ("Net", {"dtype": "float64"}),
    "converting": ("Converting", {}),
    "converting16": ("Converting", {"dtype": "bfloat16"}),
    "scaled": ("Scaled", {}),
    "positional": ("PositionalOnly", {}),
    "keyword": ("KeywordOnly", {}),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, ModuleType]]:
    folder = tmp_path_factory.mktemp("own inputs")
    text = "".join(
        f'[models.{name}]\nbuilder = "own_models:{builder}"\narguments = '
        f"{{ {', '.join(f'{key} = {value!r}' for key, value in arguments.items())} }}\n"
        "preprocessing = { resize_size = 36, crop_size = 32 }\n"
        for name, (builder, arguments) in ARGUMENTS.items()
    )
    with own_models(folder, MODULE, text) as module:
        client = Client(models_dir=folder)
        yield client, module
        client.close()


def reference(module: ModuleType, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    builder, arguments = ARGUMENTS[name]
    model = getattr(module, builder)(**arguments).eval()
    return (lambda x: model(pixel_values=x)) if name == "keyword" else model


def node_of(client: Client, name: str) -> str:
    last: str = client.get(f"/v1/models/{name}/nodes").json()["eval_nodes"][-1]
    return last


CHANNELS = {"grey": 1, "mlp": 1, "two": 2, "six": 6}
DTYPES = {
    "bfloat16": torch.bfloat16,
    "converting16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
V2 = {"bfloat16": "BF16", "converting16": "BF16", "float16": "FP16", "float64": "FP64"}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_tensors_give_the_modules_own_values(own: tuple[Client, ModuleType], name: str) -> None:
    client, module = own
    channels, dtype = CHANNELS.get(name, 3), DTYPES.get(name, torch.float32)
    x = torch.rand(2, channels, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(module, name)(x.to(dtype))
    response = client.post(f"/v1/models/{name}/features?nodes={node_of(client, name)}", **sent(x))
    assert response.status_code == 200, response.text
    (output,) = response.json()["outputs"]
    assert output["datatype"] == V2.get(name, "FP32")
    value = torch.tensor(output["data"], dtype=torch.float64).reshape(output["shape"])
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(value, expected.double(), rtol=tolerance, atol=tolerance)
    described = client.get(f"/v2/models/{name}").json()
    assert described["inputs"][-1]["shape"] == [-1, channels, 32, 32]
    assert (len(described["inputs"]) == 2) == (channels in (1, 3))
    assert described["outputs"][-1]["datatype"] == V2.get(name, "FP32")


def test_outputs_of_one_window_or_several(own: tuple[Client, ModuleType]) -> None:
    """A larger map has several windows, and so its value one more dimension."""
    client, _ = own
    made = created(client, model="windows", return_nodes={"second": "end"}, inputs=["first"])
    described = client.get(f"/v2/models/{made['id']}").json()
    assert described["inputs"] == [{"name": "first", "datatype": "FP32", "shape": [-1, 8, -1, -1]}]
    assert described["outputs"] == [{"name": "end", "datatype": "FP32", "shape": [-1, -1, -1]}]


@pytest.mark.parametrize("name", ["grey", "mlp", "shuffled", "float16", "keyword"])
def test_photographs(own: tuple[Client, ModuleType], photos: dict[str, bytes], name: str) -> None:
    """Those of one channel are PIL's grey ones, normalised by the averages of the mean and standard deviation."""
    client, module = own
    image = PIL.Image.open(io.BytesIO(photos["chelsea"])).convert("RGB")
    image = F.center_crop(F.resize(image, [36], antialias=True), [32])
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    if CHANNELS.get(name) == 1:
        image, mean, std = image.convert("L"), [sum(mean) / 3], [sum(std) / 3]
    x = F.normalize(F.to_tensor(image), mean, std)[None]
    with torch.no_grad():
        expected = reference(module, name)(x.to(DTYPES.get(name, torch.float32))).float()
    url = f"/v1/models/{name}/features?nodes={node_of(client, name)}&preprocess=pil&dtype=float32"
    value = read(client.post(url, **sent(photos["chelsea"], SAFETENSORS)))[node_of(client, name)]
    torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("query", ["features?nodes=second", "attributions?of=layers.1&method=gradient"])
def test_heat_maps_of_one_channel(own: tuple[Client, ModuleType], photos: dict[str, bytes], query: str) -> None:
    """They are over PIL's grey image, and the larger the value, the brighter the colour."""
    client, _ = own
    url = f"/v1/models/{'grey' if query.startswith('features') else 'mlp'}/{query}&preprocess=pil"
    strength = np.abs(read(client.post(url, **sent(photos["chelsea"], NPY)))[0]).mean(0)
    expected = np.asarray(PIL.Image.fromarray(strength).resize((32, 32), PIL.Image.Resampling.BICUBIC))
    image = PIL.Image.open(io.BytesIO(photos["chelsea"])).convert("RGB")
    grey = np.asarray(F.center_crop(F.resize(image, [36], antialias=True), [32]).convert("L"))
    drawn = np.asarray(PIL.Image.open(io.BytesIO(client.post(url, **sent(photos["chelsea"], "image/png")).content)))
    colours = (drawn - 0.35 * grey[..., None]).sum(2)
    shown = expected.clip(strength.min(), strength.max())
    ranks = [value.ravel().argsort().argsort() for value in (shown, colours)]
    assert np.corrcoef(ranks)[0, 1] > 0.999


def luma(photo: PIL.Image.Image) -> np.ndarray:
    """As in PIL's mode L, without its rounding."""
    return np.asarray(photo) @ np.array([0.299, 0.587, 0.114])


def test_one_channel_without_preprocessing(own: tuple[Client, ModuleType], photos: dict[str, bytes]) -> None:
    client, module = own
    grey = luma(PIL.Image.open(io.BytesIO(photos["chelsea"])).convert("RGB")) / 255
    with torch.no_grad():
        expected = reference(module, "grey")(torch.from_numpy(grey).float()[None, None])
    url = "/v1/models/grey/features?nodes=second&preprocess=none"
    answered = read(client.post(url, **sent(photos["chelsea"], SAFETENSORS)))
    torch.testing.assert_close(answered["second"], expected, rtol=1e-4, atol=1e-4)


def test_one_channel_padded(own: tuple[Client, ModuleType], photos: dict[str, bytes]) -> None:
    """With zeros, around PIL's resized image."""
    client, module = own
    image = PIL.Image.open(io.BytesIO(photos["chelsea"])).convert("RGB")
    height = round(image.height * 64 / image.width)
    grey = luma(image.resize((64, height), PIL.Image.Resampling.BILINEAR)) / 255
    mean, std = (0.485 + 0.456 + 0.406) / 3, (0.229 + 0.224 + 0.225) / 3
    top = (96 - height) // 2
    x = torch.zeros(1, 1, 96, 64)
    x[0, 0, top : top + height] = torch.from_numpy((grey - mean) / std)
    with torch.no_grad():
        expected = reference(module, "grey")(x)
    url = "/v1/models/grey/features?nodes=second&fit=pad&image_size=96x64&preprocess=pil"
    answered = read(client.post(url, **sent(photos["chelsea"], SAFETENSORS)))
    assert answered["valid_box"].tolist() == [[0, top, 64, top + height]]
    torch.testing.assert_close(answered["second"], expected, rtol=1e-4, atol=1e-4)


def test_normalization_of_one_channel_is_folded(own: tuple[Client, ModuleType], photos: dict[str, bytes]) -> None:
    client, _ = own
    values = []
    for transforms in ([], ["fold_normalization"]):
        made = created(client, model="grey", return_nodes=["second"], transforms=transforms)
        values.append(read(client.post(f"/v1/extractors/{made['id']}/features", **sent(photos["rocket"])))["second"])
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-4)


def test_normalization_of_other_channels_is_not_folded(own: tuple[Client, ModuleType]) -> None:
    client, _ = own
    spec = {"model": "six", "return_nodes": ["second"], "transforms": ["fold_normalization"]}
    refused(client.post("/v1/extractors?wait=60", json=spec), "cannot-transform", "input has 6 channels")


def test_photographs_have_no_six_channels(own: tuple[Client, ModuleType], photos: dict[str, bytes]) -> None:
    client, _ = own
    url = f"/v1/models/six/features?nodes={node_of(client, 'six')}"
    for accept in ("*/*", "image/png"):
        response = client.post(url, **sent(photos["chelsea"], accept))
        refused(response, "bad-tensor", "does not take single images; send tensors: x [None, 6, 32, 32]")
    pixels = np.zeros((1, 40, 40, 6), np.uint8)
    refused(client.post(url, **sent(pixels)), "bad-tensor", "send float32 [N, 6, H, W]")


@pytest.mark.parametrize(("name", "own_dtype"), [("converting", torch.float32), ("converting16", torch.bfloat16)])
def test_values_that_a_model_converts_have_the_dtype_that_is_described(
    own: tuple[Client, ModuleType], name: str, own_dtype: torch.dtype
) -> None:
    client, module = own
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    model = reference(module, name)
    with torch.no_grad():
        first = model.first(x.to(own_dtype))
        expected = {"first": first, "pow": first.float().pow(2)}
        summed = first * torch.rsqrt(expected["pow"].mean(1, keepdim=True) + 1e-6).to(own_dtype)
        expected["cumsum"] = summed.double().cumsum(1)
    made = created(client, model=name, return_nodes=["first", "pow", "cumsum"], backend="eager")
    dtypes = {key: str(value.dtype).removeprefix("torch.") for key, value in expected.items()}
    assert {output["key"]: output["dtype"] for output in made["outputs"]} == dtypes
    sizes = {key: value[0].nbytes for key, value in expected.items()}
    assert {output["key"]: output["bytes_per_image"] for output in made["outputs"]} == sizes
    found = read(client.post(f"/v1/extractors/{made['id']}/features", **sent(x, SAFETENSORS)))
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        torch.testing.assert_close(found[key], value)


def test_tensors_of_another_dtype_than_the_model_s_are_not_cast(own: tuple[Client, ModuleType]) -> None:
    client, module = own
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    model = reference(module, "scaled")
    with torch.no_grad():
        expected = model.first.bfloat16()(x.bfloat16()) * model.scale
    made = created(client, model="scaled", return_nodes=["mul"], backend="eager", precision="bfloat16")
    assert [output["dtype"] for output in made["outputs"]] == ["float64"]
    found = read(client.post(f"/v1/extractors/{made['id']}/features", **sent(x, SAFETENSORS)))
    torch.testing.assert_close(found["mul"], expected)


def test_numpy_has_no_bfloat16_whatever_the_values_have(
    own: tuple[Client, ModuleType], photos: dict[str, bytes]
) -> None:
    client, _ = own
    for query, status in (("nodes=cumsum", 200), ("nodes=cumsum&dtype=bfloat16", 406)):
        response = client.post(f"/v1/models/converting/features?{query}", **sent(photos["chelsea"], NPY))
        assert response.status_code == status, response.text[:500]


def test_backends_and_precisions_of_other_dtypes(own: tuple[Client, ModuleType]) -> None:
    client, _ = own
    spec = {"model": "float64", "return_nodes": [node_of(client, "float64")]}
    refused(client.post("/v1/extractors", json={**spec, "precision": "int8"}), "unsupported")
    made = created(client, **spec, precision="bfloat16")
    assert (made["state"], made["outputs"][0]["dtype"]) == ("ready", "bfloat16")


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_precision_that_an_operation_lacks_is_refused_before_the_first_request(
    own: tuple[Client, ModuleType], precision: str
) -> None:
    """torch has no FFT of these dtypes on CPUs. The layer before it has, and so has the one after it."""
    client, module = own
    model = reference(module, "spectrum")
    dtype = DTYPES[precision]
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with pytest.raises((NotImplementedError, RuntimeError)), torch.no_grad():
        torch.fft.rfft2(x.to(dtype))

    spec = {"model": "spectrum", "weights": "DEFAULT", "precision": precision}
    response = client.post("/v1/extractors", json={**spec, "return_nodes": ["second"]})
    document = refused(response, "backend-refused", f"spectrum cannot run in {precision}")
    assert "precision=float32" in document["detail"]
    created(client, **spec, return_nodes=["first"])
    after = created(client, **spec, return_nodes=["second"], inputs=["mean"])
    rows = torch.rand(2, 8, generator=torch.Generator().manual_seed(2))
    found = read(client.post(f"/v1/extractors/{after['id']}/features", **sent(rows, SAFETENSORS)))
    with torch.no_grad():
        expected = model.second.to(dtype)(rows.to(dtype))  # type: ignore[attr-defined]
    torch.testing.assert_close(found["second"], expected)


def test_integrated_gradients_before_a_sum_are_captums(own: tuple[Client, ModuleType]) -> None:
    """The gradients of all positions of a channel are one value, expanded."""
    client, module = own
    model = reference(module, "summed")
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    url = "/v1/models/summed/attributions?of=second&at=relu&target=1&method=integrated_gradients&steps=3"
    found = read(client.post(url, **sent(x, SAFETENSORS)))
    with torch.no_grad():
        before = model.first(x).relu()  # type: ignore[attr-defined]
    after = IntegratedGradients(lambda value: model.second(value.sum((2, 3))))  # type: ignore[attr-defined]
    expected = after.attribute(before, target=1, n_steps=3).float()
    torch.testing.assert_close(found["attribution"], expected, rtol=1e-4, atol=1e-6)


def test_a_node_that_only_writes_in_place_is_edited(own: tuple[Client, ModuleType], photos: dict[str, bytes]) -> None:
    """No node reads its value: what follows reads the tensor that it overwrote."""
    client, module = own
    model: Any = reference(module, "summed")
    url = "/v1/models/summed/features"
    value = read(client.post(f"{url}?nodes=first", **sent(photos["chelsea"])))["first"].relu()
    edits = [{"node": "relu", "channels": [1, 5], "scale": 0.5, "shift": 2.0}]
    found = read(client.post(f"{url}?nodes=second", json=images([photos["chelsea"]], edits=edits)))
    value[:, [1, 5]] = value[:, [1, 5]] * 0.5 + 2.0
    with torch.no_grad():
        expected = model.second(value.sum((2, 3)))
    torch.testing.assert_close(found["second"], expected, rtol=1e-4, atol=1e-4)
