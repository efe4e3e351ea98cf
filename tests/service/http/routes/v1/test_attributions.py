"""Attributions over HTTP are captum's of the model that torchvision built."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import PIL.Image
import pytest
import torch
from captum.attr import IntegratedGradients, LayerGradCam
from safetensors.torch import load, save
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize, pil_to_tensor, resize

from fxcore import get_model, load_model, photos
from tests.hostile_images import saved
from tests.service.conftest import Client
from tests.service.own_models import own_models

PHOTO = saved(photos.photos()[0], "PNG")
ROUTE = "/v1/models/resnet18/attributions"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load_model(get_model("resnet18"), "random").eval()


@pytest.fixture(scope="module")
def image() -> Tensor:
    weights = get_model("resnet18").preprocessing("random")
    row: Tensor = weights.rgb.from_array(torch.from_numpy(np.array(photos.photos()[0]))[None])
    return row


def asked(client: Client, query: str, accept: str = "application/x-safetensors", route: str = ROUTE) -> httpx.Response:
    headers = {"Content-Type": "image/png", "Accept": accept}
    return client.post(f"{route}?{query}", content=PHOTO, headers=headers)


def test_gradcam_is_captums(client: Client, model: nn.Module, image: Tensor) -> None:
    response = asked(client, "weights=random&of=fc&at=layer4&target=281")
    assert response.status_code == 200, response.text
    found = load(response.content)
    expected = LayerGradCam(model, model.layer4).attribute(image, 281, relu_attributions=True)[:, 0]
    torch.testing.assert_close(found["attribution"], expected, rtol=1e-3, atol=1e-5)
    assert found["targets"].tolist() == [281]
    assert response.headers["x-fxserve-backend"] == "eager"


@pytest.mark.exhaustive
def test_integrated_gradients_at_the_input_are_captums(client: Client, model: nn.Module, image: Tensor) -> None:
    found = load(asked(client, "weights=random&of=fc&method=integrated_gradients&target=7&steps=3").content)
    expected = IntegratedGradients(model).attribute(image, target=7, n_steps=3).float()
    torch.testing.assert_close(found["attribution"], expected, rtol=1e-3, atol=1e-5)


def test_one_step_of_integrated_gradients_explains_what_the_model_says_of_the_image(client: Client) -> None:
    """Halfway from zeros to the photo, the largest result is another one."""
    entry, photo = get_model("efficientnet_lite0"), photos.photos()[1]
    model = load_model(entry, "DEFAULT").eval()
    x = entry.preprocessing("DEFAULT").rgb.from_array(torch.from_numpy(np.array(photo))[None])
    with torch.no_grad():
        target, halfway = model(x).argmax(1), model(x / 2).argmax(1)
    assert target != halfway
    response = client.post(
        "/v1/models/efficientnet_lite0/attributions?of=classifier&method=integrated_gradients&steps=1",
        content=saved(photo, "PNG"),
        headers={"Content-Type": "image/png", "Accept": "application/x-safetensors"},
    )
    found = load(response.content)
    assert found["targets"].tolist() == target.tolist()
    expected = IntegratedGradients(model).attribute(x, target=target, n_steps=1).float()
    torch.testing.assert_close(found["attribution"], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("one_step", [True, False])
def test_padded_images_have_their_place_beside_the_attribution(
    client: Client, model: nn.Module, one_step: bool
) -> None:
    """The square photo is resized to 96 x 96; the rest is the mean colour, zero when normalised."""
    query, route = "of=fc&at=layer3&target=281", ROUTE
    if one_step:
        query += "&weights=random&image_size=96x160&fit=pad"
    else:
        spec = {"model": "resnet18", "weights": "random", "return_nodes": ["C3"], "image_size": [96, 160], "fit": "pad"}
        route = f"/v1/extractors/{client.post('/v1/extractors', json=spec).json()['id']}/attributions"
    place = [[32, 0, 128, 96]]
    resized = resize(pil_to_tensor(photos.photos()[0]), [96, 96], antialias=True).float() / 255
    x = torch.zeros(1, 3, 96, 160)
    x[..., 32:128] = normalize(resized, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    expected = LayerGradCam(model, model.layer3).attribute(x, 281, relu_attributions=True)[:, 0]

    found = load(asked(client, query, route=route).content)
    assert set(found) == {"attribution", "targets", "valid_box"}
    assert found["valid_box"].tolist() == place
    torch.testing.assert_close(found["attribution"], expected, rtol=1e-3, atol=1e-5)
    arrays = np.load(io.BytesIO(asked(client, query, "application/x-npz", route).content))
    assert arrays["valid_box"].tolist() == place
    assert np.array_equal(arrays["attribution"], found["attribution"])
    [attribution, box] = asked(client, query, "application/json", route).json()["outputs"]
    assert attribution["name"] == "attribution"
    assert (box["name"], box["node"], box["shape"], box["data"]) == ("valid_box", None, [1, 4], place[0])
    picture = PIL.Image.open(io.BytesIO(asked(client, query, "image/png", route).content))
    assert picture.size == (160, 96)
    features = client.post(
        "/v1/models/resnet18/features?weights=random&nodes=layer3&image_size=96x160&fit=pad",
        content=PHOTO,
        headers={"Content-Type": "image/png", "Accept": "application/x-safetensors"},
    )
    assert torch.equal(load(features.content)["valid_box"], found["valid_box"])


def test_the_largest_result_is_named_and_what_else_it_depends_on_is_found(
    client: Client, model: nn.Module, image: Tensor
) -> None:
    """The value of layer4.1.conv1 goes beside the shortcut, which is no part of the gradient."""
    document = asked(client, "weights=random&of=fc&at=layer4.1.conv1&method=gradient", "application/json").json()
    seen: dict[str, Tensor] = {}
    with model.layer4[1].conv1.register_forward_hook(lambda _, __, output: seen.update(value=output)):
        scores = model(image.clone().requires_grad_())
    [expected] = torch.autograd.grad(scores.max(), seen["value"])
    [output] = document["outputs"]
    assert (document["targets"], document["backend"]) == ([int(scores.argmax())], "eager")
    assert (output["name"], output["node"], output["shape"]) == ("attribution", "layer4.1.conv1", [1, 512, 7, 7])
    torch.testing.assert_close(torch.tensor(output["data"]).view(1, 512, 7, 7), expected, rtol=1e-3, atol=1e-6)


def test_values_are_attributed_beside_those_that_they_are_multiplied_by(client: Client) -> None:
    """The front half computes both, without gradients, and autograd keeps the others."""
    entry, at = get_model("timm.test_mambaout"), "stages.2.blocks.0.act"
    query = f"weights=random&of=head.fc&target=7&at={at}&method=gradient"
    response = asked(client, query, route=f"/v1/models/{entry.name}/attributions")
    assert response.status_code == 200, response.text
    reference, x = load_model(entry, "random").eval(), entry.preprocessing("random").image(photos.photos()[0])[None]
    seen: dict[str, Tensor] = {}
    with reference.get_submodule(at).register_forward_hook(lambda _, __, output: seen.update(value=output)):
        scores = reference(x.requires_grad_())
    [expected] = torch.autograd.grad(scores[0, 7], seen["value"])
    torch.testing.assert_close(load(response.content)["attribution"], expected, rtol=1e-3, atol=1e-7)


def test_an_extractor_has_its_models_attributions_as_pictures(client: Client) -> None:
    spec = {"model": "resnet18", "weights": "random", "return_nodes": ["C3"]}
    id = client.post("/v1/extractors", json=spec).json()["id"]
    response = asked(client, "of=fc&at=C5", "image/png", f"/v1/extractors/{id}/attributions")
    assert PIL.Image.open(io.BytesIO(response.content)).size == (224, 224)


@pytest.mark.parametrize(("query", "images"), [("at=flatten&method=gradient", 1), ("at=layer4", 2)])
def test_what_cannot_be_drawn_is_another_type_that_is_accepted(client: Client, query: str, images: int) -> None:
    body = {"images": [base64.b64encode(PHOTO).decode()] * images}
    url = f"{ROUTE}?weights=random&of=fc&{query}"
    response = client.post(url, json=body, headers={"Accept": "image/png, application/x-safetensors;q=0.5"})
    assert response.headers["content-type"] == "application/x-safetensors", response.text
    refused = client.post(url, json=body, headers={"Accept": "image/png"}).json()
    assert refused["type"] == ("/problems/no-heat-map" if images == 1 else "/problems/not-acceptable")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "query",
    [
        "attributions?image_size=64x96&fit=stretch&of=head&at=blocks.2&method=gradient",
        "features?image_size=64&fit=native&nodes=blocks.2",
    ],
)
def test_pictures_of_tokens_are_of_their_grid(client: Client, query: str) -> None:
    """A flat image, over which colours of inferno get lighter with the value."""
    route, _, query = query.partition("?")
    content = saved(PIL.Image.new("RGB", (96, 64), "gray"), "PNG")

    def answer(accept: str) -> bytes:
        url = f"/v1/models/timm.test_vit/{route}?weights=random&{query}"
        response = client.post(url, content=content, headers={"Content-Type": "image/png", "Accept": accept})
        assert response.status_code == 200, response.text
        return response.content

    found = load(answer("application/x-safetensors"))
    values = found["attribution" if route == "attributions" else "blocks.2"].numpy()
    assert values.shape == (1, 1 + 4 * 6, 64)
    cells = np.abs(values[0, 1:]).mean(-1).reshape(4, 6)
    expected = np.asarray(PIL.Image.fromarray(cells).resize((96, 64), PIL.Image.Resampling.BICUBIC))
    drawn = np.asarray(PIL.Image.open(io.BytesIO(answer("image/png")))).sum(2)
    assert drawn.shape == (64, 96)
    ranks = [value.ravel().argsort().argsort() for value in (expected.clip(cells.min(), cells.max()), drawn)]
    assert np.corrcoef(ranks)[0, 1] > 0.99


@pytest.mark.parametrize(
    ("query", "slug", "said"),
    [
        ("of=fc&at=layer4&target=1000", "bad-target", "from 0 to 999"),
        ("of=layer4&at=layer3", "bad-target", "one vector per image"),
        ("of=avgpool&at=fc", "bad-target", "'avgpool' does not depend on 'fc'"),
        ("of=fc", "invalid-request", "as query parameter 'at'"),
        ("of=layer4.*&at=layer3", "invalid-request", "'of' must be one node"),
        ("of=fc&at=layer*.*", "invalid-request", "'at' must be one node"),
        ("of=fc&at=flatten", "bad-tensor", "gradcam needs a feature map"),
        ("of=fc&at=layr4", "unknown-node", "layer4"),
        ("of=fc&at=layer4&fit=native", "unsupported", "available: crop, stretch, pad"),
        ("of=fc&at=layer4&steps=101&method=integrated_gradients", "invalid-request", "100"),
        ("of=fc&at=layer4&target=1.5", "invalid-request", "'target': give the index of a result, or max"),
    ],
)
def test_what_cannot_be_attributed_is_said(client: Client, query: str, slug: str, said: str) -> None:
    """Before anything is decoded."""
    headers = {"Content-Type": "image/png", "Accept": "application/x-safetensors"}
    response = client.post(f"{ROUTE}?weights=random&{query}", content=b"no image", headers=headers)
    assert (response.status_code, response.json()["type"]) == (422, f"/problems/{slug}"), response.text
    assert said in response.json()["detail"]


def test_a_bad_target_is_one_error(client: Client) -> None:
    document = asked(client, "weights=random&of=fc&at=layer4&target=cat").json()
    message = "give the index of a result, or max"
    assert document["errors"] == [{"in": "query", "field": "target", "message": message}]
    assert document["detail"] == f"query parameter 'target': {message}"


def test_too_many_branches_are_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first convolution of a block has the shortcut beside it."""
    monkeypatch.setattr("service.http.routes.v1.attributions.MAX_INPUTS", 1)
    document = asked(client, "weights=random&of=fc&at=layer2.1.conv1").json()
    assert document["detail"] == (
        "'fc' depends on 1 other nodes besides 'layer2.1.conv1'; choose a node for at with fewer parallel branches, "
        "such as a level"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="int8 is on CPUs only")
