"""The client's own decisions, which need no server: its imports, its requests, its retries, its errors."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys

import httpx
import numpy as np
import pytest
import torch

from service.client import Client, exceptions, flows
from service.client.base import BaseExtractor, token_indices
from service.client.flows import ExtractorRef, Request, RetryPolicy
from service.client.images import split_call
from service.client.responses import Response
from service.client.tensors import Assembly
from service.problems import Problem
from service.schemas.problem_examples import EXAMPLES
from service.schemas.v1.features import MAX_REGIONS
from tests.service.client.test_tensors import content

MB = 1024**2


@pytest.mark.parametrize("module", ["service.client", "service"])
def test_importing_it_imports_neither_torch_nor_a_server(module):
    heavy = ["torch", "torchvision", "fxcore", "fastapi", "pydantic", "PIL"]
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_images_of_unknown_sizes_go_one_by_one_where_that_matters():
    images = [b"a", b"b", np.zeros((2, 4, 4, 3), np.uint8)]
    assert [part.rows for part in split_call(images, 16, 10**6, True)] == [1, 1, 2]
    assert [part.rows for part in split_call(images, 16, 10**6)] == [2, 2]


def response(status, body, **headers):
    """A response with bytes or a JSON document; of headers that are None, it has none."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    return Response(status, httpx.Headers(given), np.frombuffer(data, np.uint8))


def refusal(status, slug="", retry_after=None, **extra):
    document = {"type": f"/problems/{slug}", "status": status, "detail": "because", **extra}
    return response(status, document, retry_after=retry_after)


OK = response(200, {})


def features(**arrays):
    return response(200, content(**arrays).tobytes(), content_type="application/x-safetensors")


REF = ExtractorRef("x", "f", {"model": "resnet18", "return_nodes": ["C5"]})


class Answered:
    """A client that gets these responses."""

    def __init__(self, responses, retry_policy):
        self.responses, self.retry_policy = list(responses), retry_policy
        self.steps = []

    async def _send(self, request):
        self.steps.append(request)
        return self.responses.pop(0)

    async def _sleep(self, seconds):
        self.steps.append(seconds)

    async def _call(self, function):
        return function()


GET, ONCE = Request("GET", "/"), RetryPolicy(60, 0)


def steps(flow, responses, *arguments, policy=ONCE):
    """The requests and the seconds of waiting of a flow that gets these responses, and its result or error."""
    client = Answered(responses, policy)
    try:
        return client.steps, asyncio.run(flow(client, *arguments))
    except exceptions.FxserveError as error:
        return client.steps, error


def test_it_retries_after_retry_after():
    responses = [refusal(429, "admission-full", "2"), refusal(503, "not-ready", "3"), OK]
    taken, result = steps(flows.exchange, responses, GET, RetryPolicy(60, 5))
    assert result is OK
    assert [type(step) for step in taken] == [Request, float, Request, float, Request]
    assert 2 <= taken[1] <= 2.5
    assert 3 <= taken[3] <= 3.75


@pytest.mark.parametrize(
    ("refused", "retry_policy", "sent"),
    [
        (refusal(429, "admission-full", "0"), RetryPolicy(60, 2), 3),  # as often as allowed
        (refusal(429, "admission-full", "30"), RetryPolicy(10, 5), 1),  # it would be too late
        (refusal(503, "weights-unavailable"), RetryPolicy(60, 5), 1),  # no word of later
        (refusal(422, "bad-tensor", "1"), RetryPolicy(60, 5), 1),
        (refusal(500, "compute-failed", "1"), RetryPolicy(60, 5), 1),
    ],
)
def test_it_stops_retrying(refused, retry_policy, sent):
    taken, error = steps(flows.exchange, [refused] * 9, GET, retry_policy)
    assert isinstance(error, exceptions.Problem)
    assert sum(isinstance(step, Request) for step in taken) == sent


def test_the_timeout_is_sent_to_the_server():
    taken, _ = steps(flows.exchange, [OK], GET, RetryPolicy(7, 0))
    assert 6.9 < float(taken[0].headers["X-Request-Timeout"]) <= 7
    assert taken[0].timeout > 7


@pytest.mark.parametrize("value", ["Wed, 21 Oct 2015 07:28:00 GMT", "soon", "-1", ""])
def test_odd_retry_after(value):
    taken, _ = steps(flows.exchange, [refusal(429, retry_after=value), OK], GET, RetryPolicy(9, 1))
    assert [step for step in taken if isinstance(step, float)] == ([0.0] if "2015" in value else [])


