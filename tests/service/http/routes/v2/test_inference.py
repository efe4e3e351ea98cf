"""The Open Inference Protocol's routes: what they take and answer, and that no fault of a client gets a 5xx."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import tracemalloc
import zlib

import numpy as np
import PIL.Image
import pytest
import torch

from service.http.scope import Caller
from tests.hostile_images import saved
from tests.wire import b64

INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def tiny(client):
    """The service with an extractor ``tiny``."""
    config = {"model": "squeezenet1_1", "weights": "random", "return_nodes": {"features.2": "a", "features.3": "b"}}
    response = load(client, "tiny", config)
    assert response.status_code == 200, response.text
    return client


PNG = saved(PIL.Image.new("RGB", (8, 8), (200, 10, 10)), "PNG")
NO_HEAD = {"Inference-Header-Content-Length": "0"}


def load(client, name, config):
    sent = {"parameters": {"config": json.dumps(config)}}
    return client.post(f"/v2/repository/models/{name}/load", json=sent)


def binary(document, *tensors, **headers):
    """A request's body with raw tensors, and its headers."""
    head = json.dumps(document).encode()
    return {
        "content": head + b"".join(tensors),
        "headers": {"Inference-Header-Content-Length": str(len(head)), **headers},
    }


def x_input(**changes):
    shape = [1, 3, 16, 16]
    size = {"binary_data_size": 4 * 3 * 16 * 16}
    return {"name": "x", "datatype": "FP32", "shape": shape, "parameters": size} | changes


RAW = np.zeros((1, 3, 16, 16), np.float32).tobytes()


def test_servers_own_routes(client):
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data", "model_repository"]
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert set(client.get("/v2/nothing").json()) == {"error"}


def test_percent_encoded_names(tiny):
    assert tiny.get("/v2/models/t%69n%79").json()["name"] == "tiny"
    assert tiny.get("/v2/models/a%2Fb%20c").status_code == 404


def test_a_models_name_is_compared_with_no_extractors(tiny, monkeypatch):
    """Which would take as long as there are extractors, for every request that asks for a model by its name."""
    compared = []
    monkeypatch.setattr(
        "service.engine.lifecycle.records.get_close_matches", lambda *args, **options: compared.append(args) or []
    )
    assert tiny.get("/v2/models/resnet18").json()["name"] == "resnet18"
    assert not compared
    assert tiny.get("/v2/models/tinny").status_code == 404
    assert len(compared) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        (
            "fcn_resnet50",
            [("image", "BYTES", [-1]), ("x", "FP32", [-1, 3, -1, -1])],
            {"C1": [-1, 64, -1, -1], "C2": [-1, 256, -1, -1], "C3": [-1, 2048, -1, -1]},
        ),
        ("raft_small", [("image", "BYTES", [-1]), ("image1", "FP32", [-1, 3, -1, -1])], None),
        ("r3d_18", [("x", "FP32", [-1, 3, 16, 112, 112])], None),
        ("vit_b_16", [("image", "BYTES", [-1]), ("x", "FP32", [-1, 3, 224, 224])], {"heads.head": [-1, 1000]}),
    ],
)
def test_metadata_of_models(client, model, inputs, outputs):
    response = client.get(f"/v2/models/{model}").json()
    found = [(i["name"], i["datatype"], i["shape"]) for i in response["inputs"]]
    assert found == inputs
    if outputs is not None:
        assert {o["name"]: o["shape"] for o in response["outputs"]} == outputs


def test_metadata_is_what_inference_gives(tiny):
    declared = {o["name"]: (o["datatype"], o["shape"][1:]) for o in tiny.get("/v2/models/tiny").json()["outputs"]}
    given = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3, 224, 224], "data": [0.5] * (2 * 3 * 224**2)}]}
    outputs = tiny.post(INFER, json=given).json()["outputs"]
    assert {o["name"]: (o["datatype"], o["shape"][1:]) for o in outputs} == declared
    assert {o["shape"][0] for o in outputs} == {2}


