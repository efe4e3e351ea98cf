"""Requests for features that cannot be answered, and work that must not be done or waited for."""

import asyncio
import base64
import gc
import time
from collections import Counter

import numpy as np
import pytest
import torch

from service.codecs import responses
from tests.wire import JPEG, NPY, NPZ, SAFETENSORS, b64, images, multipart, read, refused, sent

ONE_STEP = "/v1/models/resnet18/features?weights=random&nodes=layer3:C4,layer4:C5"


@pytest.mark.parametrize(
    "bad", [b"", b"no image", b"\x89PNG\r\n\x1a\n", None], ids=["empty", "text", "signature", "truncated"]
)
@pytest.mark.parametrize("body", [multipart, lambda files: {"json": images(files)}])
def test_one_bad_image_of_several(client, extractor, photos, bad, body):
    bad = photos["coffee"][:2000] if bad is None else bad
    response = client.post(extractor, **body([photos["chelsea"], bad, photos["rocket"]]))
    assert refused(response, "bad-image")["index"] == 1


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
    assert refused(response, "bad-image", "base64")["index"] == 1


MODEL = "/v1/models/resnet18/features"
JSON = {"content-type": "application/json"}


def faults():
    """Path, options of the request, status and kind of the problem."""
    for path, status, kind in (
        ("/v1/extractors/none/features", 404, "unknown-extractor"),
        ("/v1/models/none/features?nodes=C4", 404, "unknown-model"),
        (f"/v1/models/{'x' * 200}/features?nodes=C4", 404, "unknown-model"),
        *((f"{MODEL}{query}", 422, "invalid-request") for query in ("", "?nodes=", "?nodes=a,,b", "?nodes=C4:")),
        (f"{MODEL}?nodes=C4:__metadata__", 422, "invalid-request"),
        (f"{MODEL}?nodes=__metadata__,C4:a", 422, "invalid-request"),
        (f"{MODEL}?nodes=C4:a%00b,C5:c", 422, "invalid-request"),
        (f"{MODEL}?nodes=C4%00,C5:c", 422, "invalid-request"),
        (f"{MODEL}?nodes=C4:a,C4:b", 422, "duplicate-key"),
        (f"{MODEL}?nodes=C4:a,C5:a", 422, "duplicate-key"),
        (f"{MODEL}?nodes=C9&weights=random", 422, "unknown-node"),
        (f"{MODEL}?nodes=C4&weights=x", 422, "unknown-weights"),
        (f"{ONE_STEP}&pool=sum", 422, "invalid-request"),
        (f"{ONE_STEP}&dtype=int8", 422, "invalid-request"),
        (f"{ONE_STEP}&normalize=l1", 422, "invalid-request"),
        (f"{ONE_STEP}&preprocess=some", 422, "invalid-request"),
        (f"{ONE_STEP}&encoding=hex", 422, "invalid-request"),
        (f"{ONE_STEP}&image_size=0", 422, "invalid-request"),
    ):
        yield path, sent(b"x"), status, kind
    for kind in (None, "image/", "application/octet-stream", "image/png" + ";" * 2040):
        headers = {} if kind is None else {"content-type": kind}
        yield ONE_STEP, {"content": b"x", "headers": headers}, 415, "unsupported-media-type"
    yield ONE_STEP, {"data": {"a": "b"}}, 415, "unsupported-media-type"
    yield ONE_STEP, sent(b"x", **{"content-encoding": "gzip"}), 415, "unsupported-media-type"
    for accept in ("text/html", NPY, "image/png"):
        yield ONE_STEP, sent(b"x", accept), 406, "not-acceptable"
    yield f"{ONE_STEP}&dtype=bfloat16", sent(b"x", NPZ), 406, "not-acceptable"
    yield f"{MODEL}?weights=random&nodes=flatten", sent(b"x", "image/png"), 422, "no-heat-map"
    for timeout in ("soon", "0", "inf"):
        yield ONE_STEP, sent(b"x", **{"x-request-timeout": timeout}), 422, "invalid-request"
    for content in (b"{", b"[" * 90_000):
        yield ONE_STEP, {"content": content, "headers": JSON}, 422, "invalid-request"
    data_url = "data:;base64,AAAA"
    for files in ([], [1], [""] * 1025, [""] * 100_000, [data_url] * 2048):
        yield ONE_STEP, {"json": {"images": files}}, 422, "invalid-request"
    yield ONE_STEP, {"json": {"pictures": []}}, 422, "invalid-request"
    for file in ("a", "ééé=", "data:image/png;base64,AAAA", "data:image/png,%89PNG", "https://example.org/cat.jpg"):
        yield ONE_STEP, {"json": {"images": [file]}}, 422, "bad-image"
    yield ONE_STEP, {"json": {"images": [data_url] * 1024}}, 422, "bad-image"
    yield ONE_STEP, sent(b""), 422, "bad-image"
    for kind in (NPY, SAFETENSORS):
        yield ONE_STEP, {"content": b"x", "headers": {"content-type": kind}}, 422, "bad-tensor"
    yield ONE_STEP, sent({"image": torch.zeros(1, 3, 64, 64)}), 422, "bad-tensor"
    yield ONE_STEP, sent(torch.zeros(1, 5, 64, 64)), 422, "bad-tensor"
    yield ONE_STEP, sent(np.zeros((1, 0, 100, 3), np.uint8)), 422, "bad-tensor"
    yield f"{ONE_STEP}&pool=cls", sent(np.zeros((1, 64, 64, 3), np.uint8)), 422, "bad-tensor"