def test_every_problem_is_of_the_class_of_its_status():
    groups = {
        401: exceptions.Unauthorized,
        403: exceptions.Unauthorized,
        404: exceptions.NotFound,
        413: exceptions.TooLarge,
        429: exceptions.Busy,
        500: exceptions.ServerError,
        503: exceptions.Busy,
        504: exceptions.TimedOut,
        505: exceptions.ServerError,
    }
    for slug, kind in Problem.kinds.items():
        error = exceptions.problem_of(kind.status, {"type": f"/problems/{slug}", "detail": "x", **EXAMPLES[kind].extra})
        assert isinstance(error, groups.get(kind.status, exceptions.Invalid))
        assert (str(error), error.status) == ("x", kind.status)


def test_every_class_of_one_problem_is_a_problem_of_the_server():
    groups = {"Problem", "NotFound", "Invalid", "Unauthorized", "TooLarge", "Busy", "ServerError", "ImageProblem"}
    classes = [c for c in vars(exceptions).values() if isinstance(c, type) and issubclass(c, exceptions.Problem)]
    for kind in classes:
        assert kind.__name__ in groups or type(exceptions.problem_of(kind.status, {"type": kind.slug})) is kind


def test_error_responses_that_are_no_problem_documents():
    _, error = steps(flows.exchange, [response(502, b"<h1>Bad Gateway</h1>")], GET, RetryPolicy(9, 1))
    assert isinstance(error, exceptions.ServerError)
    assert "Bad Gateway" in str(error)


def test_a_redirect_is_an_error_that_names_the_server():
    moved = response(301, b"", location="https://features.example/v1/models")
    taken, error = steps(flows.exchange, [moved], Request("DELETE", "/"), RetryPolicy(9, 1))
    assert isinstance(error, exceptions.Problem)
    assert "https://features.example" in str(error)
    assert len(taken) == 1


@pytest.mark.parametrize("status", ["error", None])
def test_a_gateway_may_have_a_status_of_its_own(status):
    busy = response(429, {"status": status, "message": "slow down"}, retry_after="1")
    taken, result = steps(flows.exchange, [busy, OK], GET, RetryPolicy(60, 1))
    assert result is OK
    assert [type(step) for step in taken] == [Request, float, Request]
    _, error = steps(flows.exchange, [busy], GET, ONCE)
    assert (type(error), error.status) == (exceptions.Busy, 429)


def test_a_request_has_no_more_boxes_than_the_server_takes():
    counts = [9000, 7000, 1000, 16384, 20000, 0, 1]
    parts = split_call([b"image"] * 7, 16, MB, boxes=[[[0, 0, 9, 9]] * count for count in counts])
    assert [[len(of_image) for of_image in json.loads(part.body()[0])["boxes"]] for part in parts] == [
        [9000, 7000], [1000], [16384], [20000], [0, 1]
    ]  # fmt: skip
    assert [part.first_row for part in parts] == [0, 16000, 17000, 33384, 53384]
    assert [part.first_row for part in parts[0].split(1)] == [0, 9000]
    assert MAX_REGIONS == 16384


def test_a_single_name_is_a_list_of_one():
    spec = flows.extractor_spec("resnet18", "C5", inputs="layer2", name=None, fit="crop")
    assert spec == {"model": "resnet18", "return_nodes": ["C5"], "inputs": ["layer2"]}
    assert "inputs" not in flows.extractor_spec("resnet18", {"C5": "late"})
    single = {"name": "remove", "params": {"nodes": "dropout"}}
    for given, listed in (("attention_maps", ["attention_maps"]), (single, [single]), ((), []), ([single], [single])):
        assert flows.extractor_spec("vit_b_16", "norm", transforms=given)["transforms"] == listed


@pytest.mark.parametrize("size", [np.int64(64), np.array([64, 96]), [np.int32(64), 96], (64, 96), torch.Size((64, 96))])
def test_sizes_may_be_numbers_of_numpy(size):
    sent = json.loads(json.dumps(flows.extractor_spec("resnet18", "C5", image_size=size)))
    assert sent["image_size"] == (64 if np.ndim(size) == 0 else [64, 96])


@pytest.mark.parametrize("tokens", ["10", b"10", 10])
def test_tokens_are_a_list(tokens):
    """The text ``10`` would be the tokens 1 and 0."""
    with pytest.raises(TypeError, match=r"tokens must be a list of indices, such as \[0, 57\], not"):
        token_indices(tokens)
    assert token_indices(range(10, 12)) == [10, 11]


@pytest.mark.parametrize("timeout", [0, math.inf, math.nan])
def test_a_timeout_is_a_number_of_seconds(timeout):
    with pytest.raises(ValueError, match="timeout must be positive and finite"):
        Client("http://127.0.0.1:1", timeout=timeout)


