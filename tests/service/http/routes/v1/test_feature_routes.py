"""Features over ASGI, against torchvision's own extractor asked for one node at a time."""

import base64
import io
import json
import os
import urllib.parse

import numpy as np
import PIL.Image
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import torchvision
from torchvision.transforms.functional import pil_to_tensor

from service.engine.requests.admission.admission import Reservation
from tests.decoding import decoded
from tests.seeded import seeded

JPEG = {"content-type": "image/jpeg"}
ONE_STEP = "/v1/models/resnet18/features?weights=random&nodes=layer3:C4,layer4:C5"
C4, C5 = "layer3.1.relu_1", "layer4.1.relu_1"


@pytest.fixture(scope="module")
def expected(reference, photos):
    """C4 and C5 of all three photographs, [3, …]."""
    images = list(photos.values())
    return {"C4": reference("resnet18", C4, images), "C5": reference("resnet18", C5, images)}


def close(actual, expected, tolerance=1e-5):
    """Equal to within ``tolerance`` of the largest value: a batch of another size is summed in another order."""
    actual = torch.tensor(actual) if isinstance(actual, np.ndarray) else actual
    assert actual.shape == expected.shape
    assert (actual.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()


def tensors(response):
    """The outputs of a JSON answer."""
    assert response.status_code == 200, response.text
    return {o["name"]: torch.tensor(o["data"]).reshape(o["shape"]) for o in response.json()["outputs"]}


def b64(data):
    return base64.b64encode(data).decode()


def test_one_image(client, extractor, photos, reference):
    response = client.post(extractor, content=photos["chelsea"], headers=JPEG)
    document = response.json()
    assert response.headers["content-type"] == "application/json"
    assert (document["model"], document["weights"], document["images"]) == ("resnet18", "random", 1)
    assert document["extractor"] == client.get("/v1/extractors/r18").json()["id"]
    assert [(o["name"], o["node"], o["shape"], o["datatype"]) for o in document["outputs"]] == [
        ("C4", C4, [1, 256, 14, 14], "FP32"),
        ("C5", C5, [1, 512, 7, 7], "FP32"),
    ]
    for key, node in (("C4", C4), ("C5", C5)):
        close(tensors(response)[key], reference("resnet18", node, [photos["chelsea"]]))


def _multipart(images):
    return {"files": [("images", (f"{i}.jpg", data, "image/jpeg")) for i, data in enumerate(images)]}


def _json(images):
    return {"json": {"images": [b64(data) for data in images]}}


def _data_urls(images):
    return {"json": {"images": [f"data:image/jpeg;base64,{b64(data)}" for data in images]}}


def _pixels(images):
    """uint8 [N, H, W, 3] of photographs cut to one size."""
    return np.stack([np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))[:300, :400] for data in images])


@pytest.mark.parametrize("body", [_multipart, _json, _data_urls])
def test_several_images_in_the_order_sent(client, extractor, photos, expected, body):
    response = client.post(extractor, **body(list(photos.values())))
    assert response.json()["images"] == 3
    for key, value in tensors(response).items():
        close(value, expected[key])
    backwards = client.post(extractor, **body(list(photos.values())[::-1]))
    for key, value in tensors(backwards).items():
        close(value.flip(0), expected[key])


@pytest.mark.parametrize("content_type", ["Image/JPEG; charset=binary", "image/anything"])
def test_content_type_is_read_kindly(client, extractor, photos, expected, content_type):
    response = client.post(extractor, content=photos["chelsea"], headers={"content-type": content_type})
    close(tensors(response)["C5"], expected["C5"][:1])


@pytest.mark.parametrize("kind", ["x-npy", "x-safetensors"])
def test_preprocessed_tensors(client, extractor, photos, expected, kind):
    transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    batch = torch.stack([transform(decoded(data)) for data in photos.values()]).numpy()
    response = client.post(extractor, content=_file(kind, batch), headers={"content-type": f"application/{kind}"})
    for key, value in tensors(response).items():
        close(value, expected[key])


@pytest.mark.parametrize("kind", ["x-npy", "x-safetensors"])
def test_images_as_uint8_tensors(client, extractor, photos, kind):
    """As the same pixels in a lossless file."""
    pixels = _pixels(photos.values())
    response = client.post(extractor, content=_file(kind, pixels), headers={"content-type": f"application/{kind}"})
    files = []
    for image in pixels:
        buffer = io.BytesIO()
        PIL.Image.fromarray(image).save(buffer, "PNG")
        files.append(buffer.getvalue())
    for key, value in tensors(client.post(extractor, **_multipart(files))).items():
        close(tensors(response)[key], value)


