"""pool=roi, against torchvision's roi_align on the whole map, and against cropping by hand."""

import asyncio
import io
import json
import math

import numpy as np
import PIL.Image
import pytest
import timm
import torch
import torchvision
from torchvision.ops import roi_align

from tests.decoding import decoded
from tests.fxcore.hooks import hooked
from tests.hostile_images import saved
from tests.seeded import seeded
from tests.wire import NPY, NPZ, SAFETENSORS, close, images, read, refused, sent

BOXES = {
    "chelsea": [[120, 40, 320, 260], [200, 100, 231, 131]],  # 451 x 300
    "coffee": [],
    "rocket": [[250.5, 120.25, 420, 300]],  # 640 x 427
}
SIZES = {"chelsea": (300, 451), "coffee": (400, 600), "rocket": (427, 640)}


def body(photos, boxes=BOXES):
    return images([photos[name] for name in boxes], boxes=[*boxes.values()])


def ask(client, model, node, document, query="", **options):
    url = f"/v1/models/{model}/features?weights=random&nodes={node}&pool=roi{query}"
    return client.post(url, json=document, **options)


def place(height, width, resize, crop):
    """Where an image lies on the model's input: the shorter side becomes ``resize``, and the middle is cut out."""
    short = min(height, width)
    tall, wide = (resize if side == short else int(resize * side / short) for side in (height, width))
    top, left = round((tall - crop) / 2), round((wide - crop) / 2)
    return -left, -top, wide - left, tall - top


def by_hand(name, resize, crop):
    """The boxes of a photograph on the model's input."""
    height, width = SIZES[name]
    x1, y1, x2, y2 = place(height, width, resize, crop)
    scale = torch.tensor([(x2 - x1) / width, (y2 - y1) / height] * 2, dtype=torch.float64)
    return (torch.tensor(BOXES[name]).reshape(-1, 4) * scale + torch.tensor([x1, y1] * 2)).float()


@pytest.mark.parametrize("size", [7, 3])
def test_as_roi_align_on_the_whole_map(client, photos, reference, size):
    response = read(ask(client, "resnet18", "C4", body(photos), "" if size == 7 else f"&roi_size={size}"))
    maps = reference("resnet18", "layer3.1.relu_1", [photos[name] for name in BOXES])
    rois = [by_hand(name, 256, 224) for name in BOXES]
    close(response["C4"], roi_align(maps, rois, size, spatial_scale=1 / 16, aligned=True))
    assert response["box_image"].tolist() == [0, 0, 2]


def test_several_maps_each_at_its_stride_and_vectors(client, photos, reference):
    response = read(ask(client, "resnet18", "C3,layer4:last", body(photos), "&roi_size=1&normalize=l2"))
    rois = [by_hand(name, 256, 224) for name in BOXES]
    for key, node, stride in (("C3", "layer2.1.relu_1", 8), ("last", "layer4.1.relu_1", 32)):
        maps = reference("resnet18", node, [photos[name] for name in BOXES])
        pooled = roi_align(maps, rois, 1, spatial_scale=1 / stride, aligned=True).flatten(1)
        close(response[key], torch.nn.functional.normalize(pooled, dim=1))


@pytest.mark.parametrize(("size", "node", "level", "stride"), [(65, "layer4", "C5", 32), (33, "layer3", "C4", 16)])
def test_small_inputs_keep_the_networks_strides(client, photos, size, node, level, stride):
    """65 pixels make 3 positions at stride 32, which is nearer to 16."""
    query = f"&image_size={size}&fit=stretch&roi_size=2"
    response = read(ask(client, "resnet18", f"{level}:map", body(photos), query))
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
    document = images([saved(PIL.Image.fromarray(pixels), "PNG")], boxes=[boxes])
    query = "&image_size=160&fit=stretch&roi_size=2"
    response = read(ask(client, f"timm.{name}", "stages.4.1:map", document, query))
    model = seeded(timm.create_model, name)
    map = hooked(model, "stages.4.1", torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255)
    assert map.shape == (1, 256, 6, 6)
    assert model.default_cfg["mean"] == (0.0, 0.0, 0.0)
    close(response["map"], roi_align(map, [torch.tensor(boxes)], 2, spatial_scale=6 / 160, aligned=True))