def test_int8_is_refused(client: Client) -> None:
    spec = {"model": "resnet18", "weights": "random", "return_nodes": ["C3"], "precision": "int8"}
    id = client.post("/v1/extractors?wait=0", json=spec).json()["id"]
    response = asked(client, "of=fc&at=C5", route=f"/v1/extractors/{id}/attributions")
    assert (response.status_code, response.json()["field"]) == (422, "precision")


def test_int8_weights_are_refused(client: Client) -> None:
    response = asked(client, "of=fc&at=C5", route="/v1/models/quantized_shufflenet_v2_x0_5/attributions")
    document = response.json()
    assert (response.status_code, document["field"], document["available"]) == (422, "weights", ["random"])


def test_a_scalar_is_refused(client: Client) -> None:
    headers = {"Content-Type": "application/x-safetensors"}
    content = save({"x": torch.tensor(1.0)})
    response = client.post(f"{ROUTE}?weights=random&of=fc&at=C5", content=content, headers=headers)
    assert (response.status_code, response.json()["type"]) == (422, "/problems/bad-tensor"), response.text


def test_regions_are_refused(client: Client) -> None:
    body = {"images": [base64.b64encode(PHOTO).decode()], "boxes": [[[0, 0, 9, 9]]]}
    response = client.post(f"{ROUTE}?weights=random&of=fc&at=C5", json=body)
    assert (response.status_code, response.json()["type"]) == (422, "/problems/bad-box")