def _file(kind, array):
    if kind == "x-safetensors":
        return safetensors.numpy.save({"x": array})
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_safetensors(client, extractor, photos, expected):
    headers = {**JPEG, "accept": "application/x-safetensors"}
    response = client.post(extractor, content=photos["chelsea"], headers=headers)
    assert response.headers["content-type"] == "application/x-safetensors"
    assert int(response.headers["content-length"]) == len(response.content)
    loaded = safetensors.torch.load(response.content)
    for key in ("C4", "C5"):
        close(loaded[key], expected[key][:1])
    length = int.from_bytes(response.content[:8], "little")
    metadata = json.loads(response.content[8 : 8 + length])["__metadata__"]
    assert (metadata["model"], metadata["weights"]) == ("resnet18", "random")
    assert json.loads(metadata["nodes"]) == {"C4": C4, "C5": C5}
    assert metadata["fingerprint"] == client.get("/v1/models/resnet18/nodes").json()["fingerprint"]


def test_npz(client, extractor, photos, expected):
    response = client.post(extractor, content=photos["chelsea"], headers={**JPEG, "accept": "application/x-npz"})
    assert response.headers["content-type"] == "application/x-npz"
    loaded = np.load(io.BytesIO(response.content), allow_pickle=False)
    assert loaded.files == ["C4", "C5"]
    for key in loaded.files:
        close(loaded[key], expected[key][:1])


def test_npy_of_one_node(client, photos, expected):
    url = "/v1/models/resnet18/features?weights=random&nodes=C5"
    response = client.post(url, content=photos["chelsea"], headers={**JPEG, "accept": "application/x-npy"})
    assert response.headers["content-type"] == "application/x-npy"
    close(np.load(io.BytesIO(response.content), allow_pickle=False), expected["C5"][:1])


def test_base64(client, extractor, photos, expected):
    response = client.post(f"{extractor}?encoding=base64", content=photos["chelsea"], headers=JPEG)
    for output in response.json()["outputs"]:
        read = np.frombuffer(base64.b64decode(output["data"], validate=True), "<f4").reshape(output["shape"])
        close(read, expected[output["name"]][:1])


def test_heat_map(client, photos):
    url = "/v1/models/resnet18/features?weights=random&nodes=C4"
    response = client.post(url, content=photos["chelsea"], headers={**JPEG, "accept": "image/png"})
    assert response.headers["content-type"] == "image/png"
    image = PIL.Image.open(io.BytesIO(response.content))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (224, 224))


@pytest.mark.parametrize(
    ("pool", "function"),
    [
        ("avg", lambda t: t.mean((2, 3))),
        ("max", lambda t: t.amax((2, 3))),
        ("gem", lambda t: t.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)),
    ],
)
def test_pooling(client, extractor, photos, expected, pool, function):
    response = client.post(f"{extractor}?pool={pool}", content=photos["chelsea"], headers=JPEG)
    for key, value in tensors(response).items():
        close(value, function(expected[key][:1]))


def test_unit_length(client, extractor, photos, expected):
    response = client.post(f"{extractor}?pool=avg&normalize=l2", content=photos["chelsea"], headers=JPEG)
    for key, value in tensors(response).items():
        close(value, torch.nn.functional.normalize(expected[key][:1].mean((2, 3)), dim=1))
        assert value.norm().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_cast(client, extractor, photos, expected, dtype, tolerance):
    headers = {**JPEG, "accept": "application/x-safetensors"}
    response = client.post(f"{extractor}?dtype={dtype}", content=photos["chelsea"], headers=headers)
    for key, value in safetensors.torch.load(response.content).items():
        assert str(value.dtype) == f"torch.{dtype}"
        close(value, expected[key][:1], tolerance)
    names = [
        o["datatype"]
        for o in client.post(f"{extractor}?dtype={dtype}", content=photos["chelsea"], headers=JPEG).json()["outputs"]
    ]
    assert names == [{"float16": "FP16", "bfloat16": "BF16"}[dtype]] * 2


def test_without_preprocessing(client, extractor, photos):
    """Pixels scaled to [0, 1] and nothing else."""
    model = seeded(torchvision.models.resnet18, weights=None)
    pixels = pil_to_tensor(PIL.Image.open(io.BytesIO(photos["chelsea"])))[None].float() / 255
    with torch.inference_mode():
        for layer in (model.conv1, model.bn1, model.relu, model.maxpool, model.layer1, model.layer2, model.layer3):
            pixels = layer(pixels)
    response = client.post(f"{extractor}?preprocess=none", content=photos["chelsea"], headers=JPEG)
    close(tensors(response)["C4"], pixels)


def test_one_step_is_the_extractor(client, extractor, photos):
    one = client.post(ONE_STEP, content=photos["coffee"], headers=JPEG).json()
    two = client.post(extractor, content=photos["coffee"], headers=JPEG).json()
    assert one == two


