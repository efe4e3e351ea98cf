"""pool=roi, against torchvision's roi_align on the whole map, and against cropping by hand."""

import asyncio
import base64
import io
import json
import math

import numpy as np
import PIL.Image
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torchvision.ops import roi_align

from tests.fxcore.hooks import hooked
from tests.seeded import seeded

BOXES = {
    "chelsea": [[120, 40, 320, 260], [200, 100, 231, 131]],  # 451 x 300
    "coffee": [],
    "rocket": [[250.5, 120.25, 420, 300]],  # 640 x 427
}


def body(photos, boxes=BOXES, **others):
    return {"images": [base64.b64encode(photos[name]).decode() for name in boxes], "boxes": [*boxes.values()], **others}


def ask(client, model, node, document, query="", **options):
    url = f"/v1/models/{model}/features?weights=random&nodes={node}&pool=roi{query}"
    return client.post(url, json=document, **options)


def tensors(response):
    assert response.status_code == 200, response.text
    return {one["name"]: torch.tensor(one["data"]).reshape(one["shape"]) for one in response.json()["outputs"]}


def close(actual, expected, tolerance=1e-5):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def by_hand(name, resize, crop, boxes=BOXES):
    """The boxes on the model's input: the shorter side becomes ``resize``, and the middle is cut out."""
    sizes = {"chelsea": (300, 451), "coffee": (400, 600), "rocket": (427, 640)}
    height, width = sizes[name]
    short = min(height, width)
    tall, wide = (side if side == short else int(resize * side / short) for side in (height, width))
    tall, wide = (resize, wide) if height == short else (tall, resize)
    top, left = round((tall - crop) / 2), round((wide - crop) / 2)
    moved = torch.tensor(boxes[name], dtype=torch.float64).reshape(-1, 4)
    return (moved * torch.tensor([wide / width, tall / height] * 2) - torch.tensor([left, top] * 2)).float()


@pytest.mark.parametrize("size", [7, 3])
def test_as_roi_align_on_the_whole_map(client, photos, reference, size):
    response = tensors(ask(client, "resnet18", "C4", body(photos), "" if size == 7 else f"&roi_size={size}"))
    maps = reference("resnet18", "layer3.1.relu_1", [photos[name] for name in BOXES])
    rois = [by_hand(name, 256, 224) for name in BOXES]
    close(response["C4"], roi_align(maps, rois, size, spatial_scale=1 / 16, aligned=True))
    assert response["box_image"].tolist() == [0, 0, 2]


def test_several_maps_each_at_its_stride_and_vectors(client, photos, reference):
    response = tensors(ask(client, "resnet18", "C3,layer4:last", body(photos), "&roi_size=1&normalize=l2"))
    rois = [by_hand(name, 256, 224) for name in BOXES]
    for key, node, stride in (("C3", "layer2.1.relu_1", 8), ("last", "layer4.1.relu_1", 32)):
        maps = reference("resnet18", node, [photos[name] for name in BOXES])
        pooled = roi_align(maps, rois, 1, spatial_scale=1 / stride, aligned=True).flatten(1)
        close(response[key], torch.nn.functional.normalize(pooled, dim=1))


@pytest.mark.parametrize(("size", "node", "level", "stride"), [(65, "layer4", "C5", 32), (33, "layer3", "C4", 16)])
def test_small_inputs_keep_the_networks_strides(client, photos, size, node, level, stride):
    """65 pixels make 3 positions at stride 32, which is nearer to 16."""
    query = f"&image_size={size}&fit=stretch&roi_size=2"
    response = tensors(ask(client, "resnet18", f"{level}:map", body(photos), query))
    model = seeded(torchvision.models.resnet18, weights=None)
    kept = []
    getattr(model, node).register_forward_hook(lambda module, inputs, output: kept.append(output))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    rois = []
    for name, boxes in BOXES.items():
        image = torchvision.transforms.functional.pil_to_tensor(PIL.Image.open(io.BytesIO(photos[name])))
        scale = torch.tensor([size / image.shape[2], size / image.shape[1]] * 2)
        rois.append(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4) * scale)
        resized = torchvision.transforms.v2.functional.resize(image, [size, size], antialias=True)
        with torch.inference_mode():
            model(((resized / 255 - mean[:, None, None]) / std[:, None, None])[None])
    close(response["map"], roi_align(torch.cat(kept), rois, 2, spatial_scale=1 / stride, aligned=True))


