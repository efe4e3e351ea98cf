"""Attributions over HTTP are captum's of the model that torchvision built."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator

import numpy as np
import PIL.Image
import pytest
import torch
from captum.attr import IntegratedGradients, LayerGradCam
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize, pil_to_tensor, resize

from fxcore import get_model, load_model, photos
from tests.hostile_images import saved
from tests.service.conftest import Client
from tests.service.own_models import own_models
from tests.wire import NPY, NPZ, SAFETENSORS, created, images, read, refused, sent

PHOTO = saved(photos.photos()[0], "PNG")
ROUTE = "/v1/models/resnet18/attributions"
RESNET18 = {"model": "resnet18", "weights": "random", "return_nodes": ["C3"]}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load_model(get_model("resnet18"), "random").eval()


@pytest.fixture(scope="module")
def image() -> Tensor:
    weights = get_model("resnet18").preprocessing("random")
    row: Tensor = weights.rgb.from_array(torch.from_numpy(np.array(photos.photos()[0]))[None])
    return row


def test_gradcam_is_captums(client: Client, model: nn.Module, image: Tensor) -> None:
    response = client.post(f"{ROUTE}?weights=random&of=fc&at=layer4&target=281", **sent(PHOTO, SAFETENSORS))
    found = read(response)
    expected = LayerGradCam(model, model.layer4).attribute(image, 281, relu_attributions=True)[:, 0]
    torch.testing.assert_close(found["attribution"], expected, rtol=1e-3, atol=1e-5)
    assert found["targets"].tolist() == [281]
    assert response.headers["x-fxserve-backend"] == "eager"


@pytest.mark.exhaustive
def test_integrated_gradients_at_the_input_are_captums(client: Client, model: nn.Module, image: Tensor) -> None:
    url = f"{ROUTE}?weights=random&of=fc&method=integrated_gradients&target=7&steps=3"
    found = read(client.post(url, **sent(PHOTO, SAFETENSORS)))
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
        **sent(saved(photo, "PNG"), SAFETENSORS),
    )
    found = read(response)
    assert found["targets"].tolist() == target.tolist()
    expected = IntegratedGradients(model).attribute(x, target=target, n_steps=1).float()
    torch.testing.assert_close(found["attribution"], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("one_step", [True, False])
def test_padded_images_have_their_place_beside_the_attribution(
    client: Client, model: nn.Module, one_step: bool
) -> None:
    """The square photo is resized to 96 x 96; the rest is the mean colour, zero when normalised."""
    url = f"{ROUTE}?of=fc&at=layer3&target=281&weights=random&image_size=96x160&fit=pad"
    if not one_step:
        id = created(client, **RESNET18, image_size=[96, 160], fit="pad")["id"]
        url = f"/v1/extractors/{id}/attributions?of=fc&at=layer3&target=281"
    place = [[32, 0, 128, 96]]
    resized = resize(pil_to_tensor(photos.photos()[0]), [96, 96], antialias=True).float() / 255
    x = torch.zeros(1, 3, 96, 160)
    x[..., 32:128] = normalize(resized, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    expected = LayerGradCam(model, model.layer3).attribute(x, 281, relu_attributions=True)[:, 0]

    found = read(client.post(url, **sent(PHOTO, SAFETENSORS)))
    assert set(found) == {"attribution", "targets", "valid_box"}
    assert found["valid_box"].tolist() == place
    torch.testing.assert_close(found["attribution"], expected, rtol=1e-3, atol=1e-5)
    for accept in (NPZ, "application/json"):
        again = read(client.post(url, **sent(PHOTO, accept)))
        assert torch.equal(again["attribution"], found["attribution"])
        assert again["valid_box"].tolist() == place
    picture = PIL.Image.open(io.BytesIO(client.post(url, **sent(PHOTO, "image/png")).content))
    assert picture.size == (160, 96)
    url = "/v1/models/resnet18/features?weights=random&nodes=layer3&image_size=96x160&fit=pad"
    assert torch.equal(read(client.post(url, **sent(PHOTO)))["valid_box"], found["valid_box"])


def test_the_largest_result_is_named_and_what_else_it_depends_on_is_found(
    client: Client, model: nn.Module, image: Tensor
) -> None:
    """The value of layer4.1.conv1 goes beside the shortcut, which is no part of the gradient."""
    document = client.post(f"{ROUTE}?weights=random&of=fc&at=layer4.1.conv1&method=gradient", **sent(PHOTO)).json()
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
    url = f"/v1/models/{entry.name}/attributions?weights=random&of=head.fc&target=7&at={at}&method=gradient"
    found = read(client.post(url, **sent(PHOTO, SAFETENSORS)))["attribution"]
    reference, x = load_model(entry, "random").eval(), entry.preprocessing("random").image(photos.photos()[0])[None]
    seen: dict[str, Tensor] = {}
    with reference.get_submodule(at).register_forward_hook(lambda _, __, output: seen.update(value=output)):
        scores = reference(x.requires_grad_())
    [expected] = torch.autograd.grad(scores[0, 7], seen["value"])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("query", "count", "kind", "status"),
    [("at=flatten&method=gradient", 1, "no-heat-map", 422), ("at=layer4", 2, "not-acceptable", 406)],
)
def test_what_cannot_be_drawn_is_another_type_that_is_accepted(
    client: Client, query: str, count: int, kind: str, status: int
) -> None:
    url, body = f"{ROUTE}?weights=random&of=fc&{query}", images([PHOTO] * count)
    response = client.post(url, json=body, headers={"Accept": "image/png, application/x-safetensors;q=0.5"})
    assert response.headers["content-type"] == SAFETENSORS, response.text
    refused(client.post(url, json=body, headers={"Accept": "image/png"}), kind, status=status)


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
    url = f"/v1/models/timm.test_vit/{query}&weights=random"
    content = saved(PIL.Image.new("RGB", (96, 64), "gray"), "PNG")
    values = read(client.post(url, **sent(content, NPY)))
    assert values.shape == (1, 1 + 4 * 6, 64)
    cells = np.abs(values[0, 1:]).mean(-1).reshape(4, 6)
    expected = np.asarray(PIL.Image.fromarray(cells).resize((96, 64), PIL.Image.Resampling.BICUBIC))
    drawn = np.asarray(PIL.Image.open(io.BytesIO(client.post(url, **sent(content, "image/png")).content))).sum(2)
    assert drawn.shape == (64, 96)
    ranks = [value.ravel().argsort().argsort() for value in (expected.clip(cells.min(), cells.max()), drawn)]
    assert np.corrcoef(ranks)[0, 1] > 0.99


@pytest.mark.parametrize(
    ("query", "slug", "said"),
    [
        ("of=fc&at=layer4&target=1000", "bad-target", "from 0 to 999"),
        ("of=avgpool&at=fc", "bad-target", "'avgpool' does not depend on 'fc'"),
        ("of=fc", "invalid-request", "as query parameter 'at'"),
        ("of=layer4.*&at=layer3", "invalid-request", "'of' must be one node"),
        ("of=fc&at=layer*.*", "invalid-request", "'at' must be one node"),
        ("of=fc&at=layr4", "unknown-node", "layer4"),
        ("of=fc&at=layer4&fit=native", "unsupported", "available: crop, stretch, pad"),
        ("of=fc&at=layer4&steps=101&method=integrated_gradients", "invalid-request", "100"),
        ("of=fc&at=layer4&target=1.5", "invalid-request", "'target': give the index of a result, or max"),
    ],
)
def test_what_cannot_be_attributed_is_said(client: Client, query: str, slug: str, said: str) -> None:
    """Before anything is decoded."""
    refused(client.post(f"{ROUTE}?weights=random&{query}", **sent(b"no image")), slug, said)


def test_a_bad_target_is_one_error(client: Client) -> None:
    document = client.post(f"{ROUTE}?weights=random&of=fc&at=layer4&target=cat", **sent(PHOTO)).json()
    message = "give the index of a result, or max"
    assert document["errors"] == [{"in": "query", "field": "target", "message": message}]


def test_too_many_branches_are_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first convolution of a block has the shortcut beside it."""
    monkeypatch.setattr("service.http.routes.v1.attributions.MAX_INPUTS", 1)
    response = client.post(f"{ROUTE}?weights=random&of=fc&at=layer2.1.conv1", **sent(PHOTO))
    refused(response, "bad-target", "'fc' depends on 1 other nodes besides 'layer2.1.conv1'; choose a node for at with")