def test_channels_last_maps(client, photos, reference):
    response = read(ask(client, "swin_t", "features.3", body(photos)))
    maps = reference("swin_t", "features.3.1.add_1", [photos[name] for name in BOXES]).permute(0, 3, 1, 2)
    rois = [by_hand(name, 232, 224) for name in BOXES]
    close(response["features.3"], roi_align(maps, rois, 7, spatial_scale=1 / 8, aligned=True))


@pytest.mark.exhaustive
def test_letterboxed_images_of_a_detector(client, photos):
    """Of different sizes, padded to one."""
    response = read(ask(client, "fasterrcnn_mobilenet_v3_large_320_fpn", "C4", body(photos)))
    detector = seeded(torchvision.models.get_model, "fasterrcnn_mobilenet_v3_large_320_fpn", weights_backbone=None)
    kept = []
    detector.backbone.body["13"].register_forward_hook(lambda module, inputs, output: kept.append((inputs[0], output)))
    pixels = [decoded(photos[name]) / 255 for name in BOXES]
    with torch.inference_mode():
        detector(pixels)
    resized, _ = detector.transform(pixels)
    rois = [
        torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)
        * torch.tensor([size[1] / image.shape[2], size[0] / image.shape[1]] * 2)
        for image, size, boxes in zip(pixels, resized.image_sizes, BOXES.values(), strict=True)
    ]
    shape = response["C4"].shape
    maps = next(value for pair in kept for value in pair if value.shape[1] == shape[1])
    pooled = roi_align(maps, [roi.float() for roi in rois], 7, spatial_scale=1 / 16, aligned=True)
    close(response["C4"], pooled, 1e-4)


def test_a_region_is_about_what_its_crop_gives(client, photos):
    """The input itself is a map too: its region is the same pixels that PIL cuts out."""
    image = PIL.Image.open(io.BytesIO(photos["chelsea"])).resize((256, 256))
    document = images([saved(image, "PNG")], boxes=[[[40, 60, 104, 124]]])
    response = read(ask(client, "squeezenet1_1", "x", document, "&roi_size=64"))
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    close(response["x"][0], ((pixels - mean) / std)[:, 60:124, 40:104])


def test_all_formats(client, photos):
    def answered(accept):
        return ask(client, "resnet18", "C5", body(photos), headers={"accept": accept})

    response = answered("application/json")
    expected = read(response)
    for accept in (SAFETENSORS, NPZ):
        found = read(answered(accept))
        assert found["box_image"].dtype == torch.int64
        for key in ("C5", "box_image"):
            close(found[key], expected[key])
    close(read(answered(NPY)), expected["C5"])
    assert [(one["name"], one["node"], one["datatype"]) for one in response.json()["outputs"]] == [
        ("C5", "layer4.1.relu_1", "FP32"),
        ("box_image", None, "INT64"),
    ]
    assert response.json()["images"] == 3
    assert answered("image/png").status_code == 406


@pytest.mark.exhaustive
def test_batches_of_several_requests(client, photos):
    """Each gets its own regions, whoever shares its batch."""
    documents = [body(photos, {name: BOXES["rocket"] * count}) for name in BOXES for count in (1, 2, 3)]
    alone = [read(ask(client, "resnet18", "C5", document))["C5"] for document in documents]

    async def at_once():
        url = "/v1/models/resnet18/features?weights=random&nodes=C5&pool=roi"
        return await asyncio.gather(*(client.http.post(url, json=document) for document in documents))

    for response, expected in zip(client.run(at_once()), alone, strict=True):
        close(read(response)["C5"], expected, 1e-4)


