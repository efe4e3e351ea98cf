"""Requests for features that cannot be answered, and work that must not be done or waited for."""

import asyncio
import base64
import gc
import io
import time
from collections import Counter

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from service.codecs import responses

JPEG = {"content-type": "image/jpeg"}
NPY = {"content-type": "application/x-npy"}
ONE_STEP = "/v1/models/resnet18/features?weights=random&nodes=layer3:C4,layer4:C5"
C4, C5 = "layer3.1.relu_1", "layer4.1.relu_1"


def b64(data):
    return base64.b64encode(data).decode()


def _multipart(images):
    return {"files": [("images", (f"{i}.jpg", data, "image/jpeg")) for i, data in enumerate(images)]}


def _json(images):
    return {"json": {"images": [b64(data) for data in images]}}


def _file(kind, array):
    if kind == "x-safetensors":
        return safetensors.numpy.save({"x": array})
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


BAD = [b"", b"no image", b"\x89PNG\r\n\x1a\n"]


@pytest.mark.parametrize("bad", [*BAD, "truncated"], ids=["empty", "text", "signature", "truncated"])
@pytest.mark.parametrize("body", [_multipart, _json])
def test_one_bad_image_of_several(client, extractor, photos, bad, body):
    bad = photos["coffee"][:2000] if bad == "truncated" else bad
    response = client.post(extractor, **body([photos["chelsea"], bad, photos["rocket"]]))
    assert response.status_code == 422
    assert response.json()["type"] == "/problems/bad-image"
    assert response.json()["index"] == 1


@pytest.mark.parametrize("body", [[], True, "images", 3])
@pytest.mark.parametrize("route", [ONE_STEP, "/v1/extractors", "/v1/embeddings", "/v2/models/resnet18/infer"])
def test_bodies_that_are_no_objects(client, route, body):
    response = client.post(route, json=body)
    assert response.status_code in (400, 422)
    assert "the body: Input should be a JSON object" in response.text


def test_base64_is_strict(client, extractor, photos):
    """Line breaks, or anything else that a lenient decoder would skip, may be a sign of damage."""
    lines = base64.encodebytes(photos["chelsea"]).decode()
    response = client.post(extractor, json={"images": [b64(photos["chelsea"]), lines]})
    assert (response.status_code, response.json()["type"], response.json()["index"]) == (422, "/problems/bad-image", 1)
    assert "base64" in response.json()["detail"]


def _post(path, status, kind, **options):
    return path, status, kind, options


