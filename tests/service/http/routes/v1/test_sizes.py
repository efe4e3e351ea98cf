"""``image_size`` and ``fit``: against torchvision's and timm's own models on images that torchvision resized."""

from __future__ import annotations

import io

import PIL.Image
import pytest
import timm
import torch
import torchvision
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.transforms.v2 import functional as F

from tests.decoding import decoded
from tests.hostile_images import saved
from tests.seeded import seeded
from tests.wire import close, created, images, read, refused, sent

NAMES = ["chelsea", "coffee", "rocket"]


def body(photos, names=NAMES, **others):
    return images([photos[name] for name in names], **others)


def cut(photos, *box):
    return saved(PIL.Image.open(io.BytesIO(photos["coffee"])).crop(box), "PNG")


def vit_of(size):
    """timm's vision transformer made for that size, of the same weights, up to its last norm."""
    overlay = {"state_dict": dict(made("timm.test_vit").state_dict())}
    module = timm.create_model("test_vit", pretrained=True, pretrained_cfg_overlay=overlay, img_size=size).eval()
    module.norm = torch.nn.Identity()
    return module


def resized(data, size, own):
    image = F.resize(decoded(data), list(size), F.InterpolationMode(own["interpolation"]), antialias=True)
    return F.normalize(image / 255, own["mean"], own["std"])


@pytest.fixture(scope="module")
def own(client):
    """The preprocessing that the service tells."""
    return lambda model: client.get(f"/v1/models/{model}").json()["preprocessing"]


def made(model):
    if model.startswith("timm."):
        return seeded(timm.create_model, model.removeprefix("timm."))
    return seeded(torchvision.models.get_model, model, weights=None)


