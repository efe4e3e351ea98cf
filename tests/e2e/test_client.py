"""The Python client against real servers; the reference is torchvision's own extractor."""

from __future__ import annotations

import asyncio
import io
import threading

import numpy as np
import PIL.Image
import pytest
import timm
import torch
import torchvision
from numpy.testing import assert_allclose
from sklearn.random_projection import SparseRandomProjection

from service.client import AsyncClient, Client, exceptions

NODES = {"layer3": "C4", "layer4": "C5"}
EXACT = {"C4": "layer3.1.relu_1", "C5": "layer4.1.relu_1"}


@pytest.fixture(scope="module")
def client(server):
    with Client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def extractor(client):
    return client.extractor("resnet18", NODES, weights="random")


@pytest.fixture(scope="module")
def three(photos):
    return [photos[name] for name in ("chelsea", "coffee", "rocket")]


@pytest.fixture(scope="module")
def expected(reference, three):
    return {key: reference("resnet18", node, three) for key, node in EXACT.items()}


def agree(features, expected, rows=slice(None)):
    assert list(features) == ["C4", "C5"]
    for key, value in features.items():
        wanted = expected[key][rows]
        assert (torch.as_tensor(value) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def served(server):
    """How many requests for features of an extractor had their answer."""
    route = "/v1/extractors/{extractor}/features"
    return server.metric(f'fxserve_requests_total{{method="POST",route="{route}",status="200"}}')


def test_discovery(client):
    assert [model["name"] for model in client.models(q="resnet18")] == ["quantized_resnet18", "resnet18"]
    assert {model["name"] for model in client.models(source="torchvision")} == set(torchvision.models.list_models())
    assert {model["task"] for model in client.models(task="video")} == {"video"}
    assert {model["name"] for model in client.models(source="timm", q="test_vit")} == {
        f"timm.{name}" for name in timm.list_models("test_vit*")
    }
    assert "aux1.fc1" in client.nodes("googlenet", weights="random")["train_nodes"]
    assert client.model("resnet50")["default_weights"] == "IMAGENET1K_V2"


def test_extractors(client, extractor):
    assert client.extractor("resnet18", NODES, weights="random").id == extractor.id
    assert extractor.id in [one.id for one in client.extractors()]
    assert [(o["key"], o["stride"]) for o in client.find(extractor.id).outputs] == [("C4", 16), ("C5", 32)]
    other = client.extractor("resnet18", ["layer1"], weights="random", name="short-lived")
    assert client.find("short-lived").id == other.id
    other.delete()
    with pytest.raises(exceptions.UnknownExtractor):
        client.find("short-lived")


def test_attributions(client, extractor, three):
    alone = [extractor.attributions(photo, of="fc", at="C5", target=7)["attribution"] for photo in three]
    found = extractor.attributions(three, of="fc", at="C5", target=7)
    assert found["targets"].tolist() == [7, 7, 7]
    assert_allclose(found["attribution"], np.concatenate(alone), rtol=1e-4, atol=1e-6)

    async def asked():
        async with AsyncClient(client.url) as other:
            again = await other.find(extractor.id)
            return await again.attributions(three, of="fc", at="C5", target=7, as_torch=True)

    assert_allclose(asyncio.run(asked())["attribution"], found["attribution"], rtol=1e-4, atol=1e-6)
    with pytest.raises(exceptions.Problem, match="does not depend on"):
        extractor.attributions(three[0], of="layer1", at="C5")


def test_torch_out(extractor, three, expected):
    features = extractor(three, as_torch=True)
    assert all(isinstance(value, torch.Tensor) for value in features.values())
    agree(features, expected)
    half = extractor(three, as_torch=True, dtype="bfloat16", pool="avg")["C5"]
    assert half.dtype == torch.bfloat16
    assert half.shape == (3, 512)
    pooled = extractor(three, pool="avg", normalize="l2")["C5"]
    wanted = torch.nn.functional.normalize(expected["C5"].mean((2, 3)))
    assert (torch.from_numpy(pooled) - wanted).abs().max() < 1e-5


@pytest.mark.exhaustive
def test_images_of_different_sizes(client, three):
    segmenter = client.extractor("lraspp_mobilenet_v3_large", {"backbone.4": "map"}, weights="random")
    three = [three[0], PIL.Image.open(io.BytesIO(three[0])).rotate(90, expand=True), three[2]]
    mixed, alone = segmenter(three), [segmenter(photo)["map"][0] for photo in three]
    assert isinstance(mixed["map"], list)
    assert len({row.shape for row in mixed["map"]}) > 1
    for row, same in zip(mixed["map"], alone, strict=True):
        np.testing.assert_allclose(row, same, atol=1e-4)
    assert segmenter(three[:1] * 2)["map"].shape == (2, *alone[0].shape)
    assert segmenter(three, pool="avg")["map"].shape == (3, 40)


def test_sizes(client, three):
    """A place for each padded image, and whole images of several shapes, one by one where they are not pooled."""
    padded = client.extractor("resnet18", NODES, weights="random", image_size=(96, 160), fit="pad")
    found = padded(three)
    assert found["C5"].shape == (3, 512, 3, 5)
    # 451 x 300, 600 x 400 and 640 x 427 pixels
    assert found["valid_box"].tolist() == [[8, 0, 152, 96]] * 3
    native = client.extractor("squeezenet1_1", {"features.3": "map"}, weights="random", image_size=64, fit="native")
    upright = PIL.Image.open(io.BytesIO(three[0])).rotate(90, expand=True)
    mixed = native([three[0], upright])["map"]
    assert [row.shape for row in mixed] == [(128, 15, 23), (128, 23, 15)]
    assert native([three[0], upright], pool="avg")["map"].shape == (2, 128)


@pytest.mark.exhaustive
def test_many_images_are_many_requests_at_a_time(server, extractor, three, expected):
    before = served(server)
    images = [three[n % 3] for n in range(40)]
    features = extractor(images, pool="avg")
    assert served(server) == before + 3
    for key in EXACT:
        wanted = expected[key].mean((2, 3))[[n % 3 for n in range(40)]].numpy()
        assert np.abs(features[key] - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.exhaustive
def test_batches_are_split_to_the_servers_limits(start, three, expected):
    size = max(map(len, three)) + 1000
    answer = 4 * (256 * 14 * 14 + 512 * 7 * 7)
    small = start(max_body_bytes=2 * size, max_response_bytes=int(2.5 * answer))
    with Client(small.url) as client:
        extractor = client.extractor("resnet18", NODES, weights="random")
        features = extractor(three * 3)
        for key, wanted in expected.items():
            assert np.abs(features[key] - wanted.repeat(3, 1, 1, 1).numpy()).max() <= 1e-5 * wanted.abs().max()
        with pytest.raises(exceptions.BodyTooLarge) as caught:
            extractor([three[0], b"x" * (3 * size)])
        assert caught.value.extra["limit"] == 2 * size


@pytest.mark.exhaustive
def test_it_waits_for_a_busy_server(start, three):
    busy = start(max_inflight=1)
    with Client(busy.url, concurrency=6, retries=500, timeout=300) as client:
        extractor = client.extractor("resnet18", NODES, weights="random")
        extractor.rows = lambda *_: 1  # type: ignore[method-assign]
        assert len(extractor(three * 2, pool="avg")["C5"]) == 6
        refused = 'fxserve_requests_total{method="POST",route="/v1/extractors/{extractor}/features",status="429"}'
        assert busy.metric(refused) > 0
    with Client(busy.url, concurrency=6, retries=0) as client:
        hasty = client.find(extractor.id)
        hasty.rows = lambda *_: 1  # type: ignore[method-assign]
        with pytest.raises(exceptions.AdmissionFull):
            hasty(three * 2)


@pytest.mark.exhaustive
def test_the_timeout_reaches_the_server(server, client, three):
    extractor = client.extractor("wide_resnet50_2", ["C5"], weights="random")
    with Client(server.url, timeout=0.2) as hasty, pytest.raises(exceptions.DeadlineExceeded) as caught:
        hasty.find(extractor.id)(three * 4, pool="avg")
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.status == 504


def test_errors(client, extractor, three):
    def fails(kind, call):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.request_id
        return caught.value

    assert "resnet50" in fails(exceptions.UnknownModel, lambda: client.nodes("resnet5")).extra["suggestions"]
    unknown = fails(exceptions.UnknownNode, lambda: client.extractor("resnet18", ["layer9"], weights="random"))
    assert unknown.extra["name"] == "layer9"
    assert unknown.status == 422
    unavailable = fails(exceptions.WeightsUnavailable, lambda: client.extractor("alexnet", ["features"]))
    assert isinstance(unavailable, exceptions.Busy)
    passes = ["fuse_conv_bm"]
    wrong = fails(exceptions.UnknownTransform, lambda: client.extractor("resnet18", ["C5"], transforms=passes))
    assert wrong.extra["suggestions"][0] == "fuse_conv_bn"
    fails(exceptions.UnknownWeights, lambda: client.extractor("alexnet", ["features"], weights="V9"))
    images = [three[n % 3] for n in range(20)]
    images[18] = b"hello"
    bad = fails(exceptions.BadImage, lambda: extractor(images, pool="avg"))
    assert bad.index == 18
    assert str(bad).startswith("image 18: ")
    fails(exceptions.BadTensor, lambda: extractor({"y": np.zeros((1, 3, 64, 64), np.float32)}))


@pytest.mark.exhaustive
def test_an_extractor_outlives_the_servers_process(start, three, expected):
    server = start()
    with Client(server.url) as client:
        extractor = client.extractor("resnet18", NODES, weights="random")
        found = client.find(extractor.id)
        server.process.kill()
        server.process.wait(60)
        with pytest.raises(exceptions.ConnectionFailed):
            extractor(three)
        server.begin()
        server.wait()
        with pytest.raises(exceptions.UnknownExtractor):
            found(three)
        agree(extractor(three), expected)


def test_connection_refused():
    with Client("http://127.0.0.1:9") as client, pytest.raises(exceptions.ConnectionFailed):
        client.models()


@pytest.mark.exhaustive
def test_threads_share_a_client(extractor, three, expected):
    results = []
    threads = [threading.Thread(target=lambda: results.append(extractor(three))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for features in results:
        agree(features, expected)


def test_async(server, three, expected):
    async def main():
        async with AsyncClient(server.url) as client:
            assert "resnet18" in [model["name"] for model in await client.models()]
            assert await client.models(source="own") == []
            assert (await client.nodes("resnet18"))["levels"]["C5"]["node"] == "layer4.1.relu_1"
            extractor = await client.extractor("resnet18", NODES, weights="random")
            assert (await client.find(extractor.id)).id in [one.id for one in await client.extractors()]
            for features in await asyncio.gather(*(extractor(three) for _ in range(3))):
                agree(features, expected)
            many = await extractor([three[n % 3] for n in range(40)], pool="avg", as_torch=True)
            assert many["C5"].shape == (40, 512)
            with pytest.raises(exceptions.BadImage) as caught:
                await extractor([*three * 6, b"hello"], pool="avg")
            assert caught.value.index == 18
            with pytest.raises(exceptions.UnknownModel):
                await client.model("resnet5")

    asyncio.run(main())


def test_a_cancelled_call_ends_at_once(server, three):
    async def main():
        async with AsyncClient(server.url) as client:
            extractor = await client.extractor("wide_resnet50_2", ["C5"], weights="random")
            before = served(server)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(extractor(three * 8, pool="avg"), 0.3)
            assert served(server) == before  # nothing was waited for

    asyncio.run(main())


def test_projections(client, three):
    extractor = client.extractor("resnet18", ["layer4"], weights="random")
    whole = extractor(three)["layer4"].reshape(3, -1)
    right = SparseRandomProjection(n_components=16, random_state=5).fit_transform(whole)
    assert_allclose(extractor(three, project=16, seed=5)["layer4"], right, rtol=1e-3, atol=1e-3)


def test_points_and_masks(client, server, three):
    """In every form, over several requests, by both clients; a mask of all is the average."""
    extractor = client.extractor("resnet18", {"layer3": "C4"}, weights="random")
    sizes = [PIL.Image.open(io.BytesIO(image)).size for image in three]
    points = [[[width / 2, height / 2]] * count for count, (width, height) in enumerate(sizes)] * 6
    asked = {"pool": "points", "points": points}
    found = extractor(three * 6, **asked)
    assert found["C4"].shape == (18, 256)
    assert found["point_image"].tolist() == [image for image, of_image in enumerate(points) for _ in of_image]
    alone = extractor(three[2], pool="points", points=np.array(points[2]))
    assert_allclose(found["C4"][1:3], alone["C4"], rtol=1e-4, atol=1e-4)

    (width, height), whole = sizes[0], np.ones(sizes[0][::-1], np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(whole).save(file, "PNG")
    runs = {"size": [height, width], "counts": [0, height * width]}
    written = {"size": (height, width), "counts": b"0" + _compressed(height * width)}
    masks = [whole, torch.from_numpy(whole) > 0, PIL.Image.fromarray(whole), file.getvalue(), runs, written]
    average = extractor(three[0], pool="avg")["C4"]
    averages = extractor(three[0], pool="mask", masks=masks)
    assert averages["mask_image"].tolist() == [0] * 6
    assert_allclose(averages["C4"], average.repeat(6, axis=0), rtol=1e-4, atol=1e-4)

    async def main():
        async with AsyncClient(server.url) as asynchronous:
            same = await (await asynchronous.find(extractor.id))(three * 6, **asked)
            assert_allclose(same["C4"], found["C4"], rtol=1e-4, atol=1e-4)

    asyncio.run(main())
    with pytest.raises(exceptions.BadPoint, match=r"^image 16: point 0") as caught:
        extractor(three * 6, pool="points", points=[*points[:16], [[9999, 0]], []])
    assert caught.value.index == 16
    with pytest.raises(ValueError, match="one of boxes, points and masks"):
        extractor(three[0], pool="points", points=[[1, 2]], boxes=[[1, 2, 3, 4]])
    for wrong in ([whole[0]], [7], [{"size": 3}], 5):
        with pytest.raises(ValueError, match=r"masks must be a list of masks .* for each image of a list"):
            extractor(three[0], pool="mask", masks=wrong)


def _compressed(number):
    """As pycocotools writes it: five bits a character, the lowest first."""
    text = b""
    while number > 15:
        text += bytes([(number & 31 | 32) + 48])
        number >>= 5
    return text + bytes([number + 48])


@pytest.mark.exhaustive
def test_regions(client, three):
    """Over several requests, some of which have no box; as each image alone."""
    extractor = client.extractor("resnet18", {"layer3": "C4"}, weights="random")
    images = three
    boxes = [[[120, 40, 320, 260], [200, 100, 231, 131]], [], [[250.5, 120.25, 420, 300]]] * 12
    found = extractor(images * 12, pool="roi", boxes=boxes, roi_size=2)
    assert found["box_image"].tolist() == [image for image, of_image in enumerate(boxes) for _ in of_image]
    assert found["C4"].shape == (36, 256, 2, 2)
    for image in (0, 2):
        alone = extractor(images[image], pool="roi", boxes=np.array(boxes[image]), roi_size=2)
        assert alone["box_image"].tolist() == [0] * len(boxes[image])
        for place in (image, image + 33):
            assert_allclose(found["C4"][found["box_image"] == place], alone["C4"], rtol=1e-4, atol=1e-4)
    opened = extractor(PIL.Image.open(io.BytesIO(images[0])), pool="roi", boxes=boxes[0], roi_size=2)
    assert_allclose(
        opened["C4"], extractor(images[0], pool="roi", boxes=boxes[0], roi_size=2)["C4"], rtol=0.1, atol=0.1
    )
    with pytest.raises(exceptions.BadBox, match=r"^image 31: box 1") as caught:
        extractor(
            [images[0]] * 40, pool="roi", boxes=[[[0, 0, 9, 9], [9, 9, 0, 0]] if i == 31 else [] for i in range(40)]
        )
    assert (caught.value.index, caught.value.extra["box"]) == (31, 1)
    with pytest.raises(ValueError, match="3 images and 2 lists of boxes"):
        extractor(images, pool="roi", boxes=[[], []])
    for wrong in ([[], [1, 2, 3, 4], []], [[], [["a", 2, 3, 4]], []], 7):
        with pytest.raises(ValueError, match=r"a list of boxes \[x1, y1, x2, y2\] for each image"):
            extractor(images, pool="roi", boxes=wrong)
    with pytest.raises(ValueError, match="not arrays"):
        extractor(np.zeros((9, 9, 3), np.uint8), pool="roi", boxes=[])