@pytest.mark.exhaustive
def test_rows_over_a_batch_are_attributed_as_alone(client: Client) -> None:
    """They are more than the device worker takes at a time."""
    body = {"images": [base64.b64encode(PHOTO).decode()] * 33}
    url = f"{ROUTE}?weights=random&of=fc&at=C5&method=integrated_gradients&steps=2&encoding=base64"
    many = client.post(url, json=body).json()
    one = load(asked(client, "weights=random&of=fc&at=C5&method=integrated_gradients&steps=2").content)
    [output] = many["outputs"]
    values = torch.frombuffer(bytearray(base64.b64decode(output["data"])), dtype=torch.float32).view(output["shape"])
    assert len(values) == 33
    assert many["targets"] == one["targets"].tolist() * 33
    torch.testing.assert_close(values[[0, 32]], one["attribution"].expand(2, -1, -1, -1), rtol=1e-3, atol=1e-6)


@pytest.mark.exhaustive
def test_what_lies_between_the_halves_is_not_sent(make_client: Callable[..., Client]) -> None:
    """Values at layer1 have 64 x 16 x 16 x 4 bytes an image; Grad-CAM of them 16 x 16 x 4."""
    client = make_client(max_response_bytes=60_000)
    query = "weights=random&of=fc&at=layer1&image_size=64&fit=stretch&target=0"
    assert load(asked(client, query).content)["attribution"].shape == (1, 16, 16)
    undecoded = {"content": b"no image", "headers": {"Content-Type": "image/png"}}
    response = client.post(f"{ROUTE}?{query}&method=gradient", **undecoded)
    assert (response.status_code, response.json()["ways"]) == (413, ["method=gradcam", "another node for at"])


