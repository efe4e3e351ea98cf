"""The page in a browser: what is shown is what the API answers."""

import base64
import io
import re
import shlex

import numpy as np
import PIL.Image
import pytest
import safetensors.numpy
import torchvision
from torchvision.models.feature_extraction import get_graph_node_names

from fxcore import photos
from service.http.access.keys import make
from tests.e2e.page.conftest import MODELS
from tests.e2e.page.seen import (
    AGAIN,
    CHELSEA,
    GRAPH,
    TILES,
    asked,
    check_tiles,
    coloured,
    listed,
    pixels,
    run_curl,
    run_python,
    shown,
    shown_channels,
    until,
)


@pytest.mark.exhaustive
def test_neither_page_asks_another_host_for_anything(open_server, visit):
    for path, ready in (("/", ".results a"), ("/docs", ".opblock"), ("/#m=squeezenet1_1", TILES)):
        tab = visit(open_server.url)
        tab.page.goto(open_server.url + path)
        tab.page.wait_for_selector(ready)
        tab.page.wait_for_load_state("networkidle")
        assert tab.urls
        assert [url for url in tab.urls if not url.startswith((open_server.url + "/", "data:", "blob:"))] == []
        assert tab.complaints == []


@pytest.mark.exhaustive
def test_several_photos_are_sent_as_parts_from_the_reference(open_server, visit):
    page = visit(open_server.url).go(path="/docs")
    operation = page.locator(".opblock", has_text="/v1/models/{model}/features")
    operation.click()
    body = operation.locator(".opblock-section-request-body")
    body.locator("select.content-type").select_option("multipart/form-data")
    operation.get_by_role("button", name="Try it out").click()
    body.get_by_role("button", name="Add").click()
    for at, file in enumerate(photos.files()[:2]):
        body.locator("input[type=file]").nth(at).set_input_files(file)
    operation.get_by_placeholder("model", exact=True).fill("efficientnet_lite0")
    operation.get_by_placeholder("nodes", exact=True).fill("classifier")
    with page.expect_response("**/features?*") as answer:
        operation.get_by_role("button", name="Execute").click()
    assert answer.value.json()["outputs"][0]["shape"] == [2, 1000]


def test_choose_a_model_open_a_module_and_look(open_server, visit):
    tab = visit(open_server.url)
    page = tab.go()
    page.wait_for_selector(".results a")
    assert page.locator(".results a").count() == len([name for name in MODELS if not name.startswith("timm.")])
    page.get_by_label("Source").select_option("timm")
    page.get_by_role("link", name="timm.vit_tiny_patch16_224").wait_for()
    page.get_by_label("Source").select_option("")
    page.get_by_label("Task").select_option("detection")
    assert listed(page) == ["fasterrcnn_mobilenet_v3_large_320_fpn"]
    page.get_by_label("Task").select_option("")
    page.get_by_label("Search models").fill("resnet1")
    assert listed(page) == ["resnet18"]
    page.get_by_role("link", name="resnet18").click()
    page.get_by_text("Random weights").wait_for()
    check_tiles(page, asked(open_server, "resnet18", "C4", "random")[0])
    assert page.evaluate("location.hash") == "#m=resnet18&n=C4"
    page.get_by_role("button", name="Parts of layer2", exact=True).click()
    page.get_by_role("button", name="Parts of layer2.0", exact=True).click()
    page.locator('.tree [title="layer2.0.relu"]').click()
    assert page.evaluate("location.hash") == "#m=resnet18&n=layer2.0.relu&o=layer2,layer2.0"
    shown(page, "layer2.0.relu")
    maps = asked(open_server, "resnet18", "layer2.0.relu", "random")[0]
    check_tiles(page, maps)
    said = dict(
        zip(
            page.locator("section[aria-label='All values'] dt").all_inner_texts(),
            page.locator("section[aria-label='All values'] dd").all_inner_texts(),
            strict=True,
        )
    )
    assert float(said["Minimum"]) == pytest.approx(maps.min(), rel=1e-3)
    assert float(said["Maximum"]) == pytest.approx(maps.max(), rel=1e-3)
    assert float(said["Mean"]) == pytest.approx(maps.mean(), rel=1e-3)
    assert float(said["Zeros"].split()[0]) == pytest.approx(100 * (maps == 0).mean(), abs=0.06)
    page.go_back()
    until(page, "document.querySelector('.node').textContent.startsWith('layer3')")
    names, _ = get_graph_node_names(torchvision.models.resnet18())
    for wanted, found in (("conv2", [name for name in names if "conv2" in name]), ("adaptive", ["avgpool"])):
        page.get_by_label("Search nodes").fill(wanted)
        assert page.locator(".tree .name").all_inner_texts() == found  # types count where no name has it
    assert tab.complaints == []