@pytest.mark.parametrize(
    ("path", "status", "kind", "options"),
    [
        _post("/v1/extractors/none/features", 404, "unknown-extractor", content=b"x", headers=JPEG),
        _post("/v1/models/none/features?nodes=C4", 404, "unknown-model", content=b"x", headers=JPEG),
        _post(f"/v1/models/{'x' * 200}/features?nodes=C4", 404, "unknown-model", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features", 422, "invalid-request", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features?nodes=", 422, "invalid-request", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features?nodes=a,,b", 422, "invalid-request", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features?nodes=C4:", 422, "invalid-request", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features?nodes=C4:__metadata__", 422, "invalid-request", content=b"x", headers=JPEG),
        _post(
            "/v1/models/resnet18/features?nodes=__metadata__,C4:a", 422, "invalid-request", content=b"x", headers=JPEG
        ),
        _post("/v1/models/resnet18/features?nodes=C4:a%00b,C5:c", 422, "invalid-request", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features?nodes=C4%00,C5:c", 422, "invalid-request", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features?nodes=C4:a,C4:b", 422, "duplicate-key", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features?nodes=C4:a,C5:a", 422, "duplicate-key", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features?nodes=C9&weights=random", 422, "unknown-node", content=b"x", headers=JPEG),
        _post("/v1/models/resnet18/features?nodes=C4&weights=x", 422, "unknown-weights", content=b"x", headers=JPEG),
        _post(f"{ONE_STEP}&pool=sum", 422, "invalid-request", content=b"x", headers=JPEG),
        _post(f"{ONE_STEP}&dtype=int8", 422, "invalid-request", content=b"x", headers=JPEG),
        _post(f"{ONE_STEP}&normalize=l1", 422, "invalid-request", content=b"x", headers=JPEG),
        _post(f"{ONE_STEP}&preprocess=some", 422, "invalid-request", content=b"x", headers=JPEG),
        _post(f"{ONE_STEP}&encoding=hex", 422, "invalid-request", content=b"x", headers=JPEG),
        _post(f"{ONE_STEP}&image_size=0", 422, "invalid-request", content=b"x", headers=JPEG),
        _post(ONE_STEP, 415, "unsupported-media-type", content=b"x"),
        _post(ONE_STEP, 415, "unsupported-media-type", content=b"x", headers={"content-type": "image/"}),
        _post(
            ONE_STEP, 415, "unsupported-media-type", content=b"x", headers={"content-type": "application/octet-stream"}
        ),
        _post(
            ONE_STEP, 415, "unsupported-media-type", content=b"x", headers={"content-type": "image/png" + ";" * 2040}
        ),
        _post(ONE_STEP, 415, "unsupported-media-type", data={"a": "b"}),
        _post(ONE_STEP, 415, "unsupported-media-type", content=b"x", headers={**JPEG, "content-encoding": "gzip"}),
        _post(ONE_STEP, 406, "not-acceptable", content=b"x", headers={**JPEG, "accept": "text/html"}),
        _post(ONE_STEP, 406, "not-acceptable", content=b"x", headers={**JPEG, "accept": "application/x-npy"}),
        _post(ONE_STEP, 406, "not-acceptable", content=b"x", headers={**JPEG, "accept": "image/png"}),
        _post(
            f"{ONE_STEP}&dtype=bfloat16",
            406,
            "not-acceptable",
            content=b"x",
            headers={**JPEG, "accept": "application/x-npz"},
        ),
        _post(ONE_STEP, 422, "invalid-request", content=b"x", headers={**JPEG, "x-request-timeout": "soon"}),
        _post(ONE_STEP, 422, "invalid-request", content=b"x", headers={**JPEG, "x-request-timeout": "0"}),
        _post(ONE_STEP, 422, "invalid-request", content=b"x", headers={**JPEG, "x-request-timeout": "inf"}),
        _post(ONE_STEP, 422, "invalid-request", content=b"{", headers={"content-type": "application/json"}),
        _post(ONE_STEP, 422, "invalid-request", content=b"[" * 90_000, headers={"content-type": "application/json"}),
        _post(ONE_STEP, 422, "invalid-request", json={"images": []}),
        _post(ONE_STEP, 422, "invalid-request", json={"images": [1]}),
        _post(ONE_STEP, 422, "invalid-request", json={"images": [""] * 1025}),
        _post(ONE_STEP, 422, "invalid-request", json={"images": [""] * 100_000}),
        _post(ONE_STEP, 422, "invalid-request", json={"pictures": []}),
        _post(ONE_STEP, 422, "bad-image", json={"images": ["a"]}),
        _post(ONE_STEP, 422, "bad-image", json={"images": ["ééé="]}),
        _post(ONE_STEP, 422, "bad-image", json={"images": ["data:image/png;base64,AAAA"]}),
        _post(ONE_STEP, 422, "bad-image", json={"images": ["data:image/png,%89PNG"]}),
        _post(ONE_STEP, 422, "bad-image", json={"images": ["https://example.org/cat.jpg"]}),
        _post(ONE_STEP, 422, "bad-image", json={"images": ["data:;base64,AAAA"] * 1024}),
        _post(ONE_STEP, 422, "invalid-request", json={"images": ["data:;base64,AAAA"] * 2048}),
        _post(ONE_STEP, 422, "bad-image", content=b"", headers=JPEG),
        _post(ONE_STEP, 422, "bad-tensor", content=b"x", headers=NPY),
        _post(ONE_STEP, 422, "bad-tensor", content=b"x", headers={"content-type": "application/x-safetensors"}),
        _post(
            ONE_STEP,
            422,
            "bad-tensor",
            content=safetensors.numpy.save({"image": np.zeros((1, 3, 64, 64), np.float32)}),
            headers={"content-type": "application/x-safetensors"},
        ),
        _post(ONE_STEP, 422, "bad-tensor", content=_file("x-npy", np.zeros((1, 5, 64, 64), np.float32)), headers=NPY),
        _post(ONE_STEP, 422, "bad-tensor", content=_file("x-npy", np.zeros((1, 0, 100, 3), np.uint8)), headers=NPY),
        _post(
            "/v1/models/resnet18/features?weights=random&nodes=flatten",
            422,
            "no-heat-map",
            content=b"x",
            headers={**JPEG, "accept": "image/png"},
        ),
        _post(f"{ONE_STEP}&pool=cls", 422, "bad-tensor", json={"images": "photo"}),
    ],
)
def test_bad_requests_get_problem_documents(client, photos, path, status, kind, options):
    if options.get("json") == {"images": "photo"}:
        options = _json([photos["chelsea"]])
    response = client.post(path, **options)
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert (response.status_code, document["status"], document["type"]) == (status, status, f"/problems/{kind}"), (
        document
    )
    assert document["detail"]
    assert "Value error" not in response.text
    assert document["title"]
    if status in (406, 415):
        assert document["available"]


def test_a_second_choice_is_taken_where_the_first_is_impossible(client, extractor, photos):
    headers = {**JPEG, "accept": "application/x-npy, application/x-npz;q=0.5"}
    response = client.post(extractor, content=photos["chelsea"], headers=headers)
    assert response.headers["content-type"] == "application/x-npz"


def test_available_types_are_possible(client, extractor):
    response = client.post(extractor, content=b"x", headers={**JPEG, "accept": "text/csv"})
    document = response.json()
    assert document["available"] == ["application/json", "application/x-safetensors", "application/x-npz"]
    assert document["detail"] == f"cannot respond with 'text/csv'; Accept one of {', '.join(document['available'])}"


@pytest.mark.parametrize(("nodes", "count"), [("flatten", 1), ("layer4", 2), ("layer4", 0)])
def test_a_second_choice_is_taken_where_no_heat_map_can_be_drawn(client, photos, nodes, count):
    headers = {"accept": "image/png, application/x-npy;q=0.5"}
    options = _multipart([photos["chelsea"]] * count)
    if count == 0:
        headers |= NPY
        options = {"content": _file("x-npy", np.zeros((1, 64, 64, 3), np.uint8))}
    response = client.post(f"/v1/models/resnet18/features?weights=random&nodes={nodes}", headers=headers, **options)
    assert response.headers["content-type"] == "application/x-npy", response.text
    assert np.load(io.BytesIO(response.content)).shape[:2] == (max(count, 1), 512)


def test_accept_on_two_lines_is_the_same_as_on_one(client, extractor, photos):
    headers = [*JPEG.items(), ("accept", "text/html"), ("accept", "application/x-npz")]
    response = client.post(extractor, content=photos["chelsea"], headers=headers)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-npz")


def test_an_encoding_on_a_second_line_is_refused_too(client, extractor, photos):
    headers = [*JPEG.items(), ("content-encoding", "identity"), ("content-encoding", "gzip")]
    response = client.post(extractor, content=photos["chelsea"], headers=headers)
    assert (response.status_code, response.json()["type"]) == (415, "/problems/unsupported-media-type")


def test_too_many_pixels(make_client, photos):
    client = make_client(max_pixels=450 * 300)
    response = client.post(ONE_STEP, **_multipart([photos["chelsea"][:100_000], photos["rocket"]]))
    assert response.status_code == 413
    document = response.json()
    assert document["type"] == "/problems/image-too-large"
    assert (document["index"], document["pixels"], document["limit"]) == (0, 451 * 300, 450 * 300)


@pytest.mark.exhaustive
def test_a_response_that_is_too_large(make_client, photos):
    client = make_client(max_response_bytes=1_000_000)
    response = client.post(ONE_STEP, **_multipart([photos["chelsea"]] * 4))
    assert response.status_code == 413
    document = response.json()
    assert document["type"] == "/problems/response-too-large"
    assert document["bytes"] == 4 * 4 * (256 * 14 * 14 + 512 * 7 * 7)
    assert "pool=avg" in document["ways"]
    assert client.post(f"{ONE_STEP}&pool=avg", **_multipart([photos["chelsea"]] * 4)).status_code == 200
    map = "/v1/models/resnet18/features?weights=random&nodes=relu"  # 3.2 MB, drawn as a small picture
    for accept, status in (("application/json", 413), ("image/png", 200)):
        response = client.post(map, content=photos["chelsea"], headers={**JPEG, "accept": accept})
        assert response.status_code == status, accept


@pytest.mark.parametrize("where", ["header", "setting"])
def test_a_deadline(make_client, photos, where):
    client = make_client(request_timeout=0.005) if where == "setting" else make_client()
    headers = {**JPEG, "x-request-timeout": "0.005"} if where == "header" else JPEG
    response = client.post(
        "/v1/models/resnet50/features?weights=random&nodes=C4", content=photos["chelsea"], headers=headers
    )
    assert (response.status_code, response.json()["type"]) == (504, "/problems/deadline-exceeded")


def test_deadline_exceeded_during_the_lookup(make_client, photos):
    client = make_client()
    began = time.monotonic()
    with client.builders_busy():
        response = client.post(ONE_STEP, content=photos["chelsea"], headers={**JPEG, "x-request-timeout": "0.2"})
    assert (response.status_code, response.json()["type"]) == (504, "/problems/deadline-exceeded")
    assert time.monotonic() - began < 50


@pytest.mark.exhaustive
@pytest.mark.parametrize(("encoding", "values"), [("json", 8_000_000), ("base64", 32_000_000)])
def test_encoding_a_large_response_does_not_block_the_event_loop(client, encoding, values):
    """Writing takes a tenth of a second at least, in hundreds of steps."""
    metadata = {"model": "m", "extractor": "e", "weights": "random"}
    value = torch.rand(values)

    async def turns_of_the_loop() -> int:
        turns = 0
        engine = client.app.state.fxserve.engine
        work = engine.run_in_encoder(
            responses.write, "application/json", metadata, {"a": "a"}, {"a": value}, encoding, {"images": 1}
        )
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0.002)
            turns += 1
        assert b"".join(await task).startswith(b'{"model":"m"')
        return turns

    # A loop that is held has one turn or two in every attempt; a busy machine may take the others of some.
    assert any(client.run(turns_of_the_loop()) >= 6 for _ in range(10))