@pytest.mark.parametrize("port", ["99999", "eight"])
def test_a_port_that_no_socket_can_have_is_refused(port):
    with pytest.raises(ValueError, match=f"'http://127.0.0.1:{port}' has no valid port"):
        Client(f"http://127.0.0.1:{port}")


def test_names_are_strings():
    for path in (flows.model_path, flows.extractor_path):
        with pytest.raises(TypeError, match="a name must be a string, not None"):
            path(None)


def test_a_page_of_another_server_is_no_response():
    page = response(200, b"<h1>Sign in</h1>", content_type="text/html")
    _, error = steps(flows.model, [page], "resnet18")
    for found in (error, asked(REF, [page])[1]):
        assert isinstance(found, exceptions.ConnectionFailed)
        assert "is it fxserve" in str(found)
        assert "Sign in" in str(found)


@pytest.mark.parametrize("body", [[], {"object": "list", "data": []}])
def test_the_json_of_another_server_is_no_response(body):
    """The second is what servers of language models answer for the list of their models."""
    for flow, *arguments in (
        (flows.models, None, None, None),
        (flows.model, "resnet18"),
        (flows.nodes, "resnet18", "DEFAULT", None),
        (flows.extractors,),
        (flows.extractor, "x"),
        (flows.create_extractor, REF.spec, 9),
    ):
        _, error = steps(flow, [response(200, body)], *arguments)
        assert isinstance(error, exceptions.ConnectionFailed)
        assert "is it fxserve" in str(error)


def test_the_server_has_its_time_to_answer_besides_the_time_that_a_build_is_waited_for():
    """It resolves the nodes before it waits, which takes seconds for a model that it has not traced."""
    taken, description = steps(flows.create_extractor, [described()], REF.spec, 300, policy=RetryPolicy(5, 0))
    assert description["state"] == "ready"
    assert taken[0].timeout >= float(taken[0].params["wait"]) + 5


@pytest.mark.parametrize(
    ("shapes", "one"),
    [([[None, 64, 7, 7]], True), ([[None, 64, None, None]], False), ([[None, 64], None], False), ([], False)],
)
def test_images_go_one_by_one_unless_all_have_outputs_of_one_shape(shapes, one):
    extractor = BaseExtractor({"id": "x", "fingerprint": "f", "outputs": [{"shape": shape} for shape in shapes]}, None)
    assert extractor.one_size is one


@pytest.mark.parametrize(
    ("refused", "images"),
    [(refusal(413, "response-too-large", bytes=800, limit=250), 8), (refusal(422, "bad-mask"), 4)],
)
def test_what_is_too_much_together_is_sent_in_requests_of_two_images(refused, images):
    """The limit is that of two images, or half of the images where the server names none."""
    [part] = split_call([bytes([n]) for n in range(images)], 16, MB)
    assembly = Assembly(images)
    responses = [refused, *(features(a=np.arange(first, first + 2)) for first in range(0, images, 2))]
    taken, error = steps(flows.extract, responses, REF, part, {}, assembly)
    assert error is None
    assert sum(isinstance(step, Request) for step in taken) == len(responses)
    assert assembly.arrays()["a"].tolist() == list(range(images))