@pytest.mark.exhaustive
def test_the_first_model_to_start_with_is_trained_and_here(open_server, visit):
    page = visit(open_server.url).go()
    page.get_by_text("nothing to download").wait_for()
    page.locator(".starts a").first.click()
    page.wait_for_selector(TILES)
    assert page.get_by_label("Weights").input_value() == "IMAGENET1K"
    assert page.evaluate("new URLSearchParams(location.hash.slice(1)).get('m')") == "efficientnet_lite0"


@pytest.mark.exhaustive
def test_photos_are_dropped_and_chosen_and_stay_for_the_next_model(open_server, visit):
    page = visit(open_server.url).go()
    page.wait_for_selector(".results a")
    rocket = photos.files()[3].read_bytes()
    page.evaluate(
        """async (data) => {
          const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0))
          const transfer = new DataTransfer()
          transfer.items.add(new File([bytes], "mine.jpg", { type: "image/jpeg" }))
          dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }))
        }""",
        base64.b64encode(rocket).decode(),
    )
    page.get_by_role("button", name="mine.jpg", exact=True).wait_for()
    page.get_by_role("link", name="squeezenet1_1").click()
    page.locator('.tree [title="features.3"]').click()
    shown(page, "features.3", "mine.jpg")
    assert "Random weights" not in page.inner_text(".features")
    check_tiles(page, asked(open_server, "squeezenet1_1", "features.3", "DEFAULT", rocket)[0])
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 120, 3), dtype=np.uint8)).save(buffer, "PNG")
    page.set_input_files("input[type=file]", [{"name": "n.png", "mimeType": "image/png", "buffer": buffer.getvalue()}])
    shown(page, "features.3", "n.png")
    check_tiles(page, asked(open_server, "squeezenet1_1", "features.3", "DEFAULT", buffer.getvalue())[0])
    page.get_by_label("Compare with", exact=True).select_option(label="mine.jpg")
    shown(page, "features.3", "mine.jpg")
    page.get_by_role("link", name="All models").click()
    page.get_by_role("link", name="resnet18").click()
    shown(page, "C4", "n.png")
    shown(page, "C4", "mine.jpg")