def test_json_and_raw_bytes_give_the_same(tiny):
    values = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)).numpy()
    wanted = [{"name": "b", "parameters": {"binary_data": True}}]
    in_json = x_input(parameters={}, data=values.tolist())
    responses = [
        tiny.post(INFER, json={"inputs": [in_json], "outputs": wanted}),
        tiny.post(INFER, **binary({"inputs": [x_input()], "outputs": wanted}, values.tobytes())),
        tiny.post(INFER, json={"inputs": [in_json], "outputs": [{"name": "b"}]}),
    ]
    [first, second] = [a.content[int(a.headers["inference-header-content-length"]) :] for a in responses[:2]]
    assert responses[0].headers["content-type"] == "application/octet-stream"
    assert first == second != b""
    [output] = responses[2].json()["outputs"]
    assert np.array_equal(np.array(output["data"], np.float32), np.frombuffer(first, "<f4"))


def test_unrequested_outputs_do_not_count_against_the_response_limit(make_client):
    small = make_client(max_response_bytes=100_000)
    config = {"model": "squeezenet1_1", "weights": "random", "return_nodes": {"features.2": "a", "flatten": "b"}}
    assert load(small, "tiny", config).is_success
    image = {"name": "x", "datatype": "FP32", "shape": [1, 3, 224, 224], "data": [0.5] * (3 * 224**2)}
    assert small.post(INFER, json={"inputs": [image]}).status_code == 413
    [output] = small.post(INFER, json={"inputs": [image], "outputs": [{"name": "b"}]}).json()["outputs"]
    assert (output["name"], output["shape"]) == ("b", [1, 1000])


def test_a_raw_tensor_and_a_raw_image(tiny):
    by_tensor = tiny.post(INFER, content=np.ones((2, 3, 224, 224), np.float32).tobytes(), headers=NO_HEAD)
    length = int(by_tensor.headers["inference-header-content-length"])
    head = json.loads(by_tensor.content[:length])
    assert [o["shape"][0] for o in head["outputs"]] == [2, 2]
    assert len(by_tensor.content) == length + sum(o["parameters"]["binary_data_size"] for o in head["outputs"])
    assert tiny.post(INFER, content=PNG, headers=NO_HEAD).status_code == 200


@pytest.mark.parametrize("length", [{}, NO_HEAD], ids=["no header", "header 0"])
def test_what_says_it_is_an_image_is_one_whatever_its_size(tiny, length):
    # A row of the model's input; what follows its end is not of a PNG.
    file = PNG + bytes(-len(PNG) % (4 * 3 * 224**2))
    responses = [
        tiny.post(INFER, content=data, headers={"content-type": "image/png", **length}) for data in (PNG, file)
    ]
    assert responses[0].status_code == 200
    assert responses[0].content == responses[1].content


@pytest.mark.parametrize("sent", ["gzip", "deflate", "raw deflate", ""])
@pytest.mark.parametrize("asked", ["gzip", "deflate", "gzip, deflate, br", "gzip;q=0"])
def test_compression(tiny, sent, asked):
    request = raw(RAW)
    bare = zlib.compressobj(wbits=-15)
    pack = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "raw deflate": lambda data: bare.compress(data) + bare.flush(),
        "": bytes,
    }
    request["content"] = pack[sent](request["content"])
    request["headers"] |= {"Accept-Encoding": asked}
    if sent:
        request["headers"]["Content-Encoding"] = sent.split()[-1]
    response = tiny.post(INFER, **request)
    assert response.status_code == 200
    assert response.headers.get("content-encoding") == (asked if asked in ("gzip", "deflate") else None)
    assert [o["name"] for o in response.json()["outputs"]] == ["a", "b"]


def test_a_compressed_response_is_claimed(make_client):
    """It is made while the uncompressed one, of nine megabytes, is in memory."""
    small = make_client(max_inflight_bytes=16_000_000)
    x = np.zeros((1, 3, 384, 384), np.float32)
    size = {"binary_data_size": x.nbytes}
    request = binary(
        {
            "inputs": [x_input(shape=list(x.shape), parameters=size)],
            "outputs": [{"name": "features.0", "parameters": {"binary_data": True}}],
            "parameters": {"weights": "random"},
        },
        x.tobytes(),
    )
    path = "/v2/models/squeezenet1_1/infer"
    assert len(small.post(path, **request).content) > 9_000_000
    request["headers"]["Accept-Encoding"] = "gzip"
    assert small.post(path, **request).status_code == 413
    ample = make_client(max_inflight_bytes=24_000_000)
    assert ample.post(path, **request).headers["content-encoding"] == "gzip"


