"""tokens=…, against what forward hooks on timm's own model see; and what is refused."""

import re

import numpy as np
import pytest
import torch

from fxcore import get_model, load_model
from fxcore.photos import photos
from tests.wire import NPZ, SAFETENSORS, created, read, refused, sent

MODEL, BLOCK = "timm.test_vit", "blocks.0"
WEIGHTS = f"{BLOCK}.attn.attention"
PIXELS = np.array(photos()[0].resize((160, 160)))[None]


def asked(client, id, query="", accept=NPZ):
    return client.post(f"/v1/extractors/{id}/features{query}", **sent(PIXELS, accept))


@pytest.fixture(scope="module")
def made(client):
    nodes = {WEIGHTS: "attention", BLOCK: "tokens"}
    return created(client, model=MODEL, weights="random", return_nodes=nodes, transforms=["attention_maps"])["id"]


def test_queries_of_attention_and_tokens_are_those_that_hooks_see(client, made):
    entry = get_model(MODEL)
    model = load_model(entry, "random")
    block, seen = model.get_submodule(BLOCK), {}
    block.register_forward_hook(lambda *given: seen.update(tokens=given[2]))
    block.attn.qkv.register_forward_hook(lambda *given: seen.update(qkv=given[2]))
    with torch.no_grad():
        model(entry.preprocessing().from_array(torch.from_numpy(PIXELS)))
    count = block.attn.num_heads
    query, key, _ = (one.unflatten(-1, (count, -1)).transpose(1, 2) for one in seen["qkv"].chunk(3, -1))
    weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    length = weights.shape[-1]
    found = read(asked(client, made, "?tokens=57,0,57"))
    assert found["attention"].shape == (1, count, 3, length)
    np.testing.assert_allclose(found["attention"], weights[:, :, [57, 0, 57]], atol=1e-5)
    np.testing.assert_allclose(found["tokens"], seen["tokens"][:, [57, 0, 57]], atol=1e-4)
    halves = read(asked(client, made, f"?tokens={length - 1}&dtype=float16&normalize=l2"))["tokens"]
    last = seen["tokens"][:, -1:]
    np.testing.assert_allclose(halves, last / last.norm(dim=-1, keepdim=True), atol=2e-3)
    assert read(asked(client, made, "?tokens=0&project=9"))["attention"].shape == (1, 9)


@pytest.mark.exhaustive
def test_windows_give_the_query_of_that_index_in_each(client):
    node = "features.1.1.attn.attention"
    id = created(client, model="swin_t", weights="random", return_nodes=[node], transforms=["attention_maps"])["id"]
    whole = read(asked(client, id))[node]
    np.testing.assert_allclose(read(asked(client, id, "?tokens=13"))[node], whole[..., [13], :], atol=1e-6)


def test_a_row_is_answered_where_all_would_be_too_large(make_client):
    client = make_client(max_response_bytes=40_000)
    id = created(client, model=MODEL, weights="random", return_nodes=[WEIGHTS], transforms=["attention_maps"])["id"]
    whole = asked(client, id)
    assert (whole.status_code, whole.json()["ways"][0]) == (413, "tokens=0")
    many = asked(client, id, "?tokens=" + ",".join(map(str, range(60))))
    assert (many.status_code, many.json()["ways"][:2]) == (413, ["project=4096", "fewer tokens"])
    assert len(asked(client, id, "?tokens=0", SAFETENSORS).content) < 40_000


def test_v2_takes_them_as_a_parameter(client, made):
    pixels = {"name": "x", "datatype": "UINT8", "shape": list(PIXELS.shape), "data": PIXELS.ravel().tolist()}

    def inferred(parameters, query=""):
        sent = {"inputs": [pixels], "outputs": [{"name": "tokens"}], "parameters": parameters}
        return client.post(f"/v2/models/{made}/infer{query}", json=sent)

    response = inferred({"tokens": "57,0"})
    assert response.status_code == 200, response.text
    (found,) = response.json()["outputs"]
    expected = read(asked(client, made, "?tokens=57,0"))["tokens"]
    np.testing.assert_allclose(np.reshape(found["data"], found["shape"]), expected, rtol=1e-6)
    for wrong in (inferred({"tokens": "-1"}), inferred({"tokens": 3}), inferred({}, "?tokens=3")):
        assert (wrong.status_code, "tokens" in wrong.json()["error"]) == (400, True), wrong.text


def test_long_lists_are_kept_in_no_cache(client, made):
    runtime = client.run(client.app.state.fxserve.engine.extractors.look_up(made)).runtime
    for count, more in ((64, True), (65, False)):
        before = runtime.sizes.bytes
        read(asked(client, made, "?tokens=" + ",".join(["5"] * count)))
        assert (runtime.sizes.bytes > before) == more


def test_the_document_says_how_many_there_may_be(client):
    document = client.get("/openapi.json").json()
    parameters = document["paths"]["/v1/extractors/{extractor}/features"]["post"]["parameters"]
    (tokens,) = (one["schema"] for one in parameters if one["name"] == "tokens")
    pattern = (tokens.get("anyOf") or [tokens])[0]["pattern"]
    assert re.search(pattern, ",".join(["7"] * 1024))
    assert not re.search(pattern, ",".join(["7"] * 1025))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("tokens=101", "this node has 101 tokens, from 0 to 100, and no token 101"),
        ("tokens=0&pool=avg", "tokens and pool=avg cannot be combined"),
        *((f"tokens={wrong}", "token indices from 0") for wrong in ("", "-1", "1,", "0x1", "1.5", "99999999")),
        ("tokens=" + ",".join(["0"] * 1025), "up to 1024 token indices"),
    ],
)
def test_tokens_that_are_none_are_refused(client, made, query, said):
    response = asked(client, made, f"?{query}")
    assert (response.status_code, said in response.json()["detail"]) == (422, True), response.text


def test_values_of_unknown_axes_are_refused(client):
    """Rather than that one of the heads, or of a kernel's parts, is taken for a token."""
    for node in ("blocks.2.attn.transpose", "blocks.0.attn.reshape"):
        made = created(client, model=MODEL, weights="random", return_nodes={node: "out"})
        assert "queries" not in made["outputs"][0]
        problem = "this node gives values of unknown axes of shape"
        refused(asked(client, made["id"], "?tokens=0"), "bad-tensor", problem)


@pytest.mark.parametrize(("node", "given"), [("features.5", "NCHW"), ("flatten", "NC")])
def test_values_without_tokens_are_refused(client, photos, node, given):
    url = f"/v1/models/squeezenet1_1/features?weights=random&nodes={node}&tokens=0"
    refused(client.post(url, **sent(photos["chelsea"])), "bad-tensor", f"this node gives {given} of shape")
