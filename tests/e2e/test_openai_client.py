"""Embeddings by OpenAI's own client, over a socket, against torchvision and a forward hook."""

import asyncio
import base64

import openai
import pytest
import torch
from torch.nn import functional

from tests.wire import b64, close, created

MODEL = "resnet18@random:layer4"


def data_url(image: bytes) -> str:
    return f"data:image/jpeg;base64,{b64(image)}"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(photos, reference):
    """layer4 of resnet18, averaged over its positions, [3, 512]."""
    return reference("resnet18", "layer4.1.relu_1", list(photos.values())).mean(dim=(2, 3))


def vectors(response):
    assert [one.index for one in response.data] == list(range(len(response.data)))
    assert {one.object for one in response.data} == {"embedding"}
    return torch.tensor([one.embedding for one in response.data])


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"user": "alice"}])
def test_several_images(client, photos, expected, options):
    response = client.embeddings.create(model=MODEL, input=[data_url(image) for image in photos.values()], **options)
    close(vectors(response), expected)
    assert (response.object, response.model) == ("list", MODEL)
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (0, 0)


@pytest.mark.parametrize("write", [data_url, b64])
def test_one_image_as_a_data_url_or_as_base64(client, photos, expected, write):
    close(vectors(client.embeddings.create(model=MODEL, input=write(photos["chelsea"]))), expected[:1])


def test_base64_is_little_endian_float32(client, photos, expected):
    response = client.embeddings.create(model=MODEL, input=data_url(photos["chelsea"]), encoding_format="base64")
    values = torch.frombuffer(bytearray(base64.b64decode(response.data[0].embedding)), dtype=torch.float32)
    close(values[None], expected[:1])


def test_dimensions_are_the_first_ones_and_unit_length_again(client, photos, expected):
    response = client.embeddings.create(model=MODEL, input=[data_url(i) for i in photos.values()], dimensions=100)
    close(vectors(response), functional.normalize(expected[:, :100], dim=1))
    assert torch.allclose(vectors(response).norm(dim=1), torch.ones(3))


def test_asynchronously(server, photos, expected):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = (client.embeddings.create(model=MODEL, input=data_url(image)) for image in photos.values())
            models = [model.id async for model in client.models.list()]
            return await asyncio.gather(*asked), models

    responses, models = asyncio.run(ask())
    close(torch.cat([vectors(response) for response in responses]), expected)
    assert "resnet18" in models


@pytest.mark.exhaustive
def test_langchain(server, photos, expected):
    """Its embeddings of OpenAI's hand on what they are given, unless they are to count tokens first."""
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False, max_retries=0
    )
    close(torch.tensor(embeddings.embed_documents([data_url(image) for image in photos.values()])), expected)
    close(torch.tensor([embeddings.embed_query(data_url(photos["chelsea"]))]), expected[:1])
    responses = asyncio.run(embeddings.aembed_documents([data_url(photos["chelsea"])]))
    close(torch.tensor(responses), expected[:1])
    shorter = embeddings.model_copy(update={"dimensions": 100}).embed_query(data_url(photos["chelsea"]))
    close(torch.tensor([shorter]), functional.normalize(expected[:1, :100], dim=1))


def test_an_extractor_by_its_name(server, client, photos, expected):
    created(server.http, model="resnet18", weights="random", return_nodes=["layer4"], name="last")
    close(vectors(client.embeddings.create(model="last", input=data_url(photos["chelsea"]))), expected[:1])


@pytest.mark.exhaustive
def test_tokens_without_a_class_token_are_averaged(client, photos, reference):
    response = client.embeddings.create(model="vit_b_32@random:permute", input=data_url(photos["chelsea"]))
    close(vectors(response), reference("vit_b_32", "permute", [photos["chelsea"]]).mean(dim=1))


def test_models_are_listed(server, client):
    listed = client.models.list()
    names = [model["name"] for model in server.http.get("/v1/models").json()["models"]]
    assert [model.id for model in listed] == names
    assert {(model.object, model.owned_by) for model in listed} == {("model", "torchvision"), ("model", "packaged")}
    assert listed.object == "list"
    one = client.models.retrieve("resnet18")
    assert (one.id, one.object, one.created, one.owned_by) == ("resnet18", "model", 0, "torchvision")


def refused(error, status, param, code):
    assert error.value.status_code == status
    assert set(error.value.body) == {"message", "type", "param", "code"}
    assert (error.value.param, error.value.code) == (param, code)
    return error.value.body["message"]