@pytest.mark.exhaustive
def test_stretched_and_padded(client, photos, own):
    model, node = "timm.test_resnet", "layer4"
    module = made(model)
    for text, size in (("128x192", (128, 192)), ("288x96", (288, 96))):
        url = f"/v1/models/{model}/features?weights=random&nodes={node}:it&image_size={text}&fit="
        batch = torch.stack([resized(photos[name], size, own(model)) for name in NAMES])
        reference = create_feature_extractor(module, {node: "it"}).eval()
        with torch.inference_mode():
            close(read(client.post(url + "stretch", json=body(photos)))["it"], reference(batch)["it"], 1e-4)
        padded = read(client.post(url + "pad", json=body(photos)))
        inputs = torch.zeros(3, 3, *size)
        for row, name, box in zip(inputs, NAMES, padded["valid_box"].int().tolist(), strict=True):
            x1, y1, x2, y2 = box
            height, width = decoded(photos[name]).shape[-2:]
            assert (x2 - x1, y2 - y1) == tuple(
                round(side * min(size[0] / height, size[1] / width)) for side in (width, height)
            )
            assert (x1, y1) == ((size[1] - x2 + x1) // 2, (size[0] - y2 + y1) // 2)
            row[:, y1:y2, x1:x2] = resized(photos[name], (y2 - y1, x2 - x1), own(model))
        with torch.inference_mode():
            close(padded["it"], reference(inputs)["it"], 1e-4)


def test_native_images_of_several_sizes(client, photos, own):
    """Rows come in the order sent; of several shapes they are pooled or refused."""
    url = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.12.cat:it&fit=native&image_size=100"
    photos = {**photos, "upright": cut(photos, 100, 0, 350, 400)}
    order = ["rocket", "upright", "rocket", "coffee"]
    sizes = {}
    multiple = client.get("/v1/models/squeezenet1_1").json()["multiple"]
    for name in order:
        height, width = decoded(photos[name]).shape[-2:]
        scale = 100 / min(height, width)
        sizes[name] = tuple(round(side * scale / multiple) * multiple for side in (height, width))
    assert len(set(sizes.values())) == 2
    reference = create_feature_extractor(made("squeezenet1_1"), {"features.12.cat": "it"}).eval()
    with torch.inference_mode():
        maps = [reference(resized(photos[name], sizes[name], own("squeezenet1_1"))[None])["it"] for name in order]
    pooled = read(client.post(url + "&pool=avg", json=body(photos, order)))["it"]
    close(pooled, torch.cat([one.mean((2, 3)) for one in maps]), 1e-4)
    close(read(client.post(url, json=body(photos, ["rocket"])))["it"], maps[0], 1e-4)
    assert refused(client.post(url, json=body(photos, order)), "ragged", "pool=avg")["key"] == "it"


@pytest.mark.exhaustive
def test_native_images_of_a_vision_transformer(client, photos, own):
    """Each image at its own size, as timm's model made for that size of the same weights; rows in the order sent."""
    photos = {**photos, "upright": cut(photos, 100, 0, 350, 400), "square": cut(photos, 100, 0, 500, 400)}
    sizes = {"upright": (160, 96), "rocket": (96, 144), "square": (96, 96)}
    order = ["upright", "rocket", "square", "upright"]
    with torch.inference_mode():
        expected = [
            vit_of(sizes[name]).forward_features(resized(photos[name], sizes[name], own("timm.test_vit"))[None])
            for name in order
        ]
    url = "/v1/models/timm.test_vit/features?weights=random&nodes=blocks:it&image_size=100&fit=native"
    pooled = read(client.post(url + "&pool=cls", json=body(photos, order)))["it"]
    close(pooled, torch.cat([one[:, 0] for one in expected]), 1e-4)
    extractors = client.get("/v1/extractors").json()["extractors"]
    [told] = [one["sizes"] for one in extractors if one["sizes"] and one["outputs"][0]["key"] == "it"]
    assert [(one["height"], one["width"], one["images"]) for one in told] == [(160, 96, 2), (96, 144, 1)]
    assert {one["backend"] for one in told} == {"eager"}
    averaged = read(client.post(url + "&pool=avg", json=body(photos, order)))["it"]
    close(averaged, torch.cat([one[:, 1:].mean(1) for one in expected]), 1e-4)
    alike = read(client.post(url, json=body(photos, ["upright", "upright"])))["it"]
    close(alike, expected[0].repeat(2, 1, 1), 1e-4)
    refused(client.post(url, json=body(photos, order)), "ragged")
    # The right half of the upright image: of 10 x 6 patches the last three columns.
    boxes = [[[125, 0, 250, 400]], [], [], []]
    half = read(client.post(f"{url}&pool=roi&roi_size=1", json=body(photos, order, boxes=boxes)))["it"]
    grid = expected[0][:, 1:].unflatten(1, (10, 6)).permute(0, 3, 1, 2)
    rois = torch.tensor([[0, 48.0, 0, 96, 160]])
    wanted = torchvision.ops.roi_align(grid, rois, 1, spatial_scale=1 / 16, aligned=True)
    close(half.flatten(), wanted.flatten(), 1e-4)


def blank(width, height):
    return saved(PIL.Image.new("RGB", (width, height)), "PNG")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "node", "size", "query", "becomes", "said", "way"),
    [
        ("timm.test_vit", "norm", (1, 3000), "image_size=64", "64 x 192000", "no side may exceed 4096", "fit=pad"),
        ("squeezenet1_1", "features.3", (3000, 1), "image_size=64", "192000 x 64", "exceed 4096", "fit=pad"),
        ("timm.test_vit", "norm", (36, 10), "image_size=1120", "4032 x 1120", "16,384 squares of 16", "fit=pad"),
        ("timm.test_vit", "norm", (3072, 2048), "preprocess=none", "3072 x 2048", "16,384 squares", "send a small"),
    ],
)
def test_native_inputs_that_are_too_large(client, model, node, size, query, becomes, said, way):
    """They are refused by their headers: the model would compute for minutes."""
    url = f"/v1/models/{model}/features?weights=random&nodes={node}&pool=avg&fit=native&{query}"
    response = client.post(url, json=images([blank(64, 64), blank(*size)]))
    wanted = f"image 1: with fit=native the model's input would have {becomes} pixels"
    problem = refused(response, "image-too-large", wanted, status=413)
    assert problem["index"] == 1
    assert problem["pixels"] > problem["limit"]
    assert said in problem["detail"]
    assert way in problem["detail"]