def test_maps_that_are_enlarged_to_whole_patches(client):
    """160 pixels make 5 positions at stride 32, of which MobileViT v2 makes 6."""
    name, boxes = "mobilevitv2_050", [[100.0, 90.0, 160.0, 158.0], [0.0, 0.0, 40.0, 160.0]]
    pixels = np.random.default_rng(0).integers(0, 256, (160, 160, 3), np.uint8)
    png = io.BytesIO()
    PIL.Image.fromarray(pixels).save(png, "png")
    document = {"images": [base64.b64encode(png.getvalue()).decode()], "boxes": [boxes]}
    query = "&image_size=160&fit=stretch&roi_size=2"
    response = tensors(ask(client, f"timm.{name}", "stages.4.1:map", document, query))
    model = seeded(timm.create_model, name)
    map = hooked(model, "stages.4.1", torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255)
    assert map.shape == (1, 256, 6, 6)
    assert model.default_cfg["mean"] == (0.0, 0.0, 0.0)
    close(response["map"], roi_align(map, [torch.tensor(boxes)], 2, spatial_scale=6 / 160, aligned=True))


def test_channels_last_maps(client, photos, reference):
    response = tensors(ask(client, "swin_t", "features.3", body(photos)))
    maps = reference("swin_t", "features.3.1.add_1", [photos[name] for name in BOXES]).permute(0, 3, 1, 2)
    rois = [by_hand(name, 232, 224) for name in BOXES]
    close(response["features.3"], roi_align(maps, rois, 7, spatial_scale=1 / 8, aligned=True))


@pytest.mark.exhaustive
def test_letterboxed_images_of_a_detector(client, photos):
    """Of different sizes, padded to one."""
    response = tensors(ask(client, "fasterrcnn_mobilenet_v3_large_320_fpn", "C4", body(photos)))
    detector = seeded(torchvision.models.get_model, "fasterrcnn_mobilenet_v3_large_320_fpn", weights_backbone=None)
    kept = []
    detector.backbone.body["13"].register_forward_hook(lambda module, inputs, output: kept.append((inputs[0], output)))
    images = [
        torchvision.transforms.functional.pil_to_tensor(PIL.Image.open(io.BytesIO(photos[name]))) / 255
        for name in BOXES
    ]
    with torch.inference_mode():
        detector(images)
    resized, _ = detector.transform(images)
    rois = [
        torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)
        * torch.tensor([size[1] / image.shape[2], size[0] / image.shape[1]] * 2)
        for image, size, boxes in zip(images, resized.image_sizes, BOXES.values(), strict=True)
    ]
    shape = response["C4"].shape
    maps = next(value for pair in kept for value in pair if value.shape[1] == shape[1])
    pooled = roi_align(maps, [roi.float() for roi in rois], 7, spatial_scale=1 / 16, aligned=True)
    close(response["C4"], pooled, 1e-4)


def test_a_region_is_about_what_its_crop_gives(client, photos):
    """The input itself is a map too: its region is the same pixels that PIL cuts out."""
    image = PIL.Image.open(io.BytesIO(photos["chelsea"])).resize((256, 256))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    document = {"images": [base64.b64encode(buffer.getvalue()).decode()], "boxes": [[[40, 60, 104, 124]]]}
    response = tensors(ask(client, "squeezenet1_1", "x", document, "&roi_size=64"))
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    close(response["x"][0], ((pixels - mean) / std)[:, 60:124, 40:104])