def test_encodings_on_two_lines_are_the_same_as_on_one(tiny):
    request = raw(RAW)
    lines = [("accept-encoding", "gzip"), ("accept-encoding", "deflate")]
    response = tiny.post(INFER, content=request["content"], headers=[*request["headers"].items(), *lines])
    assert response.status_code == 200
    assert "content-encoding" not in response.headers
    lines = [("content-encoding", "gzip"), ("content-encoding", "gzip")]
    packed = gzip.compress(gzip.compress(request["content"]))
    assert tiny.post(INFER, content=packed, headers=[*request["headers"].items(), *lines]).status_code == 415


def in_json(**changes):
    """A request with one input whose values are in the document."""
    return {"json": {"inputs": [x_input(parameters={}, **changes)]}}


def raw(*tensors, more=None, **changes):
    """A request with one input whose values follow the document, which has ``more``."""
    return binary({"inputs": [x_input(**changes)]} | (more or {}), *tensors)


def bytes_input(size, *tensors):
    image = {"name": "image", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}}
    return binary({"inputs": [image]}, *tensors)


BAD = {
    "no JSON": {"content": b"hello"},
    "nothing": {"content": b""},
    "no object": {"content": b"[]"},
    "no inputs": {"json": {}},
    "an empty list": {"json": {"inputs": []}},
    "nested": {"content": b'{"inputs":' + b"[" * 60_000},
    "many values": {"content": b'{"inputs":[' + b"{}," * 200_000 + b"{}]}"},
    "many brackets": {"content": b'{"id":"' + b"[x" * 200_000 + b'"}'},
    "long header": binary({}, **{"Inference-Header-Content-Length": "100000"}),
    "negative header": binary({}, **{"Inference-Header-Content-Length": "-1"}),
    "odd header": binary({}, **{"Inference-Header-Content-Length": "1_0"}),
    "huge header": binary({}, **{"Inference-Header-Content-Length": "9" * 5000}),
    "short header": binary({"inputs": [x_input()]}, RAW, **{"Inference-Header-Content-Length": "9"}),
    "no bytes": raw(),
    "few bytes": raw(RAW[:-1]),
    "more bytes": raw(RAW + b"!"),
    "wrong size": raw(RAW, shape=[1, 3, 16, 15]),
    "negative size": raw(RAW, parameters={"binary_data_size": -4}),
    "size of true": raw(RAW, parameters={"binary_data_size": True}),
    "huge shape": in_json(shape=[2**39] * 8, data=[1.0]),
    "huge shape, long data": in_json(shape=[2**30], data=[1.0] * 5000),
    "nothing of a huge shape": in_json(shape=[2**39, 2**39, 0], data=[]),
    "no bytes of a huge shape": raw(shape=[0, 2**39, 2**39], parameters={"binary_data_size": 0}),
    "nine dimensions": in_json(shape=[1] * 9, data=[1.0]),
    "negative shape": in_json(shape=[-1, 3, 16, 16], data=[1.0]),
    "fractional shape": in_json(shape=[1.5], data=[1.0]),
    "empty batch": raw(shape=[0, 3, 16, 16], parameters={"binary_data_size": 0}),
    "no pixels": in_json(datatype="UINT8", shape=[1, 0, 100, 3], data=[]),
    "both": raw(RAW, data=[1.0]),
    "neither": in_json(),
    "twice": binary({"inputs": [x_input(), x_input()]}, RAW, RAW),
    "words": in_json(shape=[1], data=["one"]),
    "nulls": in_json(shape=[1], data=[None]),
    "a mark": in_json(shape=[1], data={"\0numbers": 0}),
    "unknown datatype": in_json(datatype="FP8", data=[1.0]),
    "BF16 in JSON": in_json(datatype="BF16", shape=[1], data=[1.0]),
    "too large for UINT8": in_json(datatype="UINT8", shape=[1], data=[256]),
    "no base64": in_json(name="image", datatype="BYTES", shape=[1], data=["é!"]),
    "numbers as BYTES": in_json(name="image", datatype="BYTES", shape=[1], data=[1]),
    "other BYTES": in_json(name="y", datatype="BYTES", shape=[1], data=["aaaa"]),
    "long element": bytes_input(8, b"\xff\xff\xff\xff1234"),
    "torn length": bytes_input(2, b"\0\0"),
    "no gzip": {"content": b"hello", "headers": {"Content-Encoding": "gzip"}},
    "cut gzip": {"content": gzip.compress(b"{}")[:-4], "headers": {"Content-Encoding": "gzip"}},
    "gzip and more": {"content": gzip.compress(b"{}") + b"!", "headers": {"Content-Encoding": "gzip"}},
    "empty gzip": {"content": b"", "headers": {"Content-Encoding": "gzip"}},
    "parameters": raw(RAW, more={"parameters": {"pool": ["avg"]}}),
    "timeout": raw(RAW, more={"parameters": {"timeout": "soon"}}),
    "binary_data": raw(RAW, more={"parameters": {"binary_data_output": "yes"}}),
    "an output twice": raw(RAW, more={"outputs": [{"name": "a"}, {"name": "a"}]}),
    "no such output": raw(RAW, more={"outputs": [{"name": "c"}]}),
    "weights of an extractor": raw(RAW, more={"parameters": {"weights": "random"}}),
}


