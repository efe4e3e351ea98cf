"""Odd and hostile images: the right answer or a clear error, little memory, and the next request is served."""

import pytest
import torch
import torchvision

from tests.decoding import decoded
from tests.hostile_images import HOSTILE, MAX_PIXELS, photo, saved
from tests.peak_memory import peak, reset_peak
from tests.seeded import seeded
from tests.service.conftest import Client
from tests.wire import read, refused, sent

FEATURES = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.2&pool=avg"


@pytest.fixture(scope="module")
def small():
    client = Client(max_pixels=MAX_PIXELS)
    yield client
    client.close()


@pytest.fixture(scope="module")
def usual(small):
    response = small.post(FEATURES, **sent(saved(photo(), "JPEG")))
    assert response.status_code == 200
    return response.json()["outputs"]


@pytest.mark.parametrize("preprocess", ["default", pytest.param("fast", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", HOSTILE)
def test_right_features_or_clear_error(small, usual, name, preprocess):
    make, expected = HOSTILE[name]
    data = make()
    before = reset_peak()
    response = small.post(f"{FEATURES}&preprocess={preprocess}", **sent(data))
    if expected == 200:
        assert read(response)["features.2"].isfinite().all()
    else:
        kind = {413: "image-too-large", 422: "bad-image"}[expected]
        assert refused(response, kind, status=expected)["index"] == 0
    assert peak() - before < 150_000_000  # an image of a million pixels, several times
    following = small.post(FEATURES, **sent(saved(photo(), "JPEG")))
    assert following.json()["outputs"] == usual


@pytest.mark.parametrize("name", ["palette", "cmyk", "one pixel", "animated gif", "grey with alpha", "lab profile"])
def test_odd_images_have_the_values_of_what_they_show(small, name):
    data = HOSTILE[name][0]()
    found = read(small.post(FEATURES.replace("&pool=avg", ""), **sent(data)))
    model = seeded(torchvision.models.squeezenet1_1, weights=None)
    transform = torchvision.models.get_model_weights("squeezenet1_1").DEFAULT.transforms()
    with torch.inference_mode():
        value = model.features[:3](transform(decoded(data))[None])
    torch.testing.assert_close(found["features.2"], value, rtol=1e-5, atol=1e-5)
