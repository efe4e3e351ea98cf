"""Pictures in the graph: each box shows the map of its node, by one request for all that are in sight."""

import httpx
import numpy as np
import pytest

from fxcore import photos
from tests.e2e.page.seen import GRAPH, asked, coloured, eventually, pixels, until

PICTURE, PADDING, KNOB = 56, 8, 7


def pictured(page, layout, name):
    """The pixels of the picture in the box ``name``, if the whole graph is fitted into the pane."""
    seen = pixels(page.locator(GRAPH))[..., :3]
    height, width = seen.shape[:2]
    scale = min(width / layout["width"], height / layout["height"], 1.25)
    left, top = (width - layout["width"] * scale) / 2, max(0, (height - layout["height"] * scale) / 2)
    box = next(box for box in layout["boxes"] if box["name"] == name)
    side = box["height"] - PADDING
    x = left + scale * (box["x"] + box["width"] - side - PADDING / 2 - KNOB / 2)
    y = top + scale * (box["y"] + PADDING / 2)
    return lambda across, down: seen[int(y + down * side * scale), int(x + across * side * scale)]


def likenesses(page, server, model, weights="random"):
    """Return a function of a module: the correlation of its picture with the map that the service has of it."""
    layout = server.http.get(
        f"/v1/models/{model}/graph", params={"format": "layout", "weights": weights, "open": ""}
    ).json()
    middles = (np.arange(14) + 0.5) / 14

    def likeness(module):
        node = next(box["node"] for box in layout["boxes"] if box["name"] == module)
        values = np.abs(asked(server, model, node, weights)[0]).mean(axis=0)
        values = values.reshape(14, len(values) // 14, 14, -1).mean(axis=(1, 3))  # on a screen they are as small
        at = pictured(page, layout, module)
        found = np.array([[at(across, down) for across in middles] for down in middles])
        return np.corrcoef(found.ravel(), coloured(values).ravel())[0, 1]

    return likeness


@pytest.mark.exhaustive
def test_each_box_in_sight_shows_its_map_by_one_request(open_server, visit):
    tab = visit(open_server.url)
    page = tab.go("m=resnet18&n=layer3&i=none")
    page.locator(".stage").wait_for()
    page.get_by_role("button", name="Fit").click()
    with page.expect_response("**/features?*dtype=float16*"):
        page.get_by_label("Pictures").select_option("mean")
    pictured_soon(page, open_server, "layer3")
    likeness = likenesses(page, open_server, "resnet18")
    assert likeness("layer1") > 0.7
    assert likeness("layer2") > 0.7
    page.wait_for_timeout(300)
    assert len([url for url in tab.urls if "dtype=float16" in url]) == 1


@pytest.mark.exhaustive
def test_pictures_that_are_out_of_sight_are_no_longer_asked_for(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=layer3&o=layer1,layer2,layer3,layer4")
    held = []
    page.route("**/features?*dtype=float16*", lambda route: held.append(route))
    page.locator(".stage").wait_for()
    page.locator(f'{GRAPH}[aria-busy="false"]').wait_for()

    def check():
        assert len(held) == 1

    eventually(page, check)
    page.locator(GRAPH).hover()
    with page.expect_event("requestfailed"):
        page.mouse.wheel(0, 100_000)
    check()


@pytest.mark.exhaustive
def test_colour_bars_say_what_colours_mean(open_server, visit):
    node = "layer3.0.bn1"
    both = [asked(open_server, "resnet18", node, "random", photos.files()[i].read_bytes())[0] for i in (1, 3)]
    channel = next(c for c in range(48) if min(one[c].min() for one in both) < 0 < max(one[c].max() for one in both))
    low, high = min(one[channel].min() for one in both), max(one[channel].max() for one in both)
    page = visit(open_server.url).go(f"m=resnet18&n={node}&v=channels&ch={channel}&s=number&p2=rocket")
    until(page, "document.querySelectorAll('.stages .scale-bar').length === 2")
    bars = page.locator(".stages .scale-bar").all()
    assert len(bars) == 2
    for bar in bars:  # one scale for what is compared
        least, zero, most = bar.locator("span").all_inner_texts()
        assert (float(least), zero, float(most)) == (pytest.approx(low, rel=1e-3), "0", pytest.approx(high, rel=1e-3))
    page.get_by_label("Scale of the tiles").select_option("same")
    until(page, "location.hash.includes('r=same')")
    page.locator(".body > .scale-bar").wait_for()
    found = pixels(page.locator(f'.tile[data-channel="{channel}"] canvas'))[..., :3]
    assert np.abs(found - coloured(both[0][channel], both[0].min(), both[0].max())).max() <= 2


@pytest.mark.exhaustive
def test_maps_are_as_large_as_one_likes(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=layer3")
    stage = page.locator(".stage")
    stage.wait_for()
    before = stage.bounding_box()["width"]
    line = page.get_by_role("separator").bounding_box()
    page.mouse.move(line["x"] + line["width"] / 2, 400)
    page.mouse.down()
    page.mouse.move(line["x"] - 100, 400)
    page.mouse.up()
    assert page.locator(".pane.features").bounding_box()["width"] == pytest.approx(536, abs=8)
    page.reload()
    stage.wait_for()
    assert page.locator(".pane.features").bounding_box()["width"] == pytest.approx(536, abs=8)
    page.get_by_role("separator").press("ArrowRight")
    assert page.locator(".pane.features").bounding_box()["width"] == pytest.approx(496, abs=8)
    page.get_by_role("button", name="Enlarge").click()
    until(page, f"document.querySelector('.stage').clientWidth > {before * 1.4}")
    page.keyboard.press("Escape")
    until(page, f"document.querySelector('.stage').clientWidth < {before * 1.4}")


@pytest.mark.exhaustive
def test_zero_is_at_its_colour_and_over_no_other_number(open_server, visit):
    page = visit(open_server.url).go()
    boxes = """async ([low, high]) => {
        const { legend } = await import("/page/stage.js")
        const bar = legend({ low, high })
        bar.style.width = "200px"
        document.body.append(bar)
        return [...bar.children].map((part) => part.getBoundingClientRect()).map(({ left, right }) => [left, right])
    }"""
    for low, high in ((-0.2167, 1), (-1, 0.0345), (-5.123, 7.5), (-1.23e-7, 4.56e-3), (-4.56e-3, 1.23e-7)):
        (start, end), least, zero, most = page.evaluate(boxes, [low, high])
        assert least[0] == start
        assert most[1] == pytest.approx(end, abs=1)
        assert least[1] <= zero[0] < zero[1] <= most[0] + 1
        if low == -5.123:
            at = start + 200 * -low / (high - low)
            assert sum(zero) / 2 == pytest.approx(at, abs=2)


def pictured_soon(page, server, module, model="resnet18", weights="random", least=0.95):
    likeness = likenesses(page, server, model, weights)

    def check():
        assert likeness(module) > least

    eventually(page, check)


@pytest.mark.exhaustive
def test_pictures_are_asked_for_again_once_the_server_has_room_or_is_back(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=layer3&i=none")
    page.locator(".stage").wait_for()
    page.get_by_role("button", name="Fit").click()
    asked_for = []

    def refuse(route):
        asked_for.append(route)
        if len(asked_for) == 1:
            route.fulfill(status=503, headers={"Retry-After": "1"}, json={"title": "Busy", "detail": "busy"})
        else:
            route.abort()

    page.route("**/features?*dtype=float16*", refuse)
    page.get_by_label("Pictures").select_option("mean")

    def check(times):
        assert len(asked_for) == times

    eventually(page, lambda: check(2))
    page.wait_for_timeout(600)
    check(2)  # a server that is gone is not asked again and again
    page.unroute("**/features?*dtype=float16*")
    page.get_by_role("button", name="C3", exact=True).click()
    pictured_soon(page, open_server, "layer3")


@pytest.mark.exhaustive
def test_pictures_that_are_too_much_for_one_answer_come_in_several(start, visit):
    server = start(models="resnet18", max_response_bytes=2_000_000)
    tab = visit(server.url)
    page = tab.go("m=resnet18&n=layer3&i=none&o=")
    page.locator(".stage").wait_for()
    page.get_by_role("button", name="Fit").click()
    page.get_by_label("Pictures").select_option("mean")
    for module in ("layer3", "layer2"):
        pictured_soon(page, server, module, least=0.7)
    requests = [url for url in tab.urls if "dtype=float16" in url]
    assert len({url.partition("nodes=")[2].count("%2C") for url in requests}) > 1


@pytest.mark.exhaustive
def test_one_request_for_pictures_is_bounded_at_every_size(open_server, visit):
    nodes = open_server.http.get("/v1/models/resnet18/graph?format=json&weights=random").json()["nodes"]
    usual = {node["name"]: np.prod([size or 1 for size in node["shape"]]) for node in nodes}
    tab = visit(open_server.url)
    page = tab.go("m=resnet18&n=layer3&o=&z=640&i=none")
    page.locator(".stage").wait_for()
    page.get_by_role("button", name="Fit").click()
    with page.expect_response(lambda one: "dtype=float16" in one.url and "conv1" in one.url):
        page.get_by_label("Pictures").select_option("mean")
    requests = [httpx.URL(url).params["nodes"].split(",") for url in tab.urls if "dtype=float16" in url]
    assert len(requests) > 1
    for names in requests:
        assert len(names) == 1 or sum(usual[name] for name in names) * (640 / 224) ** 2 <= 8e6
