"""What the page makes of maps: heat-maps, PCA and similarity, against NumPy and PyTorch."""

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision

from fxcore import photos
from tests.e2e.page.seen import (
    BLOCK,
    CHELSEA,
    GRAPH,
    VIT,
    asked,
    check_tiles,
    cosines,
    eventually,
    looks,
    pixels,
    point,
    principal_colours,
    said,
    shown_channels,
    until,
)


def bare(page, stage, wanted):
    """The stage, without its map, becomes what the model sees of the photo, ``[224, 224, 3]``."""

    def check():
        found = PIL.Image.fromarray(pixels(stage)[..., :3].astype("uint8")).resize((224, 224), PIL.Image.Resampling.BOX)
        assert np.abs(np.asarray(found) - wanted).mean() < 4

    eventually(page, check)


@pytest.mark.exhaustive
def test_the_heat_maps_of_two_photos_and_of_two_nodes_lie_side_by_side(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.12&v=mean&p2=rocket")
    until(page, "document.querySelectorAll('.stage').length === 2")
    both = {
        number: np.abs(
            asked(open_server, "squeezenet1_1", "features.12", "DEFAULT", photos.files()[number].read_bytes())[0]
        ).mean(axis=0)
        for number in (1, 3)
    }
    scale = min(one.min() for one in both.values()), max(one.max() for one in both.values())
    for number, photo in ((1, "chelsea"), (3, "rocket")):
        values = both[number]
        stage = looks(page, f"Heat-map of features.12 over {photo}.jpg", values, scale)
        stage.hover(position=point(stage, 4, 9, values.shape))
        until(page, f"document.querySelectorAll('.readout')[{number // 2}].textContent.startsWith('4, 9: ')")
        read = page.locator(".readout").nth(number // 2).inner_text()
        assert float(read.split(": ")[1]) == pytest.approx(values[4, 9], rel=1e-3)
    page.get_by_label("Opacity of the map").fill("0")
    seen = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms(mean=(0, 0, 0), std=(1, 1, 1))
    for number, photo in ((1, "chelsea"), (3, "rocket")):
        wanted = seen(PIL.Image.open(photos.files()[number])).permute(1, 2, 0).numpy() * 255
        stage = page.locator(f'.stage[aria-label="Heat-map of features.12 over {photo}.jpg"]')
        bare(page, stage, wanted)
    page.goto(f"{open_server.url}/#m=squeezenet1_1&n=features.12&v=mean&n2=features.9")
    for node in ("features.12", "features.9"):
        maps = asked(open_server, "squeezenet1_1", node, "DEFAULT")[0]
        looks(page, f"Heat-map of {node} over chelsea.jpg", np.abs(maps).mean(axis=0))


@pytest.mark.exhaustive
def test_the_opacity_that_is_chosen_while_other_maps_are_made_is_theirs(open_server, visit):
    page = visit(open_server.url).go()
    found = page.evaluate(
        """async () => {
          const { stages } = await import("/page/stages.js")
          const { coloured } = await import("/page/views.js")
          const side = (values) => ({ photo: { name: "none" }, model: {}, node: "n", label: "Map", caption: "Map",
            size: { height: 1, width: 2 }, query: false, render: async () => coloured(await values, 2) })
          const first = await stages([side(Float32Array.of(0, 1))], {}, undefined, () => null)
          let come
          const later = stages([side(new Promise((then) => (come = then)))], {}, undefined, () => null)
          const move = (share) => {
            first.querySelector("input").value = share
            first.querySelector("input").dispatchEvent(new Event("input"))
          }
          const seen = (made) => [made.querySelector("input").value,
            made.querySelector(".stage").getContext("2d").getImageData(639, 100, 1, 1).data[3]]
          move("0")
          come(Float32Array.of(0, 1))
          const made = await later
          const before = seen(made)
          move("1") // the maps before them are still the ones in the page
          return [before, seen(made), seen(first)]
        }"""
    )
    assert found == [["0", 0], ["1", 255], ["1", 255]]


@pytest.mark.exhaustive
def test_the_photo_under_a_map_is_what_the_chosen_weights_see_of_it(open_server, visit):
    chosen = torchvision.models.MobileNet_V2_Weights.IMAGENET1K_V1  # not the default ones, which resize to 232
    torch.manual_seed(0)
    state = torchvision.models.mobilenet_v2(weights=None).state_dict()
    torch.save(state, open_server.log.parent / "hub/checkpoints" / chosen.url.rpartition("/")[2])
    page = visit(open_server.url).go(f"m=mobilenet_v2&w={chosen.name}&n=features.13&v=mean")
    stage = page.locator('.stage[aria-label="Heat-map of features.13 over chelsea.jpg"]')
    stage.wait_for()
    page.get_by_label("Opacity of the map").fill("0")
    seen = chosen.transforms(mean=(0, 0, 0), std=(1, 1, 1))
    wanted = seen(PIL.Image.open(CHELSEA)).permute(1, 2, 0).numpy() * 255
    bare(page, stage, wanted)


@pytest.mark.exhaustive
def test_tokens_are_maps_on_the_grid_that_the_service_says(open_server, visit):
    page = visit(open_server.url).go(f"m={VIT}&n={BLOCK}")
    tokens = asked(open_server, VIT, BLOCK, "random")[0, 1:]  # without the class token
    maps = tokens.T.reshape(-1, 14, 14)
    check_tiles(page, maps)
    page.get_by_role("button", name="PCA").click()
    looks(page, f"PCA of {BLOCK} over chelsea.jpg", principal_colours([maps])[0])
    tokens = tokens[:, :96]
    found = page.evaluate(
        """async ([shape, data, grid]) => {
          const { asMaps } = await import("/page/maps.js")
          const { principalComponents } = await import("/page/pca.js")
          const wide = asMaps({ shape: [1, 8, 2], data: Float32Array.from(Array(16).keys()) }, "tokens",
            { height: 2, width: 3, prefix: 2 })
          const more = { shape: [1, 9, 2], data: new Float32Array(18) }
          const other = asMaps(more, "tokens", { height: 2, width: 3, prefix: 2 })
          const maps = asMaps({ shape, data: Float32Array.from(data) }, "tokens", grid)
          return [principalComponents([maps])[0].map((c) => [...c]), { ...wide, data: [...wide.data] }, other]
        }""",
        [[1, *tokens.shape], tokens.ravel().tolist(), {"height": 14, "width": 14, "prefix": 0}],
    )
    u, s, _ = np.linalg.svd(tokens - tokens.mean(axis=0), full_matrices=False)
    for k, component in enumerate(found[0]):
        assert abs(np.corrcoef(component, u[:, k] * s[k])[0, 1]) > 0.999, k
    wide = np.arange(16).reshape(8, 2)[2:].T  # two registers, then two rows of three
    assert found[1] == {"data": wide.ravel().tolist(), "channels": 2, "height": 2, "width": 3}
    assert found[2] is None


@pytest.mark.exhaustive
def test_the_similarity_to_the_place_under_the_pointer_or_that_keys_choose(open_server, visit):
    page = visit(open_server.url).go(f"m={VIT}&n={BLOCK}&v=similarity&at=2,3")
    maps = asked(open_server, VIT, BLOCK, "random")[0, 1:].T.reshape(-1, 14, 14)
    label = f"Similarity of {BLOCK} over chelsea.jpg"

    def check(row, column):
        until(page, f"document.querySelector('.readout')?.textContent.startsWith('{row}, {column}: ')")
        wanted = cosines(maps, row, column)
        assert said(page) == (f"{row}, {column}", pytest.approx(wanted.min(), abs=1e-3), pytest.approx(1, abs=1e-3))
        # Marks are painted over the edges of the place, not over its middle.
        return looks(page, label, wanted)

    stage = check(2, 3)
    stage.hover(position=point(stage, 5, 1, (14, 14)))
    check(5, 1)
    assert "at=2,3" in page.evaluate("location.hash")
    page.mouse.move(10, 10)
    check(2, 3)
    stage.focus()
    for key, row, column in (("ArrowDown", 3, 3), ("ArrowRight", 3, 4), ("ArrowUp", 2, 4), ("ArrowLeft", 2, 3)):
        page.keyboard.press(key)  # the canvas is another one each time, and keeps the focus
        until(page, f"document.querySelector('.readout')?.textContent.startsWith('{row}, {column}: ')")
        assert f"at={row},{column}" in page.evaluate("location.hash")
        assert said(page)[1] == pytest.approx(cosines(maps, row, column).min(), abs=1e-3)
    stage.click(position=point(stage, 0, 6, (14, 14)))
    until(page, "location.hash.includes('at=0,6')")
    page.locator('.stage[aria-description^="Row 0, column 6:"]').evaluate(
        """canvas => {
          for (const key of ["ArrowDown", "ArrowDown", "ArrowLeft"])  // faster than anything is drawn anew
            canvas.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }))
        }"""
    )
    until(page, "document.querySelector('.readout')?.textContent.startsWith('2, 5: ')")


@pytest.mark.exhaustive
def test_what_is_pointed_at_in_one_map_is_pointed_at_in_the_other(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=layer3&v=similarity&at=3,9&n2=layer2")
    until(page, "document.querySelectorAll('.stage').length === 2")
    maps = [asked(open_server, "resnet18", node, "random")[0] for node in ("layer3", "layer2")]

    def check(*places):
        least = [cosines(one, *place).min() for one, place in zip(maps, places, strict=True)]
        for number, (row, column) in enumerate(places):
            until(page, f"document.querySelectorAll('.readout')[{number}].textContent.startsWith('{row}, {column}: ')")
            assert said(page, number)[1] == pytest.approx(least[number], abs=1e-3)
        ends = [float(bar.locator("span").first.inner_text()) for bar in page.locator(".stages .scale-bar").all()]
        assert ends == [pytest.approx(min(least), abs=1e-3)] * 2  # one scale for what is compared

    check((3, 9), (7, 19))  # of maps of 14 and of 28 places
    second = page.locator(".stage").nth(1)
    second.hover(position=point(second, 14, 0, (28, 28)))
    check((7, 0), (14, 0))  # while (15, 1), in the middle of (7, 0), is less unlike the others
    second.click(position=point(second, 14, 0, (28, 28)))
    until(page, "location.hash.includes('at=7,0')")


@pytest.mark.exhaustive
def test_the_levels_of_a_detector(open_server, visit):
    model = "fasterrcnn_mobilenet_v3_large_320_fpn"
    page = visit(open_server.url).go(f"m={model}&w=random&n=P5")
    check_tiles(page, asked(open_server, model, "P5", "random")[0])
    page.locator(".levels button", has_text="P6").click()
    page.locator('.stage[aria-label*=" of P6 over "]').wait_for()
    check_tiles(page, asked(open_server, model, "P6", "random")[0])
    assert page.locator("summary", has_text="not traced").inner_text() == "3 modules were not traced"


@pytest.mark.exhaustive
def test_a_photo_is_pasted(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3")
    shown_channels(page)
    page.evaluate(
        """async () => {
          const blob = await (await fetch("/page/coffee.jpg")).blob()
          const transfer = new DataTransfer()
          transfer.items.add(new File([blob], "pasted.jpg", { type: "image/jpeg" }))
          dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true }))
        }"""
    )
    page.locator('.stage[aria-label$=" of features.3 over pasted.jpg"]').wait_for()
    check_tiles(page, asked(open_server, "squeezenet1_1", "features.3", "DEFAULT", photos.files()[2].read_bytes())[0])


@pytest.mark.exhaustive
def test_fingers_choose_drag_and_pinch(open_server, visit):
    page = visit(open_server.url, has_touch=True).go("m=resnet18&n=layer2&v=mean")
    page.locator(".stage").wait_for()
    page.locator('section.graph canvas[role="application"][aria-busy="false"]').wait_for()
    page.get_by_label("Pictures").select_option("none")  # they would appear between two looks
    box = page.locator(GRAPH).bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    wire = page.context.new_cdp_session(page)

    def touch(kind, *fingers):
        places = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(fingers)]
        wire.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    def drawn():
        page.evaluate("() => new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))")
        return pixels(page.locator(GRAPH))

    first, (x, y) = drawn(), middle
    touch("touchStart", middle)
    touch("touchMove", (x, y - 60))
    touch("touchEnd")
    dragged = drawn()
    assert (dragged[:-60] == first[60:]).all(axis=-1).mean() > 0.99
    touch("touchStart", (x - 40, y), (x + 40, y))
    touch("touchMove", (x - 100, y), (x + 100, y))
    touch("touchEnd")
    assert (drawn() != dragged).any()
    assert "n=layer2" in page.evaluate("location.hash")  # none of that was a tap
    for down in range(0, int(box["height"]) // 2, 20):
        page.touchscreen.tap(x, y + down)
        if "n=layer2" not in page.evaluate("location.hash"):
            break
    assert "n=layer2" not in page.evaluate("location.hash")


@pytest.mark.exhaustive
def test_a_transformer_without_levels_begins_at_its_last_map(open_server, visit):
    page = visit(open_server.url).go()
    first = page.evaluate(
        """async () => {
          const { loadModel } = await import("/page/model.js")
          return (await loadModel("vit_b_16", "random", new AbortController().signal)).firstNode
        }"""
    )
    assert first == "encoder.ln"  # not its classes, which are no map


@pytest.mark.exhaustive
def test_principal_components_of_two_photos_have_one_basis_and_one_scale(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.12&v=pca&p2=rocket")
    until(page, "document.querySelectorAll('.stage').length === 2")
    maps = [
        asked(open_server, "squeezenet1_1", "features.12", "DEFAULT", photos.files()[i].read_bytes())[0] for i in (1, 3)
    ]
    for photo, wanted in zip(("chelsea", "rocket"), principal_colours(maps), strict=True):
        looks(page, f"PCA of features.12 over {photo}.jpg", wanted)
    page.goto(f"{open_server.url}/#m=squeezenet1_1&n=features.12&v=pca&n2=features.3")
    page.get_by_text("their colours cannot be compared").wait_for()
