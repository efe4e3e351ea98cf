"""Features over ASGI, against torchvision's own extractor asked for one node at a time."""

import base64
import io
import json
import os
import urllib.parse

import numpy as np
import PIL.Image
import pytest
import safetensors.torch
import torch
import torchvision

from service.codecs import responses
from service.engine.requests.admission.admission import Reservation
from tests.decoding import decoded
from tests.hostile_images import saved
from tests.seeded import seeded
from tests.wire import JPEG, NPY, NPZ, SAFETENSORS, b64, close, images, multipart, read, refused, sent

ONE_STEP = "/v1/models/resnet18/features?weights=random&nodes=layer3:C4,layer4:C5"
C4, C5 = "layer3.1.relu_1", "layer4.1.relu_1"
BLOCKS = [f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)]


@pytest.fixture(scope="module")
def expected(reference, photos):
    """C4 and C5 of all three photographs, [3, …]."""
    images = list(photos.values())
    return {"C4": reference("resnet18", C4, images), "C5": reference("resnet18", C5, images)}


def test_one_image(client, extractor, photos, expected):
    response = client.post(extractor, content=photos["chelsea"], headers=JPEG)
    document = response.json()
    assert response.headers["content-type"] == "application/json"
    assert (document["model"], document["weights"], document["images"]) == ("resnet18", "random", 1)
    assert document["extractor"] == client.get("/v1/extractors/r18").json()["id"]
    assert [(o["name"], o["node"], o["shape"], o["datatype"]) for o in document["outputs"]] == [
        ("C4", C4, [1, 256, 14, 14], "FP32"),
        ("C5", C5, [1, 512, 7, 7], "FP32"),
    ]
    for key, value in read(response).items():
        close(value, expected[key][:1])


def _data_urls(files):
    return {"json": {"images": [f"data:image/jpeg;base64,{b64(data)}" for data in files]}}


@pytest.mark.parametrize("body", [multipart, lambda files: {"json": images(files)}, _data_urls])
def test_several_images_in_the_order_sent(client, extractor, photos, expected, body):
    response = client.post(extractor, **body(list(photos.values())))
    assert response.json()["images"] == 3
    for key, value in read(response).items():
        close(value, expected[key])
    backwards = client.post(extractor, **body(list(photos.values())[::-1]))
    for key, value in read(backwards).items():
        close(value.flip(0), expected[key])


@pytest.mark.parametrize("content_type", ["Image/JPEG; charset=binary", "image/anything"])
def test_content_type_is_read_kindly(client, extractor, photos, expected, content_type):
    response = client.post(extractor, content=photos["chelsea"], headers={"content-type": content_type})
    close(read(response)["C5"], expected["C5"][:1])


as_named = pytest.mark.parametrize("form", [lambda x: x, lambda x: {"x": x}], ids=["npy", "safetensors"])


@as_named
def test_preprocessed_tensors(client, extractor, photos, expected, form):
    transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    batch = torch.stack([transform(decoded(data)) for data in photos.values()])
    for key, value in read(client.post(extractor, **sent(form(batch)))).items():
        close(value, expected[key])


@as_named
def test_images_as_uint8_tensors(client, extractor, photos, form):
    """As the same pixels in a lossless file."""
    pixels = np.stack([decoded(data).permute(1, 2, 0).numpy()[:300, :400] for data in photos.values()])
    found = read(client.post(extractor, **sent(form(torch.from_numpy(pixels)))))
    files = [saved(PIL.Image.fromarray(image), "PNG") for image in pixels]
    for key, value in read(client.post(extractor, **multipart(files))).items():
        close(found[key], value)