def test_any_names_of_a_node_give_its_values(client, photos, expected):
    url = f"/v1/models/resnet18/features?weights=random&nodes=layer4:a,C5:b,{C5}:c,layer3"
    response = client.post(url, content=photos["chelsea"], headers=JPEG)
    found = tensors(response)
    assert list(found) == ["a", "b", "c", "layer3"]
    assert torch.equal(found["a"], found["b"])
    assert torch.equal(found["a"], found["c"])
    close(found["a"], expected["C5"][:1])
    close(found["layer3"], expected["C4"][:1])


def test_published_weights_from_the_cache(make_client, photos, reference, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    torch.manual_seed(1)
    state = torchvision.models.squeezenet1_1(weights=None).state_dict()
    folder = tmp_path / "hub/checkpoints"
    folder.mkdir(parents=True)
    torch.save(state, folder / "squeezenet1_1-b8a52dc0.pth")
    response = make_client().post(
        "/v1/models/squeezenet1_1/features?nodes=features.5", content=photos["chelsea"], headers=JPEG
    )
    assert response.json()["weights"] == response.headers["x-fxserve-weights"] == "IMAGENET1K_V1"
    node = response.json()["outputs"][0]["node"]
    close(tensors(response)["features.5"], reference("squeezenet1_1", node, [photos["chelsea"]], state))


def test_weights_files_of_any_name(make_client, photos, reference, tmp_path):
    """Headers are ASCII, names of files are not."""
    name = "重み, 100 %.safetensors"
    torch.manual_seed(2)
    state = torchvision.models.squeezenet1_1(weights=None).state_dict()
    safetensors.torch.save_file(state, tmp_path / name)
    (tmp_path / os.fsdecode(b"no text: \xe9.safetensors")).write_bytes(b"")
    client = make_client(weights_dir=tmp_path)
    spec = {"model": "squeezenet1_1", "weights": f"file:{name}", "return_nodes": ["features.5"], "name": "odd"}
    assert client.post("/v1/extractors", json=spec).json()["weights"] == f"file:{name}"
    for path in ("/v2/models/odd/infer", "/v1/extractors/odd/features"):
        for accept in ("application/json", "application/x-safetensors"):
            response = client.post(path, content=photos["chelsea"], headers=JPEG | {"accept": accept})
            assert response.status_code == 200, response.text
            assert response.headers["x-fxserve-weights"].isascii()
            assert urllib.parse.unquote(response.headers["x-fxserve-weights"]) == f"file:{name}"
    found = safetensors.torch.load(response.content)["features.5"]
    close(found, reference("squeezenet1_1", "features.5", [photos["chelsea"]], state))
    refused = client.post("/v1/extractors", json=spec | {"weights": "file:gone", "name": "other"})
    assert refused.status_code == 422
    assert f"file:{name}" in refused.json()["available"]


@pytest.mark.parametrize("accept", ["application/json", "application/x-safetensors", "application/x-npz"])
def test_random_weights_say_so_and_work_is_timed(client, extractor, photos, accept):
    headers = {**JPEG, "accept": accept, "x-request-id": "my-id"}
    response = client.post(extractor, content=photos["chelsea"], headers=headers)
    assert response.headers["x-fxserve-weights"] == "random"
    assert response.headers["x-request-id"] == "my-id"
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert list(timing) == ["decode", "queue", "compute", "encode"]
    assert float(timing["compute"]) > 0


def test_response_text_counts_as_memory(make_client, photos):
    """As JSON an answer takes several times its raw bytes, as raw bytes nothing more."""
    client = make_client(max_inflight_bytes=12_000_000)
    path = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.0"  # 3.2 MB raw
    headers = {**JPEG, "accept": "application/x-safetensors"}
    assert client.post(path, content=photos["chelsea"], headers=headers).status_code == 200
    refused = client.post(path, content=photos["chelsea"], headers=JPEG)
    assert (refused.status_code, refused.json()["type"]) == (413, "/problems/request-too-large")
    infer = "/v2/models/squeezenet1_1/infer"
    document = {"parameters": {"weights": "random"}, "outputs": [{"name": "features.0"}]}
    document["inputs"] = [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [b64(photos["chelsea"])]}]
    assert client.post(infer, json=document).status_code == 413
    document["parameters"]["binary_data_output"] = True
    assert client.post(infer, json=document).status_code == 200
    assert client.app.state.fxserve.engine.admission.bytes == 0


def test_a_heat_map_claims_the_memory_of_its_preprocessing(client, monkeypatch):
    """A detector's images are normalised at their own size, whatever the size of the drawing."""
    claimed = []
    claim = Reservation.claim
    monkeypatch.setattr(Reservation, "claim", lambda self, amount: (claimed.append(amount), claim(self, amount))[1])
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (1200, 900), "red").save(buffer, "JPEG")
    path = "/v1/models/fasterrcnn_mobilenet_v3_large_320_fpn/features?weights=random&nodes=C4"
    response = client.post(path, content=buffer.getvalue(), headers={**JPEG, "accept": "image/png"})
    assert response.status_code == 200
    floats = 4 * 3 * 1200 * 900
    assert claimed[-1] > floats