@pytest.mark.parametrize(
    ("asked", "param", "code", "said"),
    [
        ({"input": "https://example.org/cat.jpg"}, "input", "bad_image", "'https'"),
        ({"input": ["file:///etc/passwd"]}, "input", "bad_image", "'file'"),
        ({"input": "data:image/png,%89PNG"}, "input", "bad_image", "without base64"),
        ({"input": "data:text/plain;base64,aGVsbG8="}, "input", "bad_image", "not an image"),
        ({"input": "a photo of a cat"}, "input", "bad_image", "neither a data URL nor base64"),
        ({"input": [1, 2, 3]}, "input", "invalid_request", "data URL"),
        ({"input": []}, "input", "invalid_request", "at least 1"),
        ({"model": "resnet18@random"}, "model", "model_not_found", "resnet18@random:NODE"),
        ({"model": "resnet18@random:layer4,layer3"}, "model", "invalid_request", "one node"),
        ({"model": "resnet18@random:layer4.*"}, "model", "invalid_request", "with one node"),
        ({"model": "resnet18@random:layer9"}, "model", "unknown_node", "layer4"),
        ({"model": "resnet18@V9:layer4"}, "model", "unknown_weights", "IMAGENET1K_V1"),
        ({"model": "resnet5@random:layer4"}, "model", "model_not_found", "resnet50"),
        ({"model": "nothing"}, "model", "model_not_found", "no extractor"),
        ({"dimensions": 513}, "dimensions", "invalid_request", "512 dimensions"),
        ({"dimensions": 513, "input": "AAAA"}, "dimensions", "invalid_request", "512 dimensions"),  # not even decoded
        ({"dimensions": 0}, "dimensions", "invalid_request", "greater than or equal to 1"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_request", "'float' or 'base64'"),
        ({"extra_body": {"task": "search"}}, "task", "invalid_request", "expected one of model, input"),
    ],
)
def test_what_is_wrong_is_said_in_its_shape(client, photos, asked, param, code, said):
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as error:
        client.embeddings.create(**{"model": MODEL, "input": data_url(photos["chelsea"]), **asked})
    status = 404 if code == "model_not_found" else 400
    assert said in refused(error, status, param, code)
    assert error.value.type == "invalid_request_error"


def test_several_outputs_are_no_embedding(server, client, photos):
    created(server.http, model="resnet18", weights="random", return_nodes=["layer3", "layer4"], name="two")
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model="two", input=data_url(photos["chelsea"]))
    assert "layer3, layer4" in refused(error, 400, "model", "invalid_request")


def test_weights_that_cannot_be_had_are_not_asked_for_again(server, photos):
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as client,
        pytest.raises(openai.InternalServerError) as error,
    ):
        client.embeddings.create(model="resnet18:layer4", input=data_url(photos["chelsea"]))
    assert "resnet18-" in refused(error, 503, None, "weights_unavailable")
    assert error.value.type == "server_error"
    assert error.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_other_statuses_have_its_shape_too(server, photos):
    def asked(**options):
        response = server.http.request(options.pop("method", "POST"), "/v1/embeddings", **options)
        assert set(response.json()) == {"error"}, response.text
        return response.status_code, response.json()["error"]["code"]

    body = {"model": MODEL, "input": data_url(photos["chelsea"])}
    assert asked(content=photos["chelsea"], headers={"content-type": "image/jpeg"}) == (415, "unsupported_media_type")
    assert asked(content=b"{", headers={"content-type": "application/json"}) == (400, "invalid_request")
    assert asked(json=body, params={"pool": "avg"}) == (400, "invalid_request")
    assert asked(json=body, headers={"X-Request-Timeout": "0"}) == (400, "invalid_request")
    assert asked(json=body, headers={"X-Request-Timeout": "0.0001"}) == (504, "deadline_exceeded")
    assert asked(json=body, headers={"Origin": "http://elsewhere.example"}) == (403, "forbidden")
    assert asked(json=body, headers={"Host": "elsewhere.example"}) == (421, "misdirected")
    assert asked(method="GET") == (405, "method_not_allowed")


def test_limits_have_its_shape_too(start, photos):
    small = start(max_body_bytes=100_000, max_pixels=10_000, max_inflight=1)
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as error:
            client.embeddings.create(model=MODEL, input=[data_url(photos["coffee"])] * 3)
        refused(error, 413, None, "body_too_large")
        with pytest.raises(openai.APIStatusError) as error:
            client.embeddings.create(model=MODEL, input=data_url(photos["chelsea"]))
        refused(error, 413, "input", "image_too_large")