def test_safetensors(client, extractor, photos, expected):
    response = client.post(extractor, **sent(photos["chelsea"], SAFETENSORS))
    assert int(response.headers["content-length"]) == len(response.content)
    loaded = read(response)
    for key in ("C4", "C5"):
        close(loaded[key], expected[key][:1])
    length = int.from_bytes(response.content[:8], "little")
    metadata = json.loads(response.content[8 : 8 + length])["__metadata__"]
    assert (metadata["model"], metadata["weights"]) == ("resnet18", "random")
    assert json.loads(metadata["nodes"]) == {"C4": C4, "C5": C5}
    assert metadata["fingerprint"] == client.get("/v1/models/resnet18/nodes").json()["fingerprint"]


def test_npz(client, extractor, photos, expected):
    response = client.post(extractor, **sent(photos["chelsea"], NPZ))
    assert response.headers["content-type"] == NPZ
    loaded = read(response)
    assert list(loaded) == ["C4", "C5"]
    for key, value in loaded.items():
        close(value, expected[key][:1])


def test_npy_of_one_node(client, photos, expected):
    response = client.post("/v1/models/resnet18/features?weights=random&nodes=C5", **sent(photos["chelsea"], NPY))
    assert response.headers["content-type"] == NPY
    close(read(response), expected["C5"][:1])


def test_base64(client, extractor, photos, expected):
    response = client.post(f"{extractor}?encoding=base64", **sent(photos["chelsea"]))
    for output in response.json()["outputs"]:
        data = bytearray(base64.b64decode(output["data"], validate=True))
        close(np.frombuffer(data, "<f4").reshape(output["shape"]), expected[output["name"]][:1])


def test_heat_map(client, photos):
    url = "/v1/models/resnet18/features?weights=random&nodes=C4"
    response = client.post(url, **sent(photos["chelsea"], "image/png"))
    assert response.headers["content-type"] == "image/png"
    image = PIL.Image.open(io.BytesIO(response.content))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (224, 224))


@pytest.mark.parametrize(
    ("query", "function"),
    [
        ("pool=avg", lambda t: t.mean((2, 3))),
        ("pool=max", lambda t: t.amax((2, 3))),
        ("pool=gem", lambda t: t.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)),
        ("pool=avg&normalize=l2", lambda t: torch.nn.functional.normalize(t.mean((2, 3)), dim=1)),
    ],
)
def test_pooling(client, extractor, photos, expected, query, function):
    for key, value in read(client.post(f"{extractor}?{query}", **sent(photos["chelsea"]))).items():
        close(value, function(expected[key][:1]))


@pytest.mark.parametrize(("dtype", "name", "tolerance"), [("float16", "FP16", 1e-3), ("bfloat16", "BF16", 1e-2)])
def test_cast(client, extractor, photos, expected, dtype, name, tolerance):
    url = f"{extractor}?dtype={dtype}"
    for key, value in read(client.post(url, **sent(photos["chelsea"], SAFETENSORS))).items():
        assert str(value.dtype) == f"torch.{dtype}"
        close(value, expected[key][:1], tolerance)
    outputs = client.post(url, **sent(photos["chelsea"])).json()["outputs"]
    assert [output["datatype"] for output in outputs] == [name] * 2


def test_without_preprocessing(client, extractor, photos):
    """Pixels scaled to [0, 1] and nothing else."""
    model = seeded(torchvision.models.resnet18, weights=None)
    image = decoded(photos["chelsea"])
    pixels = image[None] / 255
    with torch.inference_mode():
        for layer in (model.conv1, model.bn1, model.relu, model.maxpool, model.layer1, model.layer2, model.layer3):
            pixels = layer(pixels)
    for given in (photos["chelsea"], image.permute(1, 2, 0)[None]):
        close(read(client.post(f"{extractor}?preprocess=none", **sent(given)))["C4"], pixels)


def test_one_step_is_the_extractor(client, extractor, photos):
    one, two = (client.post(url, **sent(photos["coffee"])).json() for url in (ONE_STEP, extractor))
    assert one == two


