"""The graph in its pane: all of it is in sight after Fit, at every size of the window."""

import itertools

import numpy as np
import pytest

from tests.e2e.page.seen import GRAPH, eventually, pixels, until

LEAST_SCALE = 0.04  # that the + and - buttons reach


def drawn(page):
    """The graph's pixels, ``[H, W, 4]``."""
    page.evaluate("() => new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))")
    return pixels(page.locator(GRAPH))


def fitted(page, layout):
    """The graph's pixels, their number for one of the layout, and its corner, if the whole is fitted into the pane."""
    seen = drawn(page)
    height, width = seen.shape[:2]
    scale = min(width / layout["width"], height / layout["height"], 1.25)
    return seen, scale, (width - layout["width"] * scale) / 2, max(0, (height - layout["height"] * scale) / 2)


def darkness(page, layout):
    """How dark, 0 to 255, the middle of each box is if the whole graph is fitted into the pane."""
    seen, scale, left, top = fitted(page, layout)
    found = (255 - seen[..., :3].mean(axis=-1)) * seen[..., 3] / 255
    boxes = [box for box in layout["boxes"] if box["kind"] != "frame"]
    rows = [int(top + scale * (box["y"] + box["height"] / 2)) for box in boxes]
    columns = [int(left + scale * (box["x"] + box["width"] / 2)) for box in boxes]
    return scale, found[rows, columns]


def layout_of(server, model, **query):
    return server.http.get(
        f"/v1/models/{model}/graph", params={"format": "layout", "weights": "random", **query}
    ).json()


def settled(page):
    page.locator(f'{GRAPH}[aria-busy="false"]').wait_for()


@pytest.mark.exhaustive
def test_fit_shows_the_whole_of_a_long_graph_so_that_it_is_seen(open_server, visit):
    layout = layout_of(open_server, "vit_b_16")
    tab = visit(open_server.url)
    tab.page.set_viewport_size({"width": 1280, "height": 420})
    page = tab.go("m=vit_b_16&w=random&n=x")
    settled(page)
    with page.expect_response("**/graph?format=layout*"):
        page.get_by_role("button", name="Expand all").click()
    settled(page)
    page.get_by_role("button", name="Fit").click()
    scale, found = darkness(page, layout)
    assert scale < LEAST_SCALE
    assert (found > 60).mean() > 0.9
    before = drawn(page)
    page.get_by_role("button", name="Zoom out").click()  # is far out already
    assert (drawn(page) == before).all()
    page.set_viewport_size({"width": 1000, "height": 520})
    until(page, f"document.querySelector('{GRAPH}').width < 500")
    _, found = darkness(page, layout)
    assert (found > 60).mean() > 0.9


