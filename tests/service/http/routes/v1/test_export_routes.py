"""Downloads of extractors."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import zipfile

import httpx
import onnxruntime
import openvino
import pytest
import torch

from tests.fxcore.exports.conftest import in_this_process
from tests.wire import NPY, SAFETENSORS, created, read, refused, sent

__all__ = ["in_this_process"]


@pytest.fixture(scope="module")
def small(client):
    return created(client, model="mobilenet_v3_small", weights="random", return_nodes=["C4"], backend="eager")["id"]


def downloaded(client, id, model, format, suffix, kind):
    response = client.get(f"/v1/extractors/{id}/export", params={"format": format})
    assert response.status_code == 200, response.text
    assert response.headers["content-disposition"] == f'attachment; filename="{model}-{id}-{format}{suffix}"'
    assert response.headers["content-type"] == kind
    assert int(response.headers["content-length"]) == len(response.content)
    return response.content


def test_an_extractor_is_a_download(client, small):
    data = downloaded(client, small, "mobilenet_v3_small", "fx", ".zip", "application/zip")
    assert "mobilenet_v3_small_extractor/weights.safetensors" in zipfile.ZipFile(io.BytesIO(data)).namelist()


SIZED = {"image_size": [96, 160], "fit": "stretch"}
WHOLE = SIZED | {"return_nodes": ["features.9"]}
PART = {"image_size": [96, 160], "return_nodes": ["features.9"], "inputs": ["features.5"]}


@pytest.mark.parametrize(
    ("options", "described"),
    [
        (SIZED, {"fit": "stretch", "resize_size": [96, 160], "crop_size": None}),
        ({"image_size": 96, "fit": "native"}, {"fit": "native", "resize_size": [96], "crop_size": None}),
        ({"image_size": [96, 160]}, {"fit": None, "crop_size": [96, 160]}),
    ],
)
def test_the_description_has_the_extractors_preprocessing(client, options, described):
    spec = {"model": "squeezenet1_1", "weights": "random", "return_nodes": ["features.5"], "backend": "eager"}
    made = created(client, **spec, **options)["id"]
    export = zipfile.ZipFile(io.BytesIO(client.get(f"/v1/extractors/{made}/export").content))
    preprocessing = json.loads(export.read("squeezenet1_1_extractor/extractor.json"))["preprocessing"]
    assert {key: preprocessing.get(key) for key in described} == described


@pytest.mark.exhaustive
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("format", "file", "options", "shape"),
    [
        ("torch_export", (".pt2", "application/octet-stream"), WHOLE, (3, 96, 160)),
        ("onnx", (".onnx", "application/octet-stream"), WHOLE, (3, 96, 160)),
        ("openvino", (".zip", "application/zip"), PART, (128, 11, 19)),
    ],
)
def test_files_take_inputs_of_the_extractors_size(client, tmp_path, format, file, options, shape):
    made = created(client, model="squeezenet1_1", weights="random", backend="eager", **options)
    (key,), x = options["return_nodes"], torch.rand(3, *shape)
    expected = read(client.post(f"/v1/extractors/{made['id']}/features", **sent(x, SAFETENSORS)))[key]
    data = downloaded(client, made["id"], "squeezenet1_1", format, *file)
    about = given = returned = None
    if format == "torch_export":
        found = torch.export.load(io.BytesIO(data)).module()(x)[key]
    elif format == "onnx":
        session = onnxruntime.InferenceSession(data)
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
        about = json.loads(session.get_modelmeta().custom_metadata_map["fxserve"])
        given, returned = session.get_inputs()[0].shape, session.get_outputs()[0].shape
    else:
        zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
        compiled = openvino.Core().compile_model(
            next(tmp_path.rglob("model.xml")), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
        )
        found = torch.from_numpy(compiled(x.numpy())[0])
        about = json.loads((tmp_path / "extractor.json").read_text())
        given, returned = (
            [d.get_length() if d.is_static else None for d in port.partial_shape]
            for port in compiled.inputs + compiled.outputs
        )
    if about is not None:
        assert about["inputs"][0]["shape"] == [None, *given[1:]] == [None, *shape]
        assert about["outputs"][0]["shape"] == [None, *returned[1:]] == [None, *expected.shape[1:]]
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.exhaustive
def test_int8_on_eager_is_profiled_as_what_serves_and_not_exported(client):
    """Not as the float model that it was made of."""
    spec = {"model": "resnet18", "weights": "random", "return_nodes": ["C2"], "backend": "eager", "precision": "int8"}
    url = f"/v1/extractors/{created(client, **spec)['id']}"
    for format in ("fx", "onnx", "openvino", "torch_export"):
        response = client.get(f"{url}/export", params={"format": format})
        assert refused(response, "cannot-export", "export an extractor in float32")["format"] == format
    profile = client.get(f"{url}/graph?profile=true").json()["profile"]
    assert (profile["backend"], profile["precision"], profile["serving"]["backend"]) == ("eager", "int8", "eager")
    assert {"quantize_per_tensor", "layer1.0.conv1"} <= {node["name"] for node in profile["nodes"]}
    assert profile["serving"]["milliseconds"] > 0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("interpreted_children")
def test_features_stay_right_while_an_export_runs(client, small, photos):
    """torch.export patches what every thread runs, so it has to run in another process."""
    url, options = f"/v1/extractors/{small}/features", sent(photos["chelsea"], NPY)

    async def both() -> tuple[httpx.Response, list[httpx.Response]]:
        export = asyncio.create_task(client.http.get(f"/v1/extractors/{small}/export?format=torch_export"))
        responses = []
        while not export.done():
            responses.append(await client.http.post(url, **options))
            await asyncio.sleep(0.2)  # leave the other process a core
        return await export, responses

    expected = client.post(url, **options)
    exported, responses = client.run(both())
    assert exported.status_code == 200, exported.text
    assert len(responses) > 2
    assert all((a.status_code, a.content) == (200, expected.content) for a in responses)


def test_what_cannot_be_downloaded(client, small, monkeypatch):
    refused(client.get(f"/v1/extractors/{small}/export", params={"format": "coreml"}), "invalid-request")
    assert client.get("/v1/extractors/nothing/export").status_code == 404
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino" else find(name))
    document = refused(client.get(f"/v1/extractors/{small}/export?format=openvino"), "export-unavailable")
    assert (document["format"], document["missing"]) == ("openvino", ["openvino"])


def test_the_documentation_has_the_name_of_the_file_and_the_problems(client):
    export = client.get("/openapi.json").json()["paths"]["/v1/extractors/{extractor}/export"]["get"]["responses"]
    assert "Content-Disposition" in export["200"]["headers"]
    examples = export["422"]["content"]["application/problem+json"]["examples"]
    assert {"cannot-export", "export-unavailable"} <= examples.keys()