@pytest.mark.parametrize("second", [{"a": np.ones(2)}, {"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}])
def test_responses_of_a_call_have_the_same_outputs(second):
    """Else rows of an output would have no values."""
    [part] = split_call([b"image"] * 4, 16, MB)
    responses = [refusal(422, "bad-mask"), features(a=np.ones(2), b=np.ones(2)), features(**second)]
    _, error = steps(flows.extract, responses, REF, part, {}, Assembly(4))
    assert isinstance(error, exceptions.UnreadableResponse)
    assert "['a', 'b'] in another response" in str(error)


@pytest.mark.parametrize("index", ["x", None, [], {}, 1.5, True])
def test_an_index_that_is_no_number_is_as_good_as_none(index):
    parts = split_call([b"a", b"b", b"c"], 2, MB)
    bad = refusal(422, "bad-image", index=index)
    for part, refused, at in ((parts[0], [bad, bad], 0), (parts[1], [bad], 2)):
        _, error = steps(flows.extract, refused, REF, part, {}, Assembly(3))
        assert isinstance(error, exceptions.BadImage)
        assert error.index == at


def test_a_mask_that_is_bad_by_itself_is_not_sent_again():
    [part] = split_call([b"image"] * 4, 16, MB)
    _, error = steps(flows.extract, [refusal(422, "bad-mask", index=2)], REF, part, {}, Assembly(4))
    assert isinstance(error, exceptions.BadMask)
    assert error.index == 2


def described(id="x", fingerprint="f"):
    return response(201, {"id": id, "fingerprint": fingerprint, "state": "ready"})


UNKNOWN = refusal(404, "unknown-extractor")


def asked(ref, responses):
    """Path and body of what is sent for one image, and what comes of it in the end."""
    [part] = split_call([b"image"], 1, MB)
    assembly = Assembly(1)
    taken, error = steps(flows.extract, responses, ref, part, {}, assembly, policy=RetryPolicy(60, 5))
    return [(step.url, step.content) for step in taken if isinstance(step, Request)], error or assembly.arrays()


def test_what_the_server_does_not_know_is_made_again():
    asking, making = ("/v1/extractors/x/features", b"image"), ("/v1/extractors", json.dumps(REF.spec).encode())
    value = features(a=np.ones(1, np.float32))
    sent, result = asked(REF, [UNKNOWN, described(), UNKNOWN, described(), value])
    assert sent == [asking, making, asking, making, asking]
    assert result["a"].tolist() == [1]
    sent, error = asked(REF, [UNKNOWN, described()] * 20)
    assert isinstance(error, exceptions.UnknownExtractor)
    assert len(sent) == 33
    sent, error = asked(ExtractorRef("x", "f", None), [UNKNOWN])
    assert isinstance(error, exceptions.UnknownExtractor)
    assert sent == [asking]


@pytest.mark.parametrize("other", [{"id": "y"}, {"fingerprint": "g"}])
def test_what_is_made_again_is_the_same_or_an_error(other):
    _, error = asked(REF, [UNKNOWN, described(**other)])
    assert isinstance(error, exceptions.ExtractorChanged)


def test_the_index_of_a_bad_image_is_that_of_the_call():
    [_, part] = split_call([b"a", b"b", b"c"], 2, MB)
    problem = refusal(422, "bad-image", index=0, detail="image 0: these 1 bytes are not an image")
    _, error = steps(flows.extract, [problem], REF, part, {}, Assembly(3))
    assert isinstance(error, exceptions.BadImage)
    assert str(error).startswith("image 2: these")
    assert error.index == 2


def test_the_images_of_edits_are_those_of_each_request():
    edits = [{"node": "layer2", "channels": np.array([3]), "scale": 0}, {"node": "layer3", "images": [0, 4, 5]}]
    parts = split_call([b"image"] * 6, 4, MB, edits=edits)
    whole = {"node": "layer2", "channels": [3], "scale": 0}
    assert [json.loads(part.body()[0])["edits"] for part in parts] == [
        [whole, {"node": "layer3", "images": [0]}], [whole, {"node": "layer3", "images": [0, 1]}]
    ]  # fmt: skip
    assert [json.loads(part.body()[0])["edits"][1]["images"] for part in parts[1].split(1)] == [[0], [0]]
    with pytest.raises(ValueError, match="selects image 6, but the 6 images are numbered from 0"):
        split_call([b"image"] * 6, 4, MB, edits=[{"node": "layer3", "images": [6]}])
    with pytest.raises(ValueError, match="edits need image files"):
        split_call(np.zeros((2, 3, 8, 8), np.float32), 4, MB, edits=edits)


def test_a_single_edit_is_a_list_of_one():
    edit = {"node": "layer2", "scale": 0}
    assert [split_call([b"image"], 4, MB, edits=given)[0].edits for given in (edit, [edit])] == [[edit]] * 2
    assert not split_call([b"image"], 4, MB, edits=None)[0].edits


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        ({"scale": math.nan}, "scale must be finite, not nan"),
        ({"shift": [0, math.inf]}, r"shift must be finite, not \[0.0, inf\]"),
        ({"images": 0}, r"images must be a list of indices, such as \[0\], not 0"),
    ],
)
def test_what_is_no_edit(edit, error):
    with pytest.raises((TypeError, ValueError), match=error):
        split_call([b"image"], 4, MB, edits=[{"node": "layer2", **edit}])


@pytest.mark.parametrize(("tokens", "rows"), [(None, 1), ([0], 16), (range(100), 7)])
def test_chosen_tokens_let_more_images_go_together(tokens, rows):
    """Of attention weights of 90 MB an image, a hundred queries of a thousand are 9 MB."""
    output = {"shape": [None, 23, 1000, 1000], "bytes_per_image": 90_000_000}
    extractor = BaseExtractor({"id": "x", "fingerprint": "f", "outputs": [output]}, None)
    assert extractor.rows("none", None, tokens) == rows