@pytest.mark.skipif(torch.cuda.is_available(), reason="int8 is on CPUs only")
def test_int8_is_refused(client: Client) -> None:
    id = client.post("/v1/extractors?wait=0", json={**RESNET18, "precision": "int8"}).json()["id"]
    response = client.post(f"/v1/extractors/{id}/attributions?of=fc&at=C5", **sent(PHOTO))
    assert refused(response, "unsupported")["field"] == "precision"


def test_int8_weights_are_refused(client: Client) -> None:
    url = "/v1/models/quantized_shufflenet_v2_x0_5/attributions?of=fc&at=C5"
    document = refused(client.post(url, **sent(PHOTO)), "unsupported")
    assert (document["field"], document["available"]) == ("weights", ["random"])


def test_scalars_and_regions_are_refused(client: Client) -> None:
    url = f"{ROUTE}?weights=random&of=fc&at=C5"
    refused(client.post(url, **sent({"x": torch.tensor(1.0)})), "bad-tensor")
    refused(client.post(url, json=images([PHOTO], boxes=[[[0, 0, 9, 9]]])), "bad-box")


@pytest.mark.exhaustive
def test_rows_over_a_batch_are_attributed_as_alone(client: Client) -> None:
    """They are more than the device worker takes at a time."""
    url = f"{ROUTE}?weights=random&of=fc&at=C5&method=integrated_gradients&steps=2"
    one = read(client.post(url, **sent(PHOTO, SAFETENSORS)))
    many = read(client.post(url, json=images([PHOTO] * 33), headers={"Accept": SAFETENSORS}))
    assert many["targets"].tolist() == one["targets"].tolist() * 33
    expected = one["attribution"].expand(33, -1, -1, -1)
    torch.testing.assert_close(many["attribution"], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.exhaustive
def test_what_lies_between_the_halves_is_not_sent(make_client: Callable[..., Client]) -> None:
    """Values at layer1 have 64 x 16 x 16 x 4 bytes an image; Grad-CAM of them 16 x 16 x 4."""
    client = make_client(max_response_bytes=60_000)
    url = f"{ROUTE}?weights=random&of=fc&at=layer1&image_size=64&fit=stretch&target=0"
    assert read(client.post(url, **sent(PHOTO, SAFETENSORS)))["attribution"].shape == (1, 16, 16)
    response = client.post(f"{url}&method=gradient", **sent(b"no image"))  # refused before it is decoded
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
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("own models")
    text = "".join(
        f'[models.{name}]\nbuilder = "own_models:Tokens"\narguments = {{ {arguments} }}\n'
        "preprocessing = { resize_size = 32, crop_size = 32 }\n"
        for name, arguments in (("tokens", ""), ("sized_tokens", "reads_sizes = true"))
    )
    with own_models(folder, OWN, text):
        client = Client(models_dir=folder)
        yield client
        client.close()


@pytest.mark.parametrize("size", [(32, 32), (16, 64)])
def test_gradcam_of_tokens_has_the_grid_of_the_images(own: Client, size: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    url = "/v1/models/tokens/attributions?of=head&at=block&target=3&method=gradcam"
    found = read(own.post(url, **sent(x, SAFETENSORS)))["attribution"]
    model = sys.modules["own_models"].Tokens().eval()
    seen: dict[str, Tensor] = {}
    with model.block.register_forward_hook(lambda _, __, output: seen.update(value=output)):
        [slopes] = torch.autograd.grad(model(x)[:, 3].sum(), seen["value"])
    expected = (seen["value"] * slopes.mean(1, keepdim=True)).sum(2).relu().view(2, size[0] // 8, size[1] // 8)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("method", "size"), [("gradcam", (16, 64)), ("gradient", (48, 32))])
def test_another_size_than_that_of_constants_is_refused(own: Client, method: str, size: tuple[int, int]) -> None:
    """16 x 64 pixels have as many patches as 32 x 32."""
    url, x = f"/v1/models/sized_tokens/attributions?of=head&at=block&method={method}", torch.rand(1, 3, *size)
    said = "after block supports only the size that it is built for, 32 x 32"
    refused(own.post(url, **sent(x)), "bad-tensor", said)
    assert own.post(f"{url}&image_size={size[0]}x{size[1]}", **sent(x)).status_code == 200