@pytest.mark.exhaustive
def test_native_images_with_as_many_tokens_of_other_places(client):
    """Of grids of 4 x 6 and 6 x 4: only vectors of them are one tensor."""
    both = images([blank(120, 80), blank(80, 120)])
    url = "/v1/models/timm.test_vit/features?weights=random&nodes=norm&fit=native&image_size=64"
    problem = refused(client.post(url, json=both), "ragged", "(96 x 64 and 64 x 96 pixels)")
    assert problem["key"] == "norm"
    assert read(client.post(url + "&pool=cls", json=both))["norm"].shape == (2, 64)
    vectors = client.post(url.replace("nodes=norm", "nodes=fc_norm"), json=both)
    assert read(vectors)["fc_norm"].shape == (2, 64)
    assert read(client.post(url, json=images([blank(120, 80)] * 2)))["norm"].shape == (2, 25, 64)

    spec = {"model": "timm.test_vit", "weights": "random", "return_nodes": ["norm"], "name": "native-v2"}
    created(client, **spec, fit="native", image_size=64)
    tensor = {"name": "image", "datatype": "BYTES", "shape": [2], "data": both["images"]}
    answer = client.post("/v2/models/native-v2/infer", json={"inputs": [tensor]})
    assert answer.status_code == 400
    assert "(96 x 64 and 64 x 96 pixels)" in answer.json()["error"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", [(80, 120), (160, 80)])
def test_native_images_give_the_tokens_that_stand_for_no_place(client, other):
    """Token 7 is another place in each grid; the class token is none, and may be asked for alone."""
    both = images([blank(120, 80), blank(*other)])
    url = "/v1/models/timm.test_vit/features?weights=random&nodes=norm&fit=native&image_size=64"
    for query in ("&tokens=7", "&tokens=0,7", "&tokens=7&project=9"):
        refused(client.post(url + query, json=both), "ragged", "which do not correspond to each other")
    found = read(client.post(url + "&tokens=0", json=both))["norm"]
    assert torch.equal(found[:, 0], read(client.post(url + "&pool=cls", json=both))["norm"])
    alike = images([blank(120, 80)] * 2)
    assert read(client.post(url + "&tokens=7", json=alike))["norm"].shape == (2, 1, 64)


def test_one_size_in_specs_and_queries(client, photos):
    """The id is a function of the spec alone: defaults and squares are written in one way."""

    def made(**size):
        return created(client, model="squeezenet1_1", weights="random", return_nodes=["features.3"], **size)

    plain = made()
    assert made(fit="crop")["id"] == plain["id"]
    assert made(image_size=96)["id"] == made(image_size=[96, 96])["id"]
    others = [made(image_size=96), made(image_size=[64, 96]), made(image_size=[64, 96], fit="pad"), made(fit="native")]
    assert len({plain["id"], *(one["id"] for one in others)}) == 5
    assert others[1]["outputs"][0]["shape"] == [None, 128, 15, 23]
    assert others[3]["outputs"][0]["shape"] == [None, 128, None, None]
    url = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.3&image_size=64x96&fit=pad"
    assert client.post(url, json=body(photos)).json()["extractor"] == others[2]["id"]


def test_boxes_follow_padding(client, photos):
    """The whole image's box covers its place in the input, whose features fill the pooled map."""
    boxes = [[[0, 0, 451, 300]], [[0, 0, 600, 400], [0, 0, 300, 200]], []]
    url = "/v1/models/squeezenet1_1/features?weights=random&nodes=features.3:it&pool=roi&roi_size=2&fit=pad&image_size="
    found = read(client.post(f"{url}192x128", json=body(photos, boxes=boxes)))
    assert found["valid_box"].tolist() == [[0, 53, 128, 138], [0, 53, 128, 138], [0, 53, 128, 138]]
    # Under stretch to the size of that place, the whole image is the whole input.
    same = read(client.post(f"{url.replace('pad', 'stretch')}85x128", json=body(photos, boxes=boxes)))
    assert found["it"].shape == same["it"].shape
    assert torch.nn.functional.cosine_similarity(found["it"].flatten(1), same["it"].flatten(1)).min() > 0.9


def test_v2_has_the_places_too(client, photos):
    spec = {"model": "squeezenet1_1", "weights": "random", "return_nodes": {"features.3": "it"}, "name": "padded-v2"}
    created(client, **spec, fit="pad", image_size=[96, 160])
    described = client.get("/v2/models/padded-v2").json()["outputs"]
    assert described[-1] == {"name": "valid_box", "datatype": "FP32", "shape": [-1, 4]}
    tensor = {"name": "image", "datatype": "BYTES", "shape": [3], "data": body(photos)["images"]}
    expected = read(client.post("/v1/extractors/padded-v2/features", json=body(photos)))
    for wanted in ({}, {"outputs": [{"name": "valid_box"}]}):
        found = client.post("/v2/models/padded-v2/infer", json={"inputs": [tensor], **wanted}).json()["outputs"]
        assert [one["name"] for one in found] == (["valid_box"] if wanted else ["it", "valid_box"])
        assert found[-1]["data"] == expected["valid_box"].flatten().tolist()


@pytest.mark.parametrize(
    ("query", "kind", "detail"),
    [
        ("image_size=0", "invalid-request", "from 1 to 4096"),
        ("image_size=448x", "invalid-request", "448x672"),
        ("image_size=448x5000", "invalid-request", "from 1 to 4096"),
        ("fit=squash", "invalid-request", "'stretch'"),
        ("fit=native&image_size=448x672", "bad-tensor", "the length of the shorter side"),
    ],
)
def test_wrong_sizes(client, photos, query, kind, detail):
    url = f"/v1/models/squeezenet1_1/features?weights=random&nodes=features.3&{query}"
    problem = refused(client.post(url, **sent(photos["chelsea"])), kind, detail)
    assert problem["detail"].count("image_size") <= 1


def test_which_sizes_a_vision_transformer_accepts(client):
    spec = {"model": "timm.test_vit", "weights": "random", "return_nodes": ["head"], "image_size": 250}
    said = "its usual size is 160 x 160; choose multiples of 16"
    refused(client.post("/v1/extractors", json=spec), "bad-tensor", said)


@pytest.mark.parametrize("route", ["features?nodes=layer4", "attributions?of=fc&at=layer4"])
def test_images_that_are_not_resized_are_not_fitted(client, photos, route):
    """A size may be given, which models are built for, and native, under which sizes may differ."""
    url = f"/v1/models/resnet18/{route}&weights=random&preprocess=none"
    photo = sent(photos["chelsea"])
    for fit in ("stretch", "pad"):
        response = client.post(f"{url}&image_size=300x451&fit={fit}", **photo)
        problem = refused(response, "invalid-request", f"leave out fit={fit}, or preprocess=none")
        assert problem["errors"][0]["field"] == "fit"
    for query in ("&image_size=300x451&fit=crop", "" if "of=" in route else "&fit=native"):
        [output] = client.post(url + query, **photo).json()["outputs"]
        assert output["shape"][-2:] == [10, 15]


def test_clips_are_squares(client):
    spec = {"model": "r3d_18", "weights": "random", "return_nodes": ["layer4"], "image_size": [112, 224]}
    refused(client.post("/v1/extractors", json=spec), "invalid-request", "image_size is one number")


@pytest.mark.parametrize(
    ("model", "node", "size", "said"),
    [
        ("timm.test_vit", "norm", 2064, "2064 x 2064 is more than the 16,384 squares of 16 pixels"),
        # Three values of 64 channels at half the size.
        ("squeezenet1_1", "features.3", 4001, f"4001 x 4001 would need {3 * 4 * 64 * 2000**2:,} bytes"),
    ],
)
def test_sizes_that_would_hold_up_the_device(make_client, model, node, size, said):
    """Each extractor is checked on an image of its size."""
    client = make_client(max_batch_bytes=2**27)
    spec = {"model": model, "weights": "random", "return_nodes": [node], "image_size": size, "fit": "stretch"}
    refused(client.post("/v1/extractors", json=spec), "bad-tensor", said)


def test_wrong_specs(client):
    spec = {"model": "squeezenet1_1", "weights": "random", "return_nodes": {"features.3": "valid_box"}}
    response = client.post("/v1/extractors", json={**spec, "fit": "pad"})
    assert (response.status_code, response.json()["key"]) == (422, "valid_box")
    for size in (True, "448x672", [448], [448, 672, 3], 4097):
        wrong = client.post("/v1/extractors", json={**spec, "image_size": size})
        assert wrong.json()["errors"][0]["field"] == "image_size"


@pytest.mark.exhaustive
def test_a_vision_transformer_at_a_rectangle(client, photos, own):
    """timm's, made for that size of the same weights; boxes, tokens and the graph are of that size's patches."""
    batch = torch.stack([resized(photos[name], (64, 96), own("timm.test_vit")) for name in NAMES])
    with torch.inference_mode():
        expected = vit_of((64, 96)).forward_features(batch)
    url = "/v1/models/timm.test_vit/features?weights=random&nodes=blocks:it&image_size=64x96&fit=stretch"
    response = client.post(url, json=body(photos))
    close(read(response)["it"], expected, 1e-4)
    extractor = client.get(f"/v1/extractors/{response.json()['extractor']}").json()
    [output] = extractor["outputs"]
    assert output["shape"] == [None, 1 + 4 * 6, 64]
    assert (output["tokens"]["height"], output["tokens"]["width"], output["tokens"]["prefix"]) == (4, 6, 1)
    grid = expected[:, 1:].unflatten(1, (4, 6)).permute(0, 3, 1, 2)
    pooled = client.post(f"{url}&pool=roi&roi_size=1", json=body(photos, boxes=[[[0, 0, 451, 150]], [], []]))
    rois = torch.tensor([[0, 0, 0, 96, 32.0]])
    wanted = torchvision.ops.roi_align(grid, rois, 1, spatial_scale=1 / 16, aligned=True)
    close(read(pooled)["it"].flatten(), wanted.flatten(), 1e-4)
    graph = client.get("/v1/models/timm.test_vit/graph?weights=random&height=64&width=96").json()
    assert graph["input_shape"] == [None, 3, 64, 96]
    refused(client.post(url.replace("64x96", "60x96"), json=body(photos)), "bad-tensor")
    assert client.get("/v1/models/timm.test_vit").json()["multiple"] == 16
