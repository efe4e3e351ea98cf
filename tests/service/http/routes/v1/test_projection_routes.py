"""project=N, against scikit-learn on the features of the same images; and float16 that overflows."""

import asyncio
import base64
import io

import numpy as np
import pytest
from sklearn.random_projection import SparseRandomProjection

NODES = "features.5:mid,features.12:top"
URL = f"/v1/models/squeezenet1_1/features?weights=random&nodes={NODES}"
NPZ = {"accept": "application/x-npz"}


def body(photos):
    return {"images": [base64.b64encode(photo).decode() for photo in photos.values()]}


def arrays(response):
    assert response.status_code == 200, response.text
    return dict(np.load(io.BytesIO(response.content)))


def projected(rows, components, seed=0):
    flat = rows.reshape(len(rows), -1)
    return SparseRandomProjection(n_components=components, random_state=seed).fit_transform(flat)


def close(actual, expected):
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("others", "seed"), [("", 0), ("&pool=avg", 7), ("&normalize=l2", 0), ("&pool=avg%2Bmax&dtype=float16", 0)]
)
def test_as_scikit_learn_projects_the_rows(client, photos, others, seed):
    answered = arrays(client.post(f"{URL}&project=50&seed={seed}{others}", json=body(photos), headers=NPZ))
    whole = arrays(client.post(URL + others.replace("&normalize=l2", "").replace("&dtype=float16", ""),
                               json=body(photos), headers=NPZ))  # fmt: skip
    for key in ("mid", "top"):
        expected = projected(whole[key], 50, seed)
        if "l2" in others:
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        if "float16" in others:
            assert answered[key].dtype == np.float16
            expected = expected.astype(np.float16)
        close(answered[key].astype(np.float32), expected)


def test_regions_are_projected_too(client, photos):
    document = body(photos) | {"boxes": [[[10, 10, 200, 200]]] * len(photos)}
    answered = arrays(client.post(f"{URL}&pool=roi&roi_size=3&project=20", json=document, headers=NPZ))
    regions = arrays(client.post(f"{URL}&pool=roi&roi_size=3", json=document, headers=NPZ))
    close(answered["mid"], projected(regions["mid"], 20))


def test_over_v2(client, photos):
    image = body(photos)["images"][:1]
    asked = {
        "inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": image}],
        "outputs": [{"name": "features.12"}],
        "parameters": {"weights": "random", "project": 50, "seed": 3},
    }
    answer = client.post("/v2/models/squeezenet1_1/infer", json=asked).json()["outputs"][0]
    whole = arrays(client.post(URL, json={"images": image}, headers=NPZ))["top"]
    assert answer["shape"] == [1, 50]
    close(np.array([answer["data"]]), projected(whole, 50, 3))
    for wrong, value in (("project", 0), ("project", True), ("project", "50"), ("seed", -1), ("seed", 2**32)):
        asked["parameters"][wrong] = value
        response = client.post("/v2/models/squeezenet1_1/infer", json=asked)
        assert response.status_code == 400
        assert f"{wrong} must be a whole number from" in response.json()["error"]
        asked["parameters"] |= {"project": 50, "seed": 3}


@pytest.mark.exhaustive
def test_the_response_limit_counts_what_is_projected(make_client, photos):
    client = make_client(max_response_bytes=2 * 50 * 4 * len(photos))
    refused = client.post(URL, json=body(photos), headers=NPZ).json()
    assert refused["type"] == "/problems/response-too-large"
    assert "project=4096" in refused["ways"]
    arrays(client.post(f"{URL}&project=50", json=body(photos), headers=NPZ))
    refused = client.post(f"{URL}&project=51", json=body(photos), headers=NPZ).json()
    assert refused["bytes"] == 2 * 51 * 4 * len(photos)


def test_a_matrix_over_its_share_of_the_memory_is_refused_before_it_is_made(make_client, photos):
    response = make_client(memory_budget=2**22).post(f"{URL}&project=65536", json=body(photos))
    assert (response.status_code, response.json()["type"]) == (422, "/problems/bad-tensor")
    assert "project to fewer values, or pool first" in response.json()["detail"]


def test_no_heat_map_of_what_is_projected(client, photos):
    url = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.5&project=9"
    response = client.post(url, json=body(photos), headers={"accept": "image/png"})
    assert response.status_code == 406
    assert "leave pool, project and tokens out" in response.json()["detail"]


def npy(*values):
    """Preprocessed images that can be told apart, and are outputs themselves at the node ``x``."""
    rows = np.broadcast_to(np.array(values, np.float32)[:, None, None, None], (len(values), 3, 64, 64))
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return {"content": buffer.getvalue(), "headers": {"content-type": "application/x-npy", **NPZ}}


def test_float16_that_overflows_is_refused_with_the_image(client):
    """Those that share its batch are answered, and so is what was infinite before."""
    url = "/v1/models/squeezenet1_1/features?weights=random&nodes=x&dtype=float16"

    async def at_once():
        return await asyncio.gather(
            *(client.http.post(url, **npy(*values)) for values in ([1, 2], [3, 70_000], [np.inf, 65_504], [-1e9]))
        )

    fine, second, infinite, first = client.run(at_once())
    assert arrays(fine)["x"][:, 0, 0, 0].tolist() == [1, 2]
    assert arrays(infinite)["x"][:, 0, 0, 0].tolist() == [np.inf, 65_504]
    for response, index in ((second, 1), (first, 0)):
        problem = response.json()
        assert (response.status_code, problem["type"]) == (422, "/problems/overflow")
        assert (problem["index"], problem["key"]) == (index, "x")
        assert problem["detail"].startswith(f"image {index}: output 'x' has values beyond 65,504")
    assert arrays(client.post(url.replace("&dtype=float16", ""), **npy(7e4)))["x"].max() == 7e4


@pytest.mark.parametrize("query", ["project=0", "project=65537", "project=x", "project=5&seed=-1", "seed=4294967296"])
def test_other_numbers_are_refused(client, photos, query):
    response = client.post(f"{URL}&{query}", json=body(photos))
    assert (response.status_code, response.json()["type"]) == (422, "/problems/invalid-request")