@pytest.mark.parametrize("what", BAD)
def test_faults_of_clients(tiny, what):
    began = time.process_time()
    response = tiny.post(INFER, **BAD[what])
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"error"}
    assert response.json()["error"]
    assert time.process_time() - began < 5


@pytest.mark.parametrize("pool", ["distilled", "avgg", "avg+distilled"])
def test_unknown_pools_are_refused_with_those_known(tiny, pool):
    """``distilled`` is embeddings' own."""
    response = tiny.post(INFER, **raw(RAW, more={"parameters": {"pool": pool}}))
    known = "none, roi, points, mask, or one or more of avg, max, gem, cls joined by +"
    error = f"parameter pool must be {known}, not {pool!r}"
    assert (response.status_code, response.json()["error"]) == (400, error)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("dtype", "float32, float16, bfloat16"),
        ("normalize", "l2"),
        ("preprocess", "default, pil, fast, none"),
    ],
)
def test_unknown_choices_are_refused_with_those_known(tiny, name, known):
    response = tiny.post(INFER, **raw(RAW, more={"parameters": {name: "L1"}}))
    error = f"parameter {name} must be one of {known}, not 'L1'"
    assert (response.status_code, response.json()["error"]) == (400, error)


@pytest.mark.parametrize("path", ["", "/ready"])
def test_the_only_version_is_the_same_as_none(tiny, path):
    whole = tiny.get(f"/v2/models/tiny{path}")
    assert whole.status_code == 200
    assert tiny.get(f"/v2/models/tiny/versions/1{path}").json() == whole.json()
    other = tiny.get(f"/v2/models/tiny/versions/2{path}")
    assert (other.status_code, other.json()) == (404, {"error": "tiny has no version '2', only 1"})


def test_other_statuses(tiny):
    assert tiny.post(INFER, content=b"x", headers={"Content-Encoding": "br"}).status_code == 415
    packed = {"content": gzip.compress(b"{}"), "headers": {"Content-Encoding": "gzip"}}
    assert tiny.post("/v2/repository/models/tiny/load", **packed).status_code == 415
    assert tiny.post("/v2/models/tinny/infer", content=b"x").status_code == 404
    assert tiny.post("/v2/models/tiny/versions/2/infer", content=b"x").status_code == 404
    late = tiny.post(INFER, **binary({"inputs": [x_input()]}, RAW, **{"X-Request-Timeout": "0.000001"}))
    assert late.status_code == 504
    for config in ("nonsense", "[]", "{}", '{"model": 3}', '{"model": "resnet18", "what": 1}', '{"model": "resnet18"}'):
        body = {"parameters": {"config": config}}
        assert tiny.post("/v2/repository/models/no name!/load", json=body).status_code in (400, 404)
    long = load(tiny, "x", {"model": "resnet18", "weights": f"file:{'x' * 300}"})
    assert long.status_code == 400
    assert "weights" in long.json()["error"]
    assert tiny.post("/v2/repository/models/x/load", content=b"x" * 3_000_000).status_code == 413