OWN = """
import torch
from torch import nn


class Tokens(nn.Module):
    def __init__(self, reads_sizes=False):
        super().__init__()
        torch.manual_seed(0)
        self.reads_sizes = reads_sizes
        self.patches, self.block, self.mix = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.patches(x)
        n, c, h, w = x.shape
        x = self.block(x.flatten(2).transpose(1, 2)).tanh()
        if self.reads_sizes:
            x = self.mix(x.transpose(1, 2).reshape(n, c, h, w)).flatten(2).transpose(1, 2)
        return self.head(x.pow(2).mean(1))


class Tiles(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        n = x.shape[0]
        tiles = x.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 16, 16)
        return self.head(self.conv(tiles).relu().mean((2, 3)).view(n, 4, -1).mean(1))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("own models")
    text = "".join(
        f'[models.{name}]\nbuilder = "own_models:{builder}"\narguments = {{ {arguments} }}\n'
        "preprocessing = { resize_size = 32, crop_size = 32 }\n"
        for name, builder, arguments in (
            ("tokens", "Tokens", ""),
            ("sized_tokens", "Tokens", "reads_sizes = true"),
            ("tiles", "Tiles", ""),
        )
    )
    with own_models(folder, OWN, text):
        client = Client(models_dir=folder)
        yield client
        client.close()


def of_tensor(client: Client, model: str, query: str, x: Tensor) -> httpx.Response:
    headers = {"Content-Type": "application/x-safetensors", "Accept": "application/x-safetensors"}
    return client.post(f"/v1/models/{model}/attributions?{query}", content=save({"x": x}), headers=headers)


@pytest.mark.parametrize("size", [(32, 32), (16, 64)])
def test_gradcam_of_tokens_has_the_grid_of_the_images(own: Client, size: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    response = of_tensor(own, "tokens", "of=head&at=block&target=3&method=gradcam", x)
    assert response.status_code == 200, response.text
    model = sys.modules["own_models"].Tokens().eval()
    seen: dict[str, Tensor] = {}
    with model.block.register_forward_hook(lambda _, __, output: seen.update(value=output)):
        [slopes] = torch.autograd.grad(model(x)[:, 3].sum(), seen["value"])
    expected = (seen["value"] * slopes.mean(1, keepdim=True)).sum(2).relu().view(2, size[0] // 8, size[1] // 8)
    torch.testing.assert_close(load(response.content)["attribution"], expected.detach(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("method", "size"), [("gradcam", (16, 64)), ("gradient", (48, 32))])
def test_another_size_than_that_of_constants_is_refused(own: Client, method: str, size: tuple[int, int]) -> None:
    """16 x 64 pixels have as many patches as 32 x 32."""
    query, x = f"of=head&at=block&method={method}", torch.rand(1, 3, *size)
    response = of_tensor(own, "sized_tokens", query, x)
    assert (response.status_code, response.json()["type"]) == (422, "/problems/bad-tensor"), response.text
    assert "after block supports only the size that it is built for, 32 x 32" in response.json()["detail"]
    response = of_tensor(own, "sized_tokens", f"{query}&image_size={size[0]}x{size[1]}", x)
    assert response.status_code == 200, response.text


def test_gradcam_of_tiles_is_refused(own: Client) -> None:
    response = of_tensor(own, "tiles", "of=head&at=conv&method=gradcam", torch.rand(1, 3, 32, 32))
    assert (response.status_code, response.json()["type"]) == (422, "/problems/bad-tensor"), response.text
    assert "gradcam needs a feature map" in response.json()["detail"]
