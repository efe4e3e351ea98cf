"""project=N, against scikit-learn on the features of the same images; and float16 that overflows."""

import asyncio

import numpy as np
import pytest
from sklearn.random_projection import SparseRandomProjection

from tests.wire import NPZ, b64, close, images, read, refused, sent

NODES = "features.5:mid,features.12:top"
URL = f"/v1/models/squeezenet1_1/features?weights=random&nodes={NODES}"


def arrays(client, url, document):
    found = read(client.post(url, json=document, headers={"accept": NPZ}))
    return {name: value.numpy() for name, value in found.items()}


def projected(rows, components, seed=0):
    flat = rows.reshape(len(rows), -1)
    return SparseRandomProjection(n_components=components, random_state=seed).fit_transform(flat)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("others", "seed"), [("", 0), ("&pool=avg", 7), ("&normalize=l2", 0), ("&pool=avg%2Bmax&dtype=float16", 0)]
)
def test_as_scikit_learn_projects_the_rows(client, photos, others, seed):
    document = images(photos.values())
    answered = arrays(client, f"{URL}&project=50&seed={seed}{others}", document)
    whole = arrays(client, URL + others.replace("&normalize=l2", "").replace("&dtype=float16", ""), document)
    for key in ("mid", "top"):
        expected = projected(whole[key], 50, seed)
        if "l2" in others:
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        if "float16" in others:
            assert answered[key].dtype == np.float16
            expected = expected.astype(np.float16)
        close(answered[key], expected, 1e-4)


def test_regions_are_projected_too(client, photos):
    document = images(photos.values(), boxes=[[[10, 10, 200, 200]]] * len(photos))
    answered = arrays(client, f"{URL}&pool=roi&roi_size=3&project=20", document)
    regions = arrays(client, f"{URL}&pool=roi&roi_size=3", document)
    close(answered["mid"], projected(regions["mid"], 20), 1e-4)


def test_over_v2(client, photos):
    asked = {
        "inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [b64(photos["chelsea"])]}],
        "outputs": [{"name": "features.12"}],
        "parameters": {"weights": "random", "project": 50, "seed": 3},
    }
    answer = client.post("/v2/models/squeezenet1_1/infer", json=asked).json()["outputs"][0]
    whole = arrays(client, URL, images([photos["chelsea"]]))["top"]
    assert answer["shape"] == [1, 50]
    close([answer["data"]], projected(whole, 50, 3), 1e-4)
    for wrong, value in (("project", 0), ("project", True), ("project", "50"), ("seed", -1), ("seed", 2**32)):
        asked["parameters"][wrong] = value
        response = client.post("/v2/models/squeezenet1_1/infer", json=asked)
        assert response.status_code == 400
        assert f"{wrong} must be a whole number from" in response.json()["error"]
        asked["parameters"] |= {"project": 50, "seed": 3}


@pytest.mark.exhaustive
def test_the_response_limit_counts_what_is_projected(make_client, photos):
    document = images(photos.values())
    client = make_client(max_response_bytes=2 * 50 * 4 * len(photos))
    whole = client.post(URL, json=document, headers={"accept": NPZ})
    assert "project=4096" in refused(whole, "response-too-large", status=413)["ways"]
    arrays(client, f"{URL}&project=50", document)
    over = client.post(f"{URL}&project=51", json=document, headers={"accept": NPZ})
    assert over.json()["bytes"] == 2 * 51 * 4 * len(photos)


def test_a_matrix_over_its_share_of_the_memory_is_refused_before_it_is_made(make_client, photos):
    response = make_client(memory_budget=2**22).post(f"{URL}&project=65536", json=images(photos.values()))
    refused(response, "bad-tensor", "project to fewer values, or pool first")


@pytest.mark.parametrize(
    ("model", "query"), [("squeezenet1_1", "nodes=features.5&project=9"), ("timm.test_vit", "nodes=norm&tokens=0")]
)
def test_no_heat_map_of_what_is_projected_or_chosen(client, photos, model, query):
    url = f"/v1/models/{model}/features?weights=random&{query}"
    response = client.post(url, **sent(photos["chelsea"], "image/png"))
    refused(response, "not-acceptable", "leave pool, project and tokens out", status=406)


def filled(*values):
    """Preprocessed images that can be told apart, and are outputs themselves at the node ``x``."""
    rows = np.broadcast_to(np.array(values, np.float32)[:, None, None, None], (len(values), 3, 64, 64))
    return sent(rows, NPZ)


def test_float16_that_overflows_is_refused_with_the_image(client):
    """Those that share its batch are answered, and so is what was infinite before."""
    url = "/v1/models/squeezenet1_1/features?weights=random&nodes=x&dtype=float16"

    async def at_once():
        return await asyncio.gather(
            *(client.http.post(url, **filled(*values)) for values in ([1, 2], [3, 70_000], [np.inf, 65_504], [-1e9]))
        )

    fine, second, infinite, first = client.run(at_once())
    assert read(fine)["x"][:, 0, 0, 0].tolist() == [1, 2]
    assert read(infinite)["x"][:, 0, 0, 0].tolist() == [np.inf, 65_504]
    for response, index in ((second, 1), (first, 0)):
        problem = refused(response, "overflow", f"image {index}: output 'x' has values beyond 65,504")
        assert (problem["index"], problem["key"]) == (index, "x")
    assert read(client.post(url.replace("&dtype=float16", ""), **filled(7e4)))["x"].max() == 7e4


@pytest.mark.parametrize("query", ["project=0", "project=65537", "project=x", "project=5&seed=-1", "seed=4294967296"])
def test_other_numbers_are_refused(client, photos, query):
    refused(client.post(f"{URL}&{query}", **sent(photos["chelsea"])), "invalid-request")