def test_a_failed_extractor_does_not_shadow_a_model(make_client, checkpoints):
    (checkpoints / "squeezenet1_1-b8a52dc0.pth").write_bytes(b"cut short")
    client = make_client()
    model = client.get("/v2/models/squeezenet1_1").json()

    assert load(client, "squeezenet1_1", {"return_nodes": ["features.3"]}).status_code == 503
    assert client.get("/v2/models/squeezenet1_1").json() == model
    asked = {"inputs": [x_input(parameters={}, data=[0.5] * (3 * 16 * 16))], "parameters": {"weights": "random"}}
    inferred = client.post("/v2/models/squeezenet1_1/infer", json=asked | {"outputs": [{"name": "features.5"}]})
    assert [output["name"] for output in inferred.json()["outputs"]] == ["features.5"]

    assert load(client, "squeezenet1_1", {"return_nodes": ["features.3"], "weights": "random"}).status_code == 200
    assert [output["name"] for output in client.get("/v2/models/squeezenet1_1").json()["outputs"]] == ["features.3"]

    assert load(client, "mine", {"model": "squeezenet1_1", "return_nodes": ["features.4"]}).status_code == 503
    assert [output["name"] for output in client.get("/v2/models/mine").json()["outputs"]] == ["features.4"]


@pytest.mark.exhaustive
def test_decompression_bombs_are_refused_early(make_client):
    small = make_client(max_body_bytes=1_000_000)
    bomb = gzip.compress(b"x" * 500_000_000, 9)
    assert len(bomb) < 1_000_000
    tracemalloc.start()
    try:
        response = small.post("/v2/models/resnet18/infer", content=bomb, headers={"Content-Encoding": "gzip"})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert response.status_code == 413
    assert most < 20_000_000


def test_inference_waits_for_no_thread_that_traces(tiny):
    """What an extractor takes is known. Describing it anew took ninety times as long as computing its features."""
    element = len(PNG).to_bytes(4, "little") + PNG
    size = {"binary_data_size": len(element)}
    document = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "parameters": size}]}
    by_model = document | {"parameters": {"weights": "random"}}
    model = "/v2/models/squeezenet1_1"
    assert tiny.post(f"{model}/infer", **binary(by_model, element)).status_code == 200  # this one may trace
    metadata = [tiny.get(path).json() for path in ("/v2/models/tiny", model)]
    state, free = tiny.app.state.fxserve, threading.Event()

    async def lookups_busy():
        return [asyncio.create_task(state.in_thread(Caller(), lambda: free.wait(120))) for _ in range(2)]

    soon = {"X-Request-Timeout": "20"}
    busy = tiny.run(lookups_busy())
    try:
        with tiny.builders_busy():
            responses = [
                tiny.post(INFER, **binary(document, element, **soon)),
                tiny.post(f"{model}/infer", **binary(by_model, element, **soon)),
                tiny.post(INFER, content=PNG, headers=NO_HEAD | soon),
            ]
            assert [response.status_code for response in responses] == [200, 200, 200]
            paths = ("/v2/models/tiny", model)
            assert [tiny.run(asyncio.wait_for(tiny.http.get(path), 20)).json() for path in paths] == metadata
    finally:
        free.set()
        tiny.run(asyncio.wait(busy))


def test_null_is_what_is_not_set(tiny):
    """As Jackson and others write an object's empty fields."""
    image = {"name": "image", "datatype": "BYTES", "shape": [1], "parameters": None, "data": [b64(PNG)]}
    document = {"id": None, "parameters": None, "inputs": [image], "outputs": [{"name": "a", "parameters": None}]}
    response = tiny.post(INFER, json=document)
    assert response.status_code == 200, response.text
    assert [output["name"] for output in response.json()["outputs"]] == ["a"]
    assert tiny.post("/v2/repository/models/tiny/load", json={"parameters": None}).status_code == 200