def test_any_names_of_a_node_give_its_values(client, photos, expected):
    url = f"/v1/models/resnet18/features?weights=random&nodes=layer4:a,C5:b,{C5}:c,layer3"
    found = read(client.post(url, **sent(photos["chelsea"])))
    assert list(found) == ["a", "b", "c", "layer3"]
    assert torch.equal(found["a"], found["b"])
    assert torch.equal(found["a"], found["c"])
    close(found["a"], expected["C5"][:1])
    close(found["layer3"], expected["C4"][:1])


def test_published_weights_from_the_cache(make_client, photos, reference, checkpoints):
    torch.manual_seed(1)
    state = torchvision.models.squeezenet1_1(weights=None).state_dict()
    torch.save(state, checkpoints / "squeezenet1_1-b8a52dc0.pth")
    response = make_client().post("/v1/models/squeezenet1_1/features?nodes=features.5", **sent(photos["chelsea"]))
    assert response.json()["weights"] == response.headers["x-fxserve-weights"] == "IMAGENET1K_V1"
    node = response.json()["outputs"][0]["node"]
    close(read(response)["features.5"], reference("squeezenet1_1", node, [photos["chelsea"]], state))


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
        for accept in ("application/json", SAFETENSORS):
            response = client.post(path, **sent(photos["chelsea"], accept))
            assert response.status_code == 200, response.text
            assert response.headers["x-fxserve-weights"].isascii()
            assert urllib.parse.unquote(response.headers["x-fxserve-weights"]) == f"file:{name}"
    found = read(response)["features.5"]
    close(found, reference("squeezenet1_1", "features.5", [photos["chelsea"]], state))
    gone = client.post("/v1/extractors", json=spec | {"weights": "file:gone", "name": "other"})
    assert f"file:{name}" in refused(gone, "unknown-weights")["available"]


@pytest.mark.parametrize("accept", ["application/json", SAFETENSORS, NPZ])
def test_random_weights_say_so_and_work_is_timed(client, extractor, photos, accept):
    response = client.post(extractor, **sent(photos["chelsea"], accept, **{"x-request-id": "my-id"}))
    assert response.headers["x-fxserve-weights"] == "random"
    assert response.headers["x-request-id"] == "my-id"
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert list(timing) == ["decode", "queue", "compute", "encode"]
    assert float(timing["compute"]) > 0


def test_response_text_counts_as_memory(make_client, photos):
    """As JSON an answer takes several times its raw bytes, as raw bytes nothing more."""
    client = make_client(max_inflight_bytes=12_000_000)
    path = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.0"  # 3.2 MB raw
    assert client.post(path, **sent(photos["chelsea"], SAFETENSORS)).status_code == 200
    refused(client.post(path, **sent(photos["chelsea"])), "request-too-large", status=413)
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
    photo = saved(PIL.Image.new("RGB", (1200, 900), "red"), "JPEG")
    path = "/v1/models/fasterrcnn_mobilenet_v3_large_320_fpn/features?weights=random&nodes=C4"
    response = client.post(path, **sent(photo, "image/png"))
    assert response.status_code == 200
    floats = 4 * 3 * 1200 * 900
    assert claimed[-1] > floats


def test_only_a_long_response_is_written_in_a_thread(client, photos, monkeypatch):
    engine = client.app.state.fxserve.engine
    in_thread, run = [], engine.run_in_encoder
    monkeypatch.setattr(engine, "run_in_encoder", lambda *work: in_thread.append(work[0]) or run(*work))
    many = ",".join(f"{block}.{name}" for block in BLOCKS for name in ("conv1", "bn1", "conv2", "bn2", "add"))
    for query, functions in (("flatten", []), ("layer4", [responses.write]), (f"{many}&pool=avg", [responses.write])):
        in_thread.clear()
        url = f"/v1/models/resnet18/features?weights=random&nodes={query}"
        assert client.post(url, content=photos["chelsea"], headers=JPEG).status_code == 200
        assert in_thread == functions
