"""NVIDIA's own client of the Open Inference Protocol, sync, InferAsync and aio, against a real server."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import ml_dtypes
import numpy as np
import PIL.Image
import pytest
import torchvision

triton = pytest.importorskip("tritonclient.http")
aio = pytest.importorskip("tritonclient.http.aio")
from tritonclient.utils import InferenceServerException  # noqa: E402

from tests.decoding import decoded  # noqa: E402

NODES = {"layer3": "C4", "layer4": "C5"}
SPEC = {"model": "resnet18", "weights": "random", "return_nodes": NODES}
EXACT = {"C4": "layer3.1.relu_1", "C5": "layer4.1.relu_1"}


@pytest.fixture(scope="module")
def triton_client(server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        client.load_model("r18-triton", config=json.dumps(SPEC))
        yield client


@pytest.fixture(scope="module")
def two(photos):
    return [photos["chelsea"], photos["coffee"]]


@pytest.fixture(scope="module")
def batch(two):
    """The photographs as torchvision preprocesses them."""
    transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    return np.stack([transform(decoded(data)).numpy() for data in two])


@pytest.fixture(scope="module")
def expected(reference, two):
    return {key: reference("resnet18", node, two).numpy() for key, node in EXACT.items()}


def image_input(images, binary=True):
    elements = images if binary else [base64.b64encode(data) for data in images]
    given = triton.InferInput("image", [len(images)], "BYTES")
    given.set_data_from_numpy(np.array(elements, dtype=object), binary_data=binary)
    return given


def tensor_input(array, datatype="FP32", binary=True, name="x"):
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def output(name, binary=True):
    return triton.InferRequestedOutput(name, binary_data=binary)


def agree(result, expected, keys=("C4", "C5"), relative=1e-5):
    for key in keys:
        value = result.as_numpy(key)
        assert value.shape == expected[key].shape
        assert np.abs(value.astype(np.float32) - expected[key]).max() <= relative * np.abs(expected[key]).max()


def test_server_and_model_metadata(triton_client):
    assert triton_client.is_server_live()
    assert triton_client.is_server_ready()
    assert triton_client.is_model_ready("r18-triton")
    assert triton_client.is_model_ready("r18-triton", "1")
    assert "binary_tensor_data" in triton_client.get_server_metadata()["extensions"]
    for version in ("", "1"):
        assert triton_client.get_model_metadata("r18-triton", version) == {
            "name": "r18-triton",
            "versions": ["1"],
            "platform": "torch.fx",
            "inputs": [
                {"name": "image", "datatype": "BYTES", "shape": [-1]},
                {"name": "x", "datatype": "FP32", "shape": [-1, 3, 224, 224]},
            ],
            "outputs": [
                {"name": "C4", "datatype": "FP32", "shape": [-1, 256, 14, 14]},
                {"name": "C5", "datatype": "FP32", "shape": [-1, 512, 7, 7]},
            ],
        }


@pytest.mark.parametrize(
    ("kind", "binary_in", "binary_out"), [("BYTES", True, False), ("BYTES", False, True), ("FP32", True, True)]
)
def test_inference(triton_client, two, batch, expected, kind, binary_in, binary_out):
    given = image_input(two, binary_in) if kind == "BYTES" else tensor_input(batch, binary=binary_in)
    wanted = [output("C5", binary_out), output("C4", binary_out)]
    result = triton_client.infer("r18-triton", [given], outputs=wanted, request_id="a-1")
    response = result.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == ("r18-triton", "1", "a-1")
    assert [o["name"] for o in response["outputs"]] == ["C5", "C4"]
    assert all(("binary_data_size" in o.get("parameters", {})) == binary_out for o in response["outputs"])
    agree(result, expected)


@pytest.mark.parametrize("binary", [True, False])
def test_inference_from_an_inner_node(triton_client, expected, binary):
    half = {**SPEC, "return_nodes": {"layer4": "C5"}, "inputs": ["layer3"]}
    triton_client.load_model("r18-half", config=json.dumps(half))
    [described] = triton_client.get_model_metadata("r18-half")["inputs"]
    assert described == {"name": "layer3", "datatype": "FP32", "shape": [-1, 256, -1, -1]}
    given = tensor_input(expected["C4"], binary=binary, name="layer3")
    agree(triton_client.infer("r18-half", [given], outputs=[output("C5", binary)]), expected, ["C5"])


def test_some_outputs_in_both_ways_at_once(triton_client, two, expected):
    result = triton_client.infer("r18-triton", [image_input(two)], outputs=[output("C4", False), output("C5", True)])
    agree(result, expected)
    only = triton_client.infer("r18-triton", [image_input(two)], outputs=[output("C5")])
    agree(only, expected, ["C5"])
    assert only.as_numpy("C4") is None


@pytest.mark.parametrize(
    ("datatype", "dtype", "relative"), [("FP16", np.float16, 1e-2), ("BF16", ml_dtypes.bfloat16, 5e-2)]
)
def test_half_precision_in_and_out(triton_client, batch, expected, datatype, dtype, relative):
    given = tensor_input(batch.astype(dtype), datatype)
    name = {"FP16": "float16", "BF16": "bfloat16"}[datatype]
    result = triton_client.infer("r18-triton", [given], parameters={"dtype": name})
    assert result.get_output("C5")["datatype"] == datatype
    assert result.as_numpy("C5").dtype == dtype
    agree(result, expected, relative=relative)


def test_uint8_images_are_preprocessed(triton_client, two, expected):
    pixels = np.asarray(PIL.Image.open(io.BytesIO(two[0])).convert("RGB"))[None]
    result = triton_client.infer("r18-triton", [tensor_input(pixels, "UINT8")])
    agree(result, {key: value[:1] for key, value in expected.items()})


def test_infer_async(triton_client, two, expected):
    handles = [triton_client.async_infer("r18-triton", [image_input(two)]) for _ in range(4)]
    for handle in handles:
        agree(handle.get_result(), expected)


def test_aio(server, triton_client, two, batch, expected):
    async def main():
        async with aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert await client.is_model_ready("r18-triton")
            assert any(m["name"] == "resnet50" for m in await client.get_model_repository_index())
            given = [
                image_input(two),
                tensor_input(batch),
                image_input(two, binary=False),
                tensor_input(batch, binary=False),
            ]
            for result in await asyncio.gather(*(client.infer("r18-triton", [one]) for one in given)):
                agree(result, expected)
            packed = await client.infer(
                "r18-triton", [given[0]], request_compression_algorithm="gzip", response_compression_algorithm="deflate"
            )
            agree(packed, expected)
            plain = await client.infer("r18-triton", [given[0]], outputs=[output("C5", False)])
            agree(plain, expected, ["C5"])

    asyncio.run(main())


def test_a_raw_body(triton_client, two, batch, expected):
    """The client can make the binary part; a body of nothing else needs a request of our own."""
    for raw in (two[0], batch[:1].tobytes()):
        response = triton_client._post(
            "v2/models/r18-triton/infer", raw, {"Inference-Header-Content-Length": "0"}, None
        )
        assert response.status_code == 200
        length = int(response.get("inference-header-content-length"))
        result = triton.InferenceServerClient.parse_response_body(response.read(), header_length=length)
        agree(result, {key: value[:1] for key, value in expected.items()})


def test_the_repository(triton_client, two):
    def state(name):
        return {entry["name"]: entry["state"] for entry in triton_client.get_model_repository_index()}.get(name)

    assert state("r18-triton") == "READY"
    triton_client.unload_model("squeezenet1_1")  # other tests may have asked this server for it
    assert state("squeezenet1_1") == "UNAVAILABLE"
    assert not triton_client.is_model_ready("squeezenet1_1")
    triton_client.load_model("squeezenet1_1")
    assert triton_client.is_model_ready("squeezenet1_1")
    assert state("squeezenet1_1") == "READY"
    declared = {o["name"]: o["shape"] for o in triton_client.get_model_metadata("squeezenet1_1")["outputs"]}
    result = triton_client.infer("squeezenet1_1", [image_input(two)])
    assert {o["name"]: [-1, *o["shape"][1:]] for o in result.get_response()["outputs"]} == declared
    triton_client.unload_model("squeezenet1_1")
    assert not triton_client.is_model_ready("squeezenet1_1")
    triton_client.load_model("passing", config=json.dumps(SPEC | {"return_nodes": ["layer1"]}))
    assert state("passing") == "READY"
    triton_client.unload_model("passing")
    assert state("passing") == "UNAVAILABLE"
    assert not triton_client.is_model_ready("passing")
    triton_client.load_model("passing")  # as it was
    assert [o["name"] for o in triton_client.get_model_metadata("passing")["outputs"]] == ["layer1"]
    assert triton_client.is_model_ready("passing")


def test_a_model_by_its_name_serves_any_node(triton_client, reference, two):
    result = triton_client.infer(
        "resnet18",
        [image_input(two)],
        outputs=[output("layer2.0.bn1"), output("C5")],
        parameters={"weights": "random", "pool": "avg"},
    )
    for key, node in (("layer2.0.bn1", "layer2.0.bn1"), ("C5", EXACT["C5"])):
        expected = reference("resnet18", node, two).mean((2, 3)).numpy()
        assert np.abs(result.as_numpy(key) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_model_without_levels_serves_its_last_value(triton_client, two):
    [declared] = triton_client.get_model_metadata("timm.test_vit")["outputs"]
    assert declared == {"name": "head", "datatype": "FP32", "shape": [-1, 1000]}


def test_errors(triton_client, two):
    def fails(status, message, **options):
        with pytest.raises(InferenceServerException, match=message) as caught:
            triton_client.infer(**{"model_name": "r18-triton", "inputs": [image_input(two)]} | options)
        assert caught.value.status() == str(status)

    fails(404, "did you mean.*resnet50", model_name="resnet5")
    fails(400, "no output 'C9'; it has C4, C5", outputs=[output("C9")])
    fails(400, "image 1: these 5 bytes are not an image", inputs=[image_input([two[0], b"hello"])])
    fails(400, "BF16, which JSON cannot represent", outputs=[output("C5", False)], parameters={"dtype": "bfloat16"})
    fails(400, "classification is not available", outputs=[triton.InferRequestedOutput("C5", class_count=3)])
    fails(504, "deadline", timeout=1)
    fails(503, "weights=random", model_name="alexnet")
    with pytest.raises(InferenceServerException, match="no node 'layer9'"):
        triton_client.load_model("broken", config=json.dumps(SPEC | {"return_nodes": ["layer9"]}))
    with pytest.raises(InferenceServerException, match="no extractor or model"):
        triton_client.load_model("nothing-like-it")
    shared = triton.InferInput("image", [1], "BYTES")
    shared.set_shared_memory("region", 10)
    fails(400, "shared memory", inputs=[shared])