@pytest.mark.exhaustive
def test_the_toolbar_and_the_middle_of_the_graph_stay_in_sight_at_every_width(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=layer3&i=none")
    settled(page)
    page.locator(".stage").wait_for()
    page.locator(GRAPH).hover()
    page.mouse.wheel(0, 30)  # a place of one's own
    for narrow, tall in itertools.product((1200, 1100, 1024, 900), (800, 700)):
        before = drawn(page)
        page.set_viewport_size({"width": narrow, "height": tall})
        until(page, f"document.querySelector('{GRAPH}').width === document.querySelector('{GRAPH}').clientWidth")
        pane = page.locator("section.graph").bounding_box()
        for button in page.locator(".toolbar button").all():
            box = button.bounding_box()
            assert pane["x"] <= box["x"], narrow
            assert box["x"] + box["width"] <= pane["x"] + pane["width"], narrow
        after = drawn(page)
        parts = [
            one[one.shape[0] // 2 - 60 : one.shape[0] // 2 + 60, one.shape[1] // 2 - 60 : one.shape[1] // 2 + 60]
            for one in (before, after)
        ]
        assert parts[0].any()
        # Moved by half a pixel at most, which smooths lines.
        assert np.abs(parts[0][..., 3] - parts[1][..., 3]).mean() < 12, narrow


@pytest.mark.exhaustive
def test_a_tapped_box_says_what_it_is_and_leads_to_its_output(open_server, visit):
    tab = visit(open_server.url, has_touch=True)
    tab.page.set_viewport_size({"width": 375, "height": 740})
    page = tab.go("m=resnet18&n=layer3&i=none&t=graph")
    settled(page)
    sheet = page.locator(".sheet")
    sheet.get_by_text("layer3.1.relu_1").wait_for()
    legend, box = page.locator(".legend").bounding_box(), sheet.bounding_box()
    assert legend["height"]
    assert legend["y"] + legend["height"] <= box["y"]
    seen = drawn(page)[..., 3]  # the graph is in the middle, not beside the pane
    assert seen[:, : seen.shape[1] // 8].mean() < 1 < seen[:, 3 * seen.shape[1] // 8 : 5 * seen.shape[1] // 8].mean()
    sheet.get_by_role("button", name="See output").click()
    page.locator(".stage").wait_for()
    assert page.locator(".pane.features").bounding_box()["width"] == 375


@pytest.mark.exhaustive
def test_boxes_have_the_colours_of_their_kinds_and_repeated_blocks_are_stacked(open_server, visit):
    layout = layout_of(open_server, "resnet18", open="")
    page = visit(open_server.url).go("m=resnet18&n=layer3&i=none&o=")
    settled(page)
    page.locator(".stage").wait_for()
    page.get_by_role("button", name="Fit").click()
    legend = dict(
        page.locator(".legend > span").evaluate_all(
            "all => all.map((one) => [one.textContent, getComputedStyle(one.firstChild).backgroundColor])"
        )
    )
    colours = {name: [int(value) for value in text[4:-1].split(", ")] for name, text in legend.items()}
    assert set(colours) == {"normalization", "convolution", "linear", "activation", "pooling"}
    seen, scale, left, top = fitted(page, layout)
    boxes = {box["name"]: box for box in layout["boxes"]}

    def at(name, across, down):
        box = boxes[name]
        return seen[int(top + scale * (box["y"] + down)), int(left + scale * (box["x"] + across))]

    def nearest(pixel):
        return min(colours, key=lambda name: np.abs(pixel[:3] - colours[name]).sum())

    for name, kind in (
        *(("conv1", "convolution"), ("bn1", "normalization"), ("relu", "activation")),
        *(("maxpool", "pooling"), ("fc", "linear")),
    ):
        assert nearest(at(name, 2, boxes[name]["height"] / 2)) == kind
    for down, kind in ((5, "normalization"), (boxes["layer2"]["height"] - 8, "activation")):  # in that order
        assert nearest(at("layer2", 2, down)) == kind
    width = boxes["layer1"]["width"]
    assert at("layer1", width + 4, 20)[3] > 0  # two blocks that are alike
    assert at("layer2", width + 4, 20)[3] == 0  # its first one goes down by two
    counts = page.evaluate(
        """async () => {
          const { loadModel } = await import("/page/model.js")
          const { repeats } = await import("/page/kinds.js")
          const model = await loadModel("vit_b_16", "random", new AbortController().signal)
          return ["encoder.layers", "encoder", "conv_proj"].map((path) => repeats(model.modules.get(path)))
        }"""
    )
    assert counts == [12, 1, 1]


@pytest.mark.exhaustive
def test_the_graphs_of_models_chosen_before_are_not_kept(open_server, visit):
    page = visit(open_server.url).go()
    tools = page.context.new_cdp_session(page)
    for model in ("resnet18", "squeezenet1_1") * 2:
        page.evaluate("(model) => { location.hash = `m=${model}&w=random&i=none` }", model)
        until(page, "document.querySelector('.title-row h2')?.textContent === " + repr(model))
        settled(page)
    prototype = tools.send("Runtime.evaluate", {"expression": "HTMLCanvasElement.prototype"})["result"]["objectId"]
    label = "function () { return this.filter((one) => one.ariaLabel === 'Graph of the model').length }"
    for _ in range(20):
        tools.send("HeapProfiler.collectGarbage")
        there = tools.send("Runtime.queryObjects", {"prototypeObjectId": prototype})["objects"]["objectId"]
        query = {"objectId": there, "functionDeclaration": label, "returnByValue": True}
        kept = tools.send("Runtime.callFunctionOn", query)["result"]["value"]
        tools.send("Runtime.releaseObject", {"objectId": there})
        if kept <= 2:  # the one before, until the last frame of it is forgotten
            break
        page.wait_for_timeout(100)
    assert kept <= 2


@pytest.mark.exhaustive
def test_each_call_of_a_module_is_a_box_of_its_own(open_server, visit):
    model, module = "fasterrcnn_mobilenet_v3_large_320_fpn", "backbone.fpn.inner_blocks"
    layout = layout_of(open_server, model, open="backbone,backbone.fpn")
    calls = [box for box in layout["boxes"] if box["name"] == module]
    assert [box["node"] for box in calls] == [f"{module}.1", f"{module}.0"]  # from coarse to fine
    page = visit(open_server.url).go(f"m={model}&w=random&n={module}&i=none&o=backbone,backbone.fpn")
    settled(page)
    page.get_by_role("button", name="Fit").click()
    _, scale, left, top = fitted(page, layout)

    def middle(box):
        return {"x": left + scale * (box["x"] + box["width"] / 3), "y": top + scale * (box["y"] + box["height"] / 2)}

    for box, path in zip(calls, (f"{module}.1", module), strict=True):  # the path means the last of them
        page.locator(GRAPH).click(position=middle(box))
        until(page, f"location.hash.includes('n={path}&')")
        assert page.locator(".sheet strong").text_content() == box["node"]
        assert page.locator(".tree li.chosen .name").get_attribute("title") == module  # it stays closed
        page.locator(GRAPH).hover(position=middle(box))
        card = page.locator(".card")
        assert card.inner_text().splitlines()[1] == "1 node"
        flops = next(line for line in box["lines"] if "FLOPs" in line).rpartition(", ")[2]
        assert float(card.inner_text().splitlines()[3].split()[0]) == pytest.approx(float(flops.split()[0]), rel=0.01)
    page.locator(GRAPH).focus()
    names = [box["node"] for box in layout["boxes"] if box["kind"] != "frame"]
    for node in reversed(names[1 : names.index(calls[1]["node"])]):  # back past both calls, without a loop
        page.keyboard.press("ArrowLeft")
        assert page.locator(".sheet strong").text_content() == node


@pytest.mark.exhaustive
def test_the_overview_has_the_colours_of_now(open_server, visit):
    page = visit(open_server.url, color_scheme="dark").go("m=resnet18&w=random&n=layer3&i=none")
    overview = page.locator("canvas.minimap:not([hidden])")
    settled(page)
    overview.wait_for()
    drawn(page)
    dark = pixels(overview)
    page.emulate_media(color_scheme="light")
    page.reload()
    settled(page)
    overview.wait_for()
    drawn(page)
    assert (pixels(overview) != dark).any()
    page.emulate_media(color_scheme="dark")

    def check():
        assert (pixels(overview) == dark).all()

    eventually(page, check)