def test_while_draining(make_client, photos):
    client = make_client()
    assert client.post(ONE_STEP, content=photos["chelsea"], headers=JPEG).status_code == 200
    client.run(client.app.state.fxserve.engine.close())
    response = client.post(ONE_STEP, content=photos["chelsea"], headers=JPEG)
    assert (response.status_code, response.json()["type"]) == (503, "/problems/draining")
    assert int(response.headers["retry-after"]) >= 1
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200
    assert client.get("/v1/transforms").status_code == 200
    assert client.get("/v1/models/alexnet/nodes").json()["type"] == "/problems/draining"  # its threads have ended
    assert client.post("/v1/extractors").json()["type"] == "/problems/draining"
    assert client.delete("/v1/extractors/r50").json()["type"] == "/problems/draining"
    assert client.post("/v1/models/squeezenet1_1/attributions").json()["type"] == "/problems/draining"
    assert client.post("/v1/embeddings").json()["error"]["code"] == "draining"
    assert "shutting down" in client.post("/v2/models/squeezenet1_1/infer").json()["error"]


@pytest.mark.parametrize("failure", ["image", "second image", "deadline"])
def test_failed_requests_hold_no_memory(make_client, photos, failure):
    """No error may be part of a cycle with the objects of its request: the garbage collector runs rarely."""
    client = make_client()
    request = {
        "image": {"content": photos["coffee"][:2000], "headers": JPEG},
        "second image": _multipart([photos["chelsea"], b"no image", b"nor this"]),
        "deadline": {"content": photos["chelsea"], "headers": {**JPEG, "x-request-timeout": "0.005"}},
    }[failure]

    for _ in range(3):
        client.post(ONE_STEP, **request)
    engine = client.app.state.fxserve.engine
    client.run(engine.in_flight.wait_idle())
    gc.collect()
    gc.disable()
    try:
        status = {client.post(ONE_STEP, **request).status_code for _ in range(5)}
        client.run(engine.in_flight.wait_idle())
        gc.set_debug(gc.DEBUG_SAVEALL)  # what is in cycles comes to `gc.garbage`
        for _ in range(2):  # the first may only call finalizers, those of futures
            gc.collect()
        unreachable = Counter(f"{type(one).__module__}.{type(one).__name__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert status == {504 if failure == "deadline" else 422}
    in_cycles = {name for name, count in unreachable.items() if name.startswith(("service.", "fxcore.")) and count >= 5}
    assert in_cycles == set()
