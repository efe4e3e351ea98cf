"""pool=points against torch's grid_sample, and pool=mask against averages by the mask resized by area."""

import io

import numpy as np
import PIL.Image
import pytest
import torch
from torch.nn.functional import grid_sample, interpolate

from tests.hostile_images import saved
from tests.service.http.routes.v1.test_regions import SIZES, place
from tests.wire import b64, close, images, read, refused

POINTS = {
    "chelsea": [[120, 40], [200.5, 100.25], [230, 279]],  # 451 x 300
    "coffee": [],
    "rocket": [[250.5, 120.25]],  # 640 x 427
}


def body(photos, field, given):
    return images([photos[name] for name in given], **{field: [*given.values()]})


def ask(client, model, node, document, pool, query="", **options):
    url = f"/v1/models/{model}/features?weights=random&nodes={node}&pool={pool}{query}"
    return client.post(url, json=document, **options)


def sampled(map, points, size, place, stride):
    """``grid_sample`` of a whole map ``[C, h, w]`` at points of an image that has ``place`` in the model's input."""
    (height, width), (x1, y1, x2, y2) = size, place
    at = torch.tensor(points).reshape(-1, 2) * torch.tensor([(x2 - x1) / width, (y2 - y1) / height])
    grid = 2 * (at + torch.tensor([x1, y1])) / (torch.tensor([map.shape[2], map.shape[1]]) * stride) - 1
    return grid_sample(map[None], grid[None, None].float(), align_corners=False)[0, :, 0].T


def averaged(map, mask, size, place, stride):
    """The average of a map by a mask of an image that has ``place`` in the input, and resized to the map by area."""
    (height, width), (x1, y1, x2, y2) = size, place
    # Each pixel of the input as 8 x 8 that find theirs in the image: nearly its area.
    ys = ((np.arange(map.shape[1] * stride * 8) + 0.5) / 8 - y1) * height / (y2 - y1)
    xs = ((np.arange(map.shape[2] * stride * 8) + 0.5) / 8 - x1) * width / (x2 - x1)
    seen = ((ys >= 0) & (ys < height))[:, None] & ((xs >= 0) & (xs < width))
    fine = mask[ys.clip(0, height - 1).astype(int)][:, xs.clip(0, width - 1).astype(int)] & seen
    weights = interpolate(torch.from_numpy(fine).double()[None, None], map.shape[1:], mode="area")[0, 0]
    return (map.double() * weights / weights.sum()).sum((1, 2)).float()


def test_points_are_grid_sample_of_the_whole_map(client, photos, reference):
    response = read(ask(client, "resnet18", "C4", body(photos, "points", POINTS), "points"))
    maps = reference("resnet18", "layer3.1.relu_1", [photos[name] for name in POINTS])
    rows = [
        sampled(map, points, SIZES[name], place(*SIZES[name], 256, 224), 16)
        for map, (name, points) in zip(maps, POINTS.items(), strict=True)
    ]
    close(response["C4"], torch.cat(rows))
    assert response["point_image"].tolist() == [0, 0, 0, 2]


def png(mask):
    return b64(saved(PIL.Image.fromarray(mask), "PNG"))


def runs(mask):
    """COCO's run lengths, one pixel after the other down the columns."""
    counts, inside = [0], False
    for pixel in mask.T.ravel().tolist():
        if pixel != inside:
            counts.append(0)
            inside = pixel
        counts[-1] += 1
    return {"size": list(mask.shape), "counts": counts}


def disc(height, width, y, x, radius):
    ys, xs = np.mgrid[:height, :width]
    return (ys - y) ** 2 + (xs - x) ** 2 < radius**2


def masks():
    """For each photo masks of its size: a disc, one that the crop cuts, and all of it."""
    chelsea, rocket = SIZES["chelsea"], SIZES["rocket"]
    return {
        "chelsea": [disc(*chelsea, 150, 200, 70), disc(*chelsea, 60, 90, 50)],
        "coffee": [],
        "rocket": [np.ones(rocket, bool)],
    }


def test_masks_are_averages_by_area(client, photos, reference):
    given = {name: [png(mask) for mask in of_image] for name, of_image in masks().items()}
    response = read(ask(client, "resnet18", "C4", body(photos, "masks", given), "mask"))
    maps = reference("resnet18", "layer3.1.relu_1", [photos[name] for name in given])
    rows = [
        averaged(map, mask, SIZES[name], place(*SIZES[name], 256, 224), 16)
        for map, (name, of_image) in zip(maps, masks().items(), strict=True)
        for mask in of_image
    ]
    close(response["C4"], torch.stack(rows), 2e-3)
    assert response["mask_image"].tolist() == [0, 0, 2]