def test_all_formats(client, photos):
    asked = ("resnet18", "C5", body(photos))
    expected = tensors(ask(client, *asked))
    read = safetensors.torch.load(ask(client, *asked, headers={"accept": "application/x-safetensors"}).content)
    archive = np.load(io.BytesIO(ask(client, *asked, headers={"accept": "application/x-npz"}).content))
    for key in ("C5", "box_image"):
        close(read[key].double(), expected[key].double())
        close(torch.from_numpy(archive[key]).double(), expected[key].double())
    assert read["box_image"].dtype == torch.int64
    array = np.load(io.BytesIO(ask(client, *asked, headers={"accept": "application/x-npy"}).content))
    close(torch.from_numpy(array), expected["C5"])
    document = ask(client, *asked).json()
    assert [(one["name"], one["node"], one["datatype"]) for one in document["outputs"]] == [
        ("C5", "layer4.1.relu_1", "FP32"),
        ("box_image", None, "INT64"),
    ]
    assert document["images"] == 3
    assert ask(client, *asked, headers={"accept": "image/png"}).status_code == 406


@pytest.mark.exhaustive
def test_batches_of_several_requests(client, photos):
    """Each gets its own regions, whoever shares its batch."""
    documents = [body(photos, {name: BOXES["rocket"] * count}) for name in BOXES for count in (1, 2, 3)]
    alone = [tensors(ask(client, "resnet18", "C5", document))["C5"] for document in documents]

    async def at_once():
        url = "/v1/models/resnet18/features?weights=random&nodes=C5&pool=roi"
        return await asyncio.gather(*(client.http.post(url, json=document) for document in documents))

    for response, expected in zip(client.run(at_once()), alone, strict=True):
        close(tensors(response)["C5"], expected, 1e-4)


@pytest.mark.parametrize(
    ("boxes", "index", "box", "said"),
    [
        ([[], [[10, 10, 20, 20], [30, 10, 20, 20]]], 1, 1, "empty or inverted"),
        ([[], [[10, 10, 10, 20]]], 1, 0, "empty or inverted"),
        ([[[10, 10, 20]], []], 0, 0, "3 values"),
        ([[[10, 10, 20, "30"]], []], 0, 0, "four finite numbers"),
        ([[[10, 10, 20, None]], []], 0, 0, "four finite numbers"),
        ([[[10, 10, 20, True]], []], 0, 0, "four finite numbers"),
        ([[[10, 10, 500, 200]], []], 0, 0, "451 x 300"),
        ([[], [[0, 0, 30, 427]]], 1, 0, "the model sees"),
        ([[[10, 10, 20, 20]], 7], 1, None, "list of [x1, y1, x2, y2]"),
        ([[]], None, None, "one list per image, 2 in all, not 1"),
    ],
)
def test_boxes_that_are_none(client, photos, boxes, index, box, said):
    document = body(photos, {"chelsea": [], "rocket": []}) | {"boxes": boxes}
    response = ask(client, "resnet18", "C4", document)
    problem = response.json()
    assert (response.status_code, problem["type"]) == (422, "/problems/bad-box")
    assert said in problem["detail"]
    assert (problem.get("index"), problem.get("box")) == (index, box)


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_numbers_that_are_not_finite_are_named(client, photos, number):
    text = json.dumps(body(photos, {"chelsea": [[0, 0, 9, 9], [0, 0, 77.125, 5]]})).replace("77.125", number)
    url = "/v1/models/resnet18/features?weights=random&nodes=C4&pool=roi"
    response = client.post(url, content=text, headers={"content-type": "application/json"})
    problem = response.json()
    assert (response.status_code, problem["type"]) == (422, "/problems/bad-box")
    assert (problem["index"], problem["box"]) == (0, 1)
    assert "box 1 is not four finite numbers" in problem["detail"]


@pytest.mark.parametrize("end", [', "more": NaN', "9" * 400, "]" + "[" * 90_000])
def test_other_faults_of_bodies_with_numbers_that_are_not_finite(client, photos, end):
    text = json.dumps(body(photos, {"chelsea": [[0, 0, 77.125, 5]]})).replace("77.125", "NaN")
    url = "/v1/models/resnet18/features?weights=random&nodes=C4&pool=roi"
    response = client.post(url, content=text[:-1] + end + "}", headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["type"]) == (422, "/problems/invalid-request")