@pytest.mark.parametrize(
    ("boxes", "index", "box", "said"),
    [
        ([[], [[10, 10, 20, 20], [30, 10, 20, 20]]], 1, 1, "empty or inverted"),
        ([[], [[10, 10, 10, 20]]], 1, 0, "empty or inverted"),
        ([[[10, 10, 20]], []], 0, 0, "3 values"),
        ([[[10, 10, 20, "30"]], []], 0, 0, "four finite numbers"),
        ([[[10, 10, 20, True]], []], 0, 0, "four finite numbers"),
        ([[[10, 10, 500, 200]], []], 0, 0, "451 x 300"),
        ([[], [[0, 0, 30, 427]]], 1, 0, "the model sees"),
        ([[[10, 10, 20, 20]], 7], 1, None, "list of [x1, y1, x2, y2]"),
        ([[]], None, None, "one list per image, 2 in all, not 1"),
    ],
)
def test_boxes_that_are_none(client, photos, boxes, index, box, said):
    document = body(photos, {"chelsea": [], "rocket": []}) | {"boxes": boxes}
    problem = refused(ask(client, "resnet18", "C4", document), "bad-box", said)
    assert (problem.get("index"), problem.get("box")) == (index, box)


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_numbers_that_are_not_finite_are_named(client, photos, number):
    text = json.dumps(body(photos, {"chelsea": [[0, 0, 9, 9], [0, 0, 77.125, 5]]})).replace("77.125", number)
    url = "/v1/models/resnet18/features?weights=random&nodes=C4&pool=roi"
    response = client.post(url, content=text, headers={"content-type": "application/json"})
    problem = refused(response, "bad-box", "box 1 is not four finite numbers")
    assert (problem["index"], problem["box"]) == (0, 1)


@pytest.mark.parametrize("end", [', "more": NaN', "9" * 400, "]" + "[" * 90_000])
def test_other_faults_of_bodies_with_numbers_that_are_not_finite(client, photos, end):
    text = json.dumps(body(photos, {"chelsea": [[0, 0, 77.125, 5]]})).replace("77.125", "NaN")
    url = "/v1/models/resnet18/features?weights=random&nodes=C4&pool=roi"
    response = client.post(url, content=text[:-1] + end + "}", headers={"content-type": "application/json"})
    refused(response, "invalid-request")


@pytest.mark.parametrize("node", ["avgpool", "flatten", "fc"])
def test_outputs_that_are_no_maps(client, photos, node):
    refused(ask(client, "resnet18", node, body(photos)), "bad-tensor", "needs a feature map")


def test_boxes_and_pool_go_together_before_anything_is_built(client, photos):
    def listed():
        return [one["id"] for one in client.get("/v1/extractors").json()["extractors"]]

    before = listed()
    said = "pool=roi and boxes must be given together"
    document = images([photos["chelsea"]])
    for pool, options in (
        ("roi", {"json": document}),
        ("roi", sent(photos["chelsea"])),
        ("avg", {"json": body(photos)}),
    ):
        url = f"/v1/models/resnet18/features?weights=random&nodes=layer2.0.conv1:unbuilt&pool={pool}"
        refused(client.post(url, **options), "bad-box", said)
    v2 = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": document["images"]}]}
    v2 |= {"parameters": {"weights": "random", "pool": "roi"}, "outputs": [{"name": "layer2.0.conv1"}]}
    response = client.post("/v2/models/resnet18/infer", json=v2)
    assert (response.status_code, said in response.json()["error"]) == (400, True)
    assert listed() == before


@pytest.mark.exhaustive
def test_the_response_limit_counts_boxes(make_client, photos):
    limit = 4 * 512 * 49 * 10
    client = make_client(max_response_bytes=limit)
    enough = body(photos, {"rocket": BOXES["rocket"] * 10})
    assert ask(client, "resnet18", "C5", enough).status_code == 200
    response = ask(client, "resnet18", "C5", body(photos, {"rocket": BOXES["rocket"] * 11}))
    problem = refused(response, "response-too-large", status=413)
    assert problem["bytes"] == limit // 10 * 11
    assert "roi_size=1" in problem["ways"]


def test_boxes_that_would_hold_up_the_device(client, photos):
    """Small answers of large boxes on a fine map: each takes all of its positions."""
    document = body(photos, {"chelsea": [[0, 0, 451, 300]] * 4000})
    refused(ask(client, "resnet18", "C1", document, "&roi_size=1"), "bad-box", "coarser level")


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
    response = read(client.post(url.format("roi"), json=body(photos)))
    maps = read(client.post(url.format("none"), json=images([photos[name] for name in BOXES])))
    rois = [by_hand(name, 128, 112) for name in BOXES]
    grid = maps["norm"][:, 5:].transpose(1, 2).reshape(3, -1, 8, 8)
    assert timm.create_model("vit_small_patch14_reg4_dinov2", img_size=112, depth=1).num_prefix_tokens == 5
    assert math.isqrt(maps["norm"].shape[1] - 5) == 8
    for key, value in (("map", maps["map"]), ("norm", grid)):
        close(response[key], roi_align(value, rois, 7, spatial_scale=1 / 14, aligned=True))