def test_masks_in_each_form_and_of_several_maps(client, photos):
    """Run lengths and PNG files, also as data URLs, give the same; whole maps are their average."""
    mask = disc(*SIZES["chelsea"], 150, 200, 70)
    given = {"chelsea": [png(mask), "data:image/png;base64," + png(mask), runs(mask), png(mask.astype(np.uint8))]}
    response = read(ask(client, "resnet18", "C4,C5", body(photos, "masks", given), "mask", "&normalize=l2"))
    for key, channels in (("C4", 256), ("C5", 512)):
        assert response[key].shape == (4, channels)
        assert torch.allclose(response[key].norm(dim=1), torch.ones(4), atol=1e-5)
        assert torch.equal(response[key], response[key][:1].expand(4, -1))
    whole = body(photos, "masks", {"chelsea": [png(np.ones(SIZES["chelsea"], bool))]})
    averages = ask(client, "resnet18", "C4", images([photos["chelsea"]]), "avg")
    close(read(ask(client, "resnet18", "C4", whole, "mask"))["C4"], read(averages)["C4"])


def test_exif_orientation_comes_first(client, photos):
    image = PIL.Image.open(io.BytesIO(photos["chelsea"]))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    turned, upright = saved(image, "PNG", exif=exif), saved(image.rotate(-90, expand=True), "PNG")
    for pool, field, one in (
        ("points", "points", [30, 210]),
        ("mask", "masks", png(disc(451, 300, 210, 90, 60))),
        ("roi", "boxes", [20, 110, 260, 330]),
    ):
        same = [
            read(ask(client, "resnet18", "C4", body({"x": data}, field, {"x": [one]}), pool))["C4"]
            for data in (turned, upright)
        ]
        close(*same)


def test_no_region_at_all(client, photos):
    for pool, field, one in (("points", "points", "point"), ("mask", "masks", "mask"), ("roi", "boxes", "box")):
        response = read(ask(client, "resnet18", "C5", body(photos, field, {"coffee": []}), pool))
        assert response["C5"].shape == (0, 512, 7, 7) if pool == "roi" else (0, 512)
        assert response[f"{one}_image"].shape == (0,)


@pytest.mark.parametrize(
    ("pool", "field", "given", "counts"),
    [
        ("points", "points", {"chelsea": []}, []),
        ("points", "points", {"chelsea": [[120, 40]], "coffee": []}, [0]),
        ("roi", "boxes", {"chelsea": []}, []),
        ("mask", "masks", {"chelsea": []}, []),
    ],
)
def test_no_region_of_an_image_projected(client, photos, pool, field, given, counts):
    document = body(photos, field, given)
    response = read(ask(client, "resnet18", "C4", document, pool, "&project=5&image_size=64"))
    assert response["C4"].shape == (len(counts), 5)
    one = {"points": "point", "boxes": "box", "masks": "mask"}[field]
    assert response[f"{one}_image"].tolist() == counts


@pytest.mark.parametrize(
    ("pool", "field", "given", "where", "said"),
    [
        ("points", "points", [[], [[10, 10], [10]]], (1, 1), "1 values"),
        ("points", "points", [[[10, "1"]], []], (0, 0), "is not two finite numbers: write [x, y]"),
        ("points", "points", [[[460, 10]], []], (0, 0), "outside of its image, which is 451 x 300"),
        ("points", "points", [[], [[5, 200]]], (1, 0), "the model sees"),
        ("points", "points", [[], 7], (1, None), "list of [x, y]"),
        ("points", "points", [[]], None, "points must have one list per image, 2 in all, not 1"),
        ("mask", "masks", [[], ["AAAA"]], (1, 0), "not a PNG file"),
        ("mask", "masks", [["?"], []], (0, 0), "neither a data URL nor base64"),
        ("mask", "masks", [["http://here/x.png"], []], (0, 0), "fetches no URLs"),
        ("mask", "masks", [[7], []], (0, 0), "neither base64 nor run lengths"),
        ("mask", "masks", [[{"size": [300], "counts": []}], []], (0, 0), "without the size"),
        ("mask", "masks", [[{"size": [300, 451], "counts": [1.5]}], []], (0, 0), "neither a list of whole numbers"),
        ("mask", "masks", [[{"size": [300, 451], "counts": [7]}], []], (0, 0), "run lengths of 7 pixels"),
        ("mask", "masks", [[], [{"size": [300, 451], "counts": []}]], (1, 0), "its image, after its EXIF orientation"),
        ("mask", "masks", [[{"size": [300, 451], "counts": [135300]}], []], (0, 0), "mask 0 is empty"),
        ("mask", "masks", [[{"size": [300, 451], "counts": [0, 300, 135000]}], []], (0, 0), "the model sees"),
        ("mask", "masks", [[], "x"], (1, None), "its masks must be a list of"),
    ],
)
def test_regions_that_are_none(client, photos, pool, field, given, where, said):
    document = body(photos, field, {"chelsea": [], "rocket": []}) | {field: given}
    one = field.removesuffix("s")
    problem = refused(ask(client, "resnet18", "C4", document, pool), f"bad-{one}", said)
    index, place = where or (None, None)
    assert (problem.get("index"), problem.get(one)) == (index, place)
    assert index is None or f"image {index}: " in problem["detail"]