@pytest.mark.parametrize("node", ["avgpool", "flatten", "fc"])
def test_outputs_that_are_no_maps(client, photos, node):
    response = ask(client, "resnet18", node, body(photos))
    assert (response.status_code, response.json()["type"]) == (422, "/problems/bad-tensor")
    assert "needs a feature map" in response.json()["detail"]


def test_boxes_and_pool_go_together_before_anything_is_built(client, photos):
    asked = "weights=random&nodes=layer2.0.conv1:unbuilt"
    jpeg = {"content": photos["chelsea"], "headers": {"content-type": "image/jpeg"}}
    image = base64.b64encode(photos["chelsea"]).decode()
    document = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [image]}]}
    document |= {"parameters": {"weights": "random", "pool": "roi"}, "outputs": [{"name": "layer2.0.conv1"}]}
    for pool, sent in (("roi", {"json": {"images": [image]}}), ("roi", jpeg), ("avg", {"json": body(photos)})):
        refused = client.post(f"/v1/models/resnet18/features?{asked}&pool={pool}", **sent).json()
        assert (refused["status"], refused["type"]) == (422, "/problems/bad-box")
        assert "pool=roi and boxes must be given together" in refused["detail"]
    response = client.post("/v2/models/resnet18/infer", json=document)
    assert response.status_code == 400
    assert "pool=roi and boxes must be given together" in response.json()["error"]
    assert not any("layer2.0.conv1" in str(one["outputs"]) for one in client.get("/v1/extractors").json()["extractors"])


@pytest.mark.exhaustive
def test_the_response_limit_counts_boxes(make_client, photos):
    limit = 4 * 512 * 49 * 10
    client = make_client(max_response_bytes=limit)
    enough = body(photos, {"rocket": BOXES["rocket"] * 10})
    assert ask(client, "resnet18", "C5", enough).status_code == 200
    response = ask(client, "resnet18", "C5", body(photos, {"rocket": BOXES["rocket"] * 11}))
    assert (response.status_code, response.json()["type"]) == (413, "/problems/response-too-large")
    assert response.json()["bytes"] == limit // 10 * 11
    assert "roi_size=1" in response.json()["ways"]


def test_boxes_that_would_hold_up_the_device(client, photos):
    """Small answers of large boxes on a fine map: each takes all of its positions."""
    document = body(photos, {"chelsea": [[0, 0, 451, 300]] * 4000})
    response = ask(client, "resnet18", "C1", document, "&roi_size=1")
    assert (response.status_code, response.json()["type"]) == (422, "/problems/bad-box")
    assert "coarser level" in response.json()["detail"]


@pytest.mark.exhaustive
def test_patches_of_14_pixels(tmp_path, make_client, photos):
    """Registers and a class token before the grid, and a stride that is no power of two."""
    (tmp_path / "models.toml").write_text(
        '[models.dino]\nbuilder = "timm:create_model"\n'
        'arguments = { model_name = "vit_small_patch14_reg4_dinov2", img_size = 112, depth = 1 }\n'
        "preprocessing = { resize_size = 128, crop_size = 112 }\n"
    )
    client = make_client(models_dir=tmp_path)
    url = "/v1/models/dino/features?nodes=patch_embed.proj:map,norm&pool={}"
    response = tensors(client.post(url.format("roi"), json=body(photos)))
    whole = {"images": body(photos)["images"]}
    maps = tensors(client.post(url.format("none"), json=whole))
    rois = [by_hand(name, 128, 112) for name in BOXES]
    grid = maps["norm"][:, 5:].transpose(1, 2).reshape(3, -1, 8, 8)
    assert timm.create_model("vit_small_patch14_reg4_dinov2", img_size=112, depth=1).num_prefix_tokens == 5
    assert math.isqrt(maps["norm"].shape[1] - 5) == 8
    for key, value in (("map", maps["map"]), ("norm", grid)):
        close(response[key], roi_align(value, rois, 7, spatial_scale=1 / 14, aligned=True))