@pytest.mark.parametrize(("path", "options", "status", "kind"), list(faults()))
def test_bad_requests_get_problem_documents(client, path, options, status, kind):
    response = client.post(path, **options)
    document = refused(response, kind, status=status)
    assert "Value error" not in response.text
    assert document["title"]
    if status in (406, 415):
        assert document["available"]


def test_a_second_choice_is_taken_where_the_first_is_impossible(client, extractor, photos):
    response = client.post(extractor, **sent(photos["chelsea"], f"{NPY}, {NPZ};q=0.5"))
    assert response.headers["content-type"] == NPZ


def test_available_types_are_possible(client, extractor):
    document = client.post(extractor, **sent(b"x", "text/csv")).json()
    assert document["available"] == ["application/json", SAFETENSORS, NPZ]
    assert document["detail"] == f"cannot respond with 'text/csv'; Accept one of {', '.join(document['available'])}"


@pytest.mark.parametrize(("nodes", "count"), [("flatten", 1), ("layer4", 2), ("layer4", 0)])
def test_a_second_choice_is_taken_where_no_heat_map_can_be_drawn(client, photos, nodes, count):
    accept = f"image/png, {NPY};q=0.5"
    options = multipart([photos["chelsea"]] * count) | {"headers": {"accept": accept}}
    if count == 0:
        options = sent(np.zeros((1, 64, 64, 3), np.uint8), accept)
    response = client.post(f"{MODEL}?weights=random&nodes={nodes}", **options)
    assert response.headers["content-type"] == NPY, response.text
    assert read(response).shape[:2] == (max(count, 1), 512)


def test_accept_on_two_lines_is_the_same_as_on_one(client, extractor, photos):
    headers = [*JPEG.items(), ("accept", "text/html"), ("accept", NPZ)]
    response = client.post(extractor, content=photos["chelsea"], headers=headers)
    assert (response.status_code, response.headers["content-type"]) == (200, NPZ)


def test_an_encoding_on_a_second_line_is_refused_too(client, extractor, photos):
    headers = [*JPEG.items(), ("content-encoding", "identity"), ("content-encoding", "gzip")]
    response = client.post(extractor, content=photos["chelsea"], headers=headers)
    refused(response, "unsupported-media-type", status=415)


def test_too_many_pixels(make_client, photos):
    client = make_client(max_pixels=450 * 300)
    response = client.post(ONE_STEP, **multipart([photos["chelsea"][:100_000], photos["rocket"]]))
    document = refused(response, "image-too-large", status=413)
    assert (document["index"], document["pixels"], document["limit"]) == (0, 451 * 300, 450 * 300)


@pytest.mark.exhaustive
def test_a_response_that_is_too_large(make_client, photos):
    client = make_client(max_response_bytes=1_000_000)
    four = multipart([photos["chelsea"]] * 4)
    document = refused(client.post(ONE_STEP, **four), "response-too-large", status=413)
    assert document["bytes"] == 4 * 4 * (256 * 14 * 14 + 512 * 7 * 7)
    assert "pool=avg" in document["ways"]
    assert client.post(f"{ONE_STEP}&pool=avg", **four).status_code == 200
    map = f"{MODEL}?weights=random&nodes=relu"  # 3.2 MB, drawn as a small picture
    for accept, status in (("application/json", 413), ("image/png", 200)):
        response = client.post(map, **sent(photos["chelsea"], accept))
        assert response.status_code == status, accept


@pytest.mark.parametrize("where", ["header", "setting"])
def test_a_deadline(make_client, photos, where):
    client = make_client(request_timeout=0.005) if where == "setting" else make_client()
    headers = {"x-request-timeout": "0.005"} if where == "header" else {}
    url = "/v1/models/resnet50/features?weights=random&nodes=C4"
    refused(client.post(url, **sent(photos["chelsea"], **headers)), "deadline-exceeded", status=504)


def test_deadline_exceeded_during_the_lookup(make_client, photos):
    client = make_client()
    began = time.monotonic()
    with client.builders_busy():
        response = client.post(ONE_STEP, **sent(photos["chelsea"], **{"x-request-timeout": "0.2"}))
    refused(response, "deadline-exceeded", status=504)
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
    assert client.post(ONE_STEP, **sent(photos["chelsea"])).status_code == 200
    client.run(client.app.state.fxserve.engine.close())
    response = client.post(ONE_STEP, **sent(photos["chelsea"]))
    refused(response, "draining", status=503)
    assert int(response.headers["retry-after"]) >= 1
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200
    assert client.get("/v1/transforms").status_code == 200
    for draining in (
        client.get("/v1/models/alexnet/nodes"),  # its threads have ended
        client.post("/v1/extractors"),
        client.delete("/v1/extractors/r50"),
        client.post("/v1/models/squeezenet1_1/attributions"),
    ):
        refused(draining, "draining", status=503)
    assert client.post("/v1/embeddings").json()["error"]["code"] == "draining"
    assert "shutting down" in client.post("/v2/models/squeezenet1_1/infer").json()["error"]


@pytest.mark.parametrize("failure", ["image", "second image", "deadline"])
def test_failed_requests_hold_no_memory(make_client, photos, failure):
    """No error may be part of a cycle with the objects of its request: the garbage collector runs rarely."""
    client = make_client()
    request = {
        "image": sent(photos["coffee"][:2000]),
        "second image": multipart([photos["chelsea"], b"no image", b"nor this"]),
        "deadline": sent(photos["chelsea"], **{"x-request-timeout": "0.005"}),
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