def test_each_pooling_has_its_field(client, photos):
    points, none = body(photos, "points", {"coffee": [[300, 200]]}), images([photos["coffee"]])
    for document, pool, kind in (
        (points, "avg", "point"),
        (points, "mask", "mask"),
        (points, "roi", "box"),
        (none, "points", "point"),
        (none | {"masks": [[]]}, "cls", "mask"),
    ):
        response = ask(client, "resnet18", "layer2.0.conv1:unbuilt", document, pool)
        refused(response, f"bad-{kind}", "must be given together")
    both = ask(client, "resnet18", "C4", points | {"masks": [[]]}, "points")
    refused(both, "invalid-request", "one of boxes, points and masks")
    refused(ask(client, "resnet18", "C4:point_image", points, "points"), "duplicate-key")
    refused(ask(client, "resnet18", "avgpool", points, "points"), "bad-tensor", "pool=points needs a feature map")


@pytest.mark.exhaustive
def test_the_response_limit_counts_points(make_client, photos):
    client = make_client(max_response_bytes=4 * 512 * 10)
    many = [[300, 200]] * 10
    assert ask(client, "resnet18", "C5", body(photos, "points", {"coffee": many}), "points").status_code == 200
    over = ask(client, "resnet18", "C5", body(photos, "points", {"coffee": many + many[:1]}), "points")
    problem = refused(over, "response-too-large", status=413)
    assert problem["bytes"] == 4 * 512 * 11
    assert "fewer points" in problem["ways"]


def test_masks_with_too_many_pixels_in_all(client, photos):
    one = {"size": [300, 451], "counts": [0, 135300]}
    document = body(photos, "masks", {"chelsea": [one] * 4000})
    refused(ask(client, "resnet18", "C5", document, "mask"), "bad-mask", "541,200,000 pixels")


@pytest.mark.parametrize(
    ("model", "node", "stride", "fit"),
    [
        ("resnet18", "C4", 16, "pad&image_size=96x160"),
        pytest.param("swin_t", "features.3", 8, "stretch&image_size=160x96", marks=pytest.mark.exhaustive),
        pytest.param("timm.test_vit", "norm", 16, "native&image_size=96", marks=pytest.mark.exhaustive),
    ],
)
def test_maps_swin_and_tokens_through_every_fit(client, photos, model, node, stride, fit):
    """As ``grid_sample`` of each image's whole map, and its average by the mask resized by area."""
    sizes = {name: SIZES[name] for name in ("coffee", "rocket")}
    points = {name: [[width * 0.3, height * 0.6], [width * 0.9, 10]] for name, (height, width) in sizes.items()}
    discs = {name: disc(*size, size[0] * 0.6, size[1] * 0.3, 90) for name, size in sizes.items()}
    masks = {name: [png(mask)] for name, mask in discs.items()}
    pointed = read(ask(client, model, node, body(photos, "points", points), "points", f"&fit={fit}"))
    masked = read(ask(client, model, node, body(photos, "masks", masks), "mask", f"&fit={fit}"))
    sampled_there, averaged_there = [], []
    for name, size in sizes.items():
        whole = read(ask(client, model, f"{node},x", images([photos[name]]), "none", f"&fit={fit}"))
        tall, wide = whole["x"].shape[2:]
        maps = whole[node]
        if model == "swin_t":
            maps = maps.permute(0, 3, 1, 2)
        elif model == "timm.test_vit":
            maps = maps[:, 1:].unflatten(1, (tall // stride, wide // stride)).permute(0, 3, 1, 2)
        assert (maps.shape[2] * stride, maps.shape[3] * stride) == (tall, wide)
        box = whole["valid_box"][0].tolist() if "valid_box" in whole else (0, 0, wide, tall)
        sampled_there.append(sampled(maps[0], points[name], size, box, stride))
        averaged_there.append(averaged(maps[0], discs[name], size, box, stride))
    close(pointed[node], torch.cat(sampled_there), 1e-4)
    close(masked[node], torch.stack(averaged_there), 5e-3)
    assert (pointed["point_image"].tolist(), masked["mask_image"].tolist()) == ([0, 0, 1, 1], [0, 1])