@pytest.mark.exhaustive
def test_a_channel_that_is_far_down_can_be_chosen(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=C3")
    channels = shown_channels(page)
    assert len(channels) == 48
    page.get_by_role("button", name="Show 48 more of 128").click()
    until(page, f"document.querySelectorAll('{TILES}').length === 96")
    last = shown_channels(page)[-1]
    page.locator(TILES).last.click()
    page.locator(f'.stage[aria-label="Channel {last} of C3 over chelsea.jpg"]').wait_for()
    assert page.locator(f'{TILES}[aria-pressed="true"]').get_attribute("data-channel") == str(last)
    stage, tile = page.locator(".stage").bounding_box(), page.locator(TILES).last.bounding_box()
    assert 0 <= stage["y"] < tile["y"] < 800  # what was chosen is seen, and where it was chosen


@pytest.mark.exhaustive
def test_the_copied_requests_give_what_is_shown(open_server, visit, tmp_path):
    file = tmp_path / "IMG 2041 (my cat's).jpg"
    file.write_bytes(CHELSEA.read_bytes())
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.4")
    shown_channels(page)
    page.set_input_files("input[type=file]", file)
    shown(page, "features.4", file.name)
    assert f"@{file.name}" in shlex.split(page.locator(".request code").inner_text())
    maps = asked(open_server, "squeezenet1_1", "features.4", "DEFAULT")
    code = page.locator(".request code").bounding_box()
    assert code["x"] + code["width"] < 1280  # a long URL is wrapped, not cut off
    page.get_by_role("button", name="Copy").click()
    page.get_by_text("Copied").wait_for()
    run_curl(page.evaluate("navigator.clipboard.readText()"), tmp_path)
    found = safetensors.numpy.load_file(tmp_path / "features.4.safetensors")
    np.testing.assert_allclose(found["features.4"], maps, atol=1e-5)
    page.get_by_role("button", name="Python").click()
    page.get_by_role("button", name="Copy").click()
    printed = run_python(page.evaluate("navigator.clipboard.readText()"), tmp_path)
    assert printed == f"features.4 {maps.shape} float32\n"
    for suffix, read in (
        ("safetensors", lambda d: safetensors.numpy.load(d)["features.4"]),
        ("npy", lambda d: np.load(io.BytesIO(d))),
    ):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Download {suffix}").click()
        with open(download.value.path(), "rb") as file:
            np.testing.assert_allclose(read(file.read()), maps, atol=1e-5)
    page.get_by_role("button", name="Make an extractor").click()
    page.get_by_text(re.compile("Extractor .* is ready")).wait_for()
    assert len(open_server.http.get("/v1/extractors").json()["extractors"]) >= 1


@pytest.mark.exhaustive
def test_a_link_shows_a_colleague_the_same(open_server, visit):
    fragment = "m=squeezenet1_1&w=random&n=features.6&o=features&v=channels&ch=17&p=coffee&s=number"
    page = visit(open_server.url).go(fragment)
    shown_channels(page)
    maps = asked(open_server, "squeezenet1_1", "features.6", "random", photos.files()[2].read_bytes())[0]
    chosen = page.locator(f'{TILES}[aria-pressed="true"]')
    assert chosen.get_attribute("data-channel") == "17"
    assert np.abs(pixels(chosen.locator("canvas"))[..., :3] - coloured(maps[17])).max() <= 2
    assert shown_channels(page)[:4] == [0, 1, 2, 3]
    assert page.locator(".stage").get_attribute("aria-label") == "Channel 17 of features.6 over coffee.jpg"
    assert page.evaluate("location.hash") == f"#{fragment}"


@pytest.mark.exhaustive
def test_the_graph_opens_in_place_and_is_walked_by_keys(open_server, visit):
    tab = visit(open_server.url)
    page = tab.go("m=resnet18&n=layer3&v=mean")
    page.locator(".stage").wait_for()
    page.focus(GRAPH)
    page.keyboard.press("Enter")
    until(page, "location.hash.includes('o=layer3')")
    page.locator('.tree [title="layer3.0"]').wait_for()
    page.locator(f'{GRAPH}[aria-busy="false"]').wait_for()
    page.keyboard.press("ArrowDown")
    until(page, "new URLSearchParams(location.hash.slice(1)).get('n') === 'layer4'")
    page.keyboard.press("ArrowUp")
    until(page, "new URLSearchParams(location.hash.slice(1)).get('n').startsWith('layer3.1')")
    page.route("**/graph?profile=true", lambda route: None)  # a measurement that takes its time
    page.get_by_label("Colour by").select_option("time")
    note = page.get_by_text("Measuring each node")
    with page.expect_event("requestfailed"):
        note.get_by_role("button", name="Cancel").click()
    note.wait_for(state="hidden")
    assert "c=" not in page.evaluate("location.hash")
    page.unroute("**/graph?profile=true")
    page.get_by_label("Colour by").select_option("time")
    until(page, "location.hash.includes('c=time')")
    until(page, "/^to [0-9.]+ ms$/.test(document.querySelector('.legend').innerText.trim())")
    assert note.is_hidden()
    page.get_by_label("Colour by").select_option("params")
    largest = sum(weight.numel() for weight in torchvision.models.resnet18().layer4.parameters())
    until(page, f"document.querySelector('.legend').textContent.endsWith('to {largest / 1e6:.2f} M parameters')")
    page.get_by_role("button", name="From layer3.0.relu_1").click()
    page.locator(".node", has_text="layer3.0.relu_1").wait_for()
    page.get_by_role("button", name="To layer3.1.conv1").click()
    page.locator(".node", has_text="layer3.1.conv1").wait_for()
    assert tab.complaints == []


@pytest.mark.exhaustive
def test_a_server_with_keys_asks_for_one(locked_server, visit):
    server, key = locked_server
    tab = visit(server.url)
    page = tab.go("m=squeezenet1_1&n=features.3")
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    for _ in range(3):  # a browser closes a dialog at the second, whatever the page does
        page.keyboard.press("Escape")
        dialog.wait_for()
        page.wait_for_timeout(50)
    assert dialog.is_visible()
    for other in ("fxs_cut…", f"Bearer {key}"):  # no request can have the first in a header
        page.get_by_role("textbox", name="Key").fill(other)
        page.get_by_role("button", name="Use this key").click()
        assert page.evaluate("document.querySelector('#key-form :invalid').validity.patternMismatch")
    page.get_by_role("textbox", name="Key").fill("fxs_wrong")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_text("the API key is unknown").wait_for()
    page.get_by_role("textbox", name="Key").fill(f" {key} ")
    page.get_by_role("button", name="Use this key").click()
    check_tiles(
        page, asked(server, "squeezenet1_1", "features.3", "DEFAULT", headers={"authorization": f"Bearer {key}"})[0]
    )
    assert 'Bearer $FXSERVE_KEY"' in page.inner_text(".request code")
    assert key not in page.content()
    page.get_by_role("button", name="Key", exact=True).click()
    dialog.wait_for()
    page.keyboard.press("Escape")  # the key that there is stays
    dialog.wait_for(state="hidden")
    page.reload()
    shown_channels(page)
    assert page.evaluate("[Object.keys(localStorage).length, document.cookie]") == [0, ""]


@pytest.mark.exhaustive
def test_another_key_can_be_used_where_one_does_not_allow_a_request(start, visit, tmp_path):
    keys = [make(scope, scope) for scope in ("read", "admin")]
    file = tmp_path / "keys"
    file.write_text("".join(key.line + "\n" for key, _ in keys))
    server = start(models="squeezenet1_1", api_keys_file=file)
    page = visit(server.url).go("m=squeezenet1_1&n=features.3&w=random")
    for _, secret in keys:
        page.get_by_role("textbox", name="Key").fill(secret)
        page.get_by_role("button", name="Use this key").click()
        if secret != keys[-1][1]:
            page.locator(".failure", has_text="Forbidden").wait_for()
            assert page.locator(".failure button").all_inner_texts() == ["Use another key"]
            page.locator(".failure button").click()
    shown_channels(page)


@pytest.mark.exhaustive
def test_what_fails_says_why_and_is_tried_again(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=C3")
    page.get_by_role("button", name="Load IMAGENET1K_V1").click()
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "resnet18-f37072fd.pth" in alert.inner_text()
    page.get_by_role("button", name="Use random weights").click()
    shown_channels(page)
    assert "w=random" in page.evaluate("location.hash")
    page.clock.install()
    page.context.set_offline(True)
    page.locator(".levels button", has_text="C5").click()
    page.get_by_text("The server does not answer").wait_for()
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("The server does not answer").wait_for()
    page.context.set_offline(False)
    page.clock.run_for(AGAIN)
    shown(page, "C5")
    page.goto(f"{open_server.url}/#m=r3d_18&n=layer2")
    page.get_by_text("not photos").wait_for()
    page.goto(f"{open_server.url}/#m=nothing")
    page.locator("#notice", has_text="'nothing'").wait_for()
    page.locator(".results a", has_text="resnet18").click()
    shown_channels(page)
    assert page.locator("#notice").is_hidden()


@pytest.mark.exhaustive
def test_everybody_can_use_it(open_server, visit):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(open_server.url).page

    def check(**options):
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        found = axe.Axe().run(page, options={"resultTypes": ["violations"], **options})
        assert found.violations_count == 0, found.generate_report()

    for fragment, ready in (
        ("", ".showcase .predictions"),
        ('m=squeezenet1_1&n=features.3&p2=rocket&e=[{"node":"features.3","channels":[1],"scale":0}]', TILES),
        ("m=timm.vit_tiny_patch16_224&n=blocks.2&v=attention", ".stage"),
        ("m=squeezenet1_1&n=features.3&v=mean&m2=resnet18", ".likeness"),
        ("m=nothing", "#notice"),
        ("m=resnet18&w=IMAGENET1K_V1", ".failure"),
    ):
        page.emulate_media(color_scheme="light")
        page.goto(f"{open_server.url}/#{fragment}")
        page.wait_for_selector(ready, timeout=90_000)
        page.wait_for_selector(".body.waiting", state="detached")  # which dims what it shows
        for width in (375, 1280):
            page.set_viewport_size({"width": width, "height": 740})
            if not fragment and width == 375:  # where to begin comes before the list of all models
                begin, every = page.get_by_text("Look inside a vision model"), page.locator(".results a").first
                assert begin.bounding_box()["y"] < every.bounding_box()["y"]
            check()
        page.emulate_media(color_scheme="dark")
        check(runOnly=["color-contrast"])  # nothing else depends on the scheme, nor this on the width
    page.set_viewport_size({"width": 375, "height": 740})
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keys").wait_for()
    check()
    page.keyboard.press("Escape")
    page.goto(f"{open_server.url}/#m=timm.vit_tiny_patch16_224&n=blocks.2")
    page.get_by_role("button", name="Graph", exact=True).click()
    assert page.get_by_role("application", name="Graph of the model").bounding_box()["width"] == 375
    check()
    page.get_by_role("button", name="Model", exact=True).click()
    page.locator('.tree [title="blocks.3"]').wait_for()
    check()


@pytest.mark.exhaustive
def test_only_what_is_visible_of_a_large_graph_is_drawn(open_server, visit):
    page = visit(open_server.url).go()
    drawn, boxes = page.evaluate(
        """async () => {
          const { draw, palette } = await import("/page/drawing.js")
          const layout = await (await fetch("/v1/models/swin_t/graph?format=layout&weights=random")).json()
          const context = Object.assign(document.createElement("canvas"), { width: 1200, height: 900 }).getContext("2d")
          const drawn = []
          context.roundRect = (x, y) => drawn.push([x, y])
          const options = { colours: palette(), chosen: -1, found: new Set(), heat: null,
            kinds: layout.boxes.map(() => []), repeats: layout.boxes.map(() => 1) }
          draw(context, layout, { x: 10, y: -2000, scale: 0.5 }, options)
          return [drawn, layout.boxes]
        }"""
    )
    places = {(box["x"], box["y"]): box for box in boxes}
    visible = {place for place, box in places.items() if place[1] < 4000 + 1800 and place[1] + box["height"] > 4000}
    assert {tuple(place) for place in drawn} & set(places) == visible
    assert 10 < len(visible) < len(boxes) / 2
