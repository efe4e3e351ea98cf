"""What is chosen on the page: models from the list, photos of one's own, and where the keyboard is afterwards."""

import io

import numpy as np
import PIL.Image
import pytest
import torch
import torchvision

from fxcore import photos
from tests.e2e.page.seen import (
    AGAIN,
    GRAPH,
    TILES,
    VIT,
    asked,
    check_tiles,
    eventually,
    listed,
    pixels,
    shown,
    shown_channels,
    until,
)

CROPPED = photos.files()[3].read_bytes()[:400]  # a JPEG that ends after its header


@pytest.mark.exhaustive
def test_every_word_of_a_search_is_looked_for_in_all_sources(open_server, visit):
    page = visit(open_server.url).go()
    page.wait_for_selector(".results a")
    page.locator(".count", has_text="and 1 of timm").wait_for()
    page.get_by_label("Search models").fill("patch16 vit")
    page.get_by_role("link", name="timm.vit_tiny_patch16_224").wait_for()
    assert listed(page) == ["timm.vit_tiny_patch16_224"]
    page.get_by_label("Search models").fill("18 res")
    until(page, "document.querySelectorAll('.results a').length === 1")
    assert listed(page) == ["resnet18"]


@pytest.mark.exhaustive
def test_the_list_stays_where_timm_cannot_be_counted_and_a_search_asks_for_its_count_again(open_server, visit):
    tab = visit(open_server.url)
    held = []
    tab.page.route("**/v1/models", lambda route: held.append(route))
    page = tab.go()
    page.get_by_role("link", name="resnet18").first.wait_for()
    page.get_by_label("Search models").fill("patch16 vit")
    page.locator(".count", has_text="counting timm's models…").wait_for()
    for route in held:
        route.abort()
    page.locator(".count", has_text="0 models").and_(page.locator(":not(:has-text('counting'))")).wait_for()
    page.unroute("**/v1/models")
    assert page.locator(".failure").count() == 0
    page.get_by_label("Search models").fill("patch16")
    page.get_by_role("link", name="timm.vit_tiny_patch16_224").wait_for()
    page.get_by_label("Source").select_option("timm")
    page.get_by_role("link", name="timm.vit_tiny_patch16_224").click()
    page.get_by_role("link", name="All models").click()
    page.get_by_role("heading", name="Look inside a vision model").wait_for()
    assert page.get_by_label("Source").input_value() == "timm"


@pytest.mark.exhaustive
def test_the_keyboard_goes_on_at_what_is_shown_next(open_server, visit):
    page = visit(open_server.url).go()

    def focused():
        return page.evaluate("document.activeElement.textContent")

    page.get_by_role("link", name="squeezenet1_1").focus()
    page.keyboard.press("Enter")
    until(page, "document.activeElement.textContent === 'squeezenet1_1'")
    page.wait_for_selector(TILES)
    page.get_by_role("link", name="All models").focus()
    page.keyboard.press("Enter")
    until(page, "document.activeElement.tagName === 'H1'")
    assert focused() == "Look inside a vision model"
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keys").wait_for()
    assert page.get_by_role("dialog").locator("dt").count() > 10
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Search models"
    page.keyboard.type("?/")
    assert page.get_by_label("Search models").input_value() == "?/"


@pytest.mark.exhaustive
def test_photos_of_ones_own_stay_after_a_reload_until_they_are_removed(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3")
    shown_channels(page)
    page.set_input_files(
        "input[type=file]",
        [
            {"name": name, "mimeType": "image/jpeg", "buffer": photos.files()[number].read_bytes()}
            for number, name in ((3, "one.jpg"), (2, "two.jpg"))
        ],
    )
    shown(page, "features.3", "one.jpg")
    page.reload()
    shown(page, "features.3", "one.jpg")
    assert page.get_by_role("button", name="one.jpg", exact=True).get_attribute("aria-pressed") == "true"
    assert page.get_by_text("cannot carry").count() == 0
    page.get_by_role("button", name="two.jpg", exact=True).click()
    shown(page, "features.3", "two.jpg")
    page.get_by_role("button", name="Remove two.jpg").click()
    shown(page, "features.3", "chelsea.jpg")
    page.reload()
    page.get_by_role("button", name="one.jpg", exact=True).wait_for()
    assert page.get_by_role("button", name="two.jpg", exact=True).count() == 0


@pytest.mark.exhaustive
def test_files_that_are_no_photos_are_refused_by_name(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3")
    shown_channels(page)
    before = page.locator(".photos .photo").count()
    for name, kind, data, why in (
        ("a.heic", "image/heic", b"ftypheic", "is HEIC, which cannot be read here"),
        ("b.svg", "image/svg+xml", b"<svg", "is a drawing in SVG"),
        ("c.jpg", "image/jpeg", CROPPED, "is damaged"),
        ("d.txt", "text/plain", b"hello", "is not an image"),
    ):
        page.set_input_files("input[type=file]", {"name": name, "mimeType": kind, "buffer": data})
        until(page, f"document.getElementById('notice').textContent.startsWith('{name} ')")
        assert why in page.locator("#notice").inner_text()
    assert page.locator(".photos .photo").count() == before
    assert "p=" not in page.evaluate("location.hash")


@pytest.mark.exhaustive
def test_a_photo_is_one_whatever_its_file_is_called(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3")
    shown_channels(page)
    photo = photos.files()[2].read_bytes()
    for name, kind in (("photo", ""), ("photo.bin", "application/octet-stream")):
        page.set_input_files("input[type=file]", {"name": name, "mimeType": kind, "buffer": photo})
        shown(page, "features.3", name)
        check_tiles(page, asked(open_server, "squeezenet1_1", "features.3", "DEFAULT", photo)[0])
        assert "Content-Type: image/*" in page.inner_text(".request code")


@pytest.mark.exhaustive
def test_another_photo_can_be_chosen_where_the_server_cannot_read_one(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3")
    shown_channels(page)
    # Browsers do not show TIFF, so whether this is one is for the server to say.
    page.set_input_files("input[type=file]", {"name": "e.tiff", "mimeType": "image/tiff", "buffer": b"II*"})
    page.get_by_role("alert").wait_for()
    page.get_by_role("button", name="Choose another photo").wait_for()
    page.get_by_role("button", name="Remove this one").click()
    shown(page, "features.3", "chelsea.jpg")
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.zeros((90, 120, 3), dtype=np.uint8)).save(buffer, "TIFF")
    page.set_input_files("input[type=file]", {"name": "f.tiff", "mimeType": "image/tiff", "buffer": buffer.getvalue()})
    shown(page, "features.3", "f.tiff")
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.zeros((90, 120, 3), dtype=np.uint8)).save(buffer, "JPEG2000")
    page.set_input_files("input[type=file]", {"name": "g.jp2", "mimeType": "", "buffer": buffer.getvalue()})
    shown(page, "features.3", "g.jp2")
    buffer = io.BytesIO()
    PIL.Image.new("1", (8000, 6400)).save(buffer, "PNG")  # of more pixels than the server takes
    page.set_input_files("input[type=file]", {"name": "h.png", "mimeType": "image/png", "buffer": buffer.getvalue()})
    page.get_by_role("alert").filter(has_text="51200000 pixels").wait_for()
    page.get_by_role("button", name="Remove this one").click()
    shown(page, "features.3", "chelsea.jpg")


@pytest.mark.exhaustive
def test_the_tree_stays_as_the_graph_is_where_a_layout_does_not_come(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=layer3")
    page.locator(".stage").wait_for()
    page.locator(f'{GRAPH}[aria-busy="false"]').wait_for()
    before = page.locator(".tree .name").all_inner_texts()
    page.clock.install()
    page.context.set_offline(True)
    page.get_by_role("button", name="Expand all").click()
    page.locator(".graph .note", has_text="does not answer").wait_for()
    assert page.locator(".tree .name").all_inner_texts() == before
    page.context.set_offline(False)  # the server is back
    page.clock.run_for(AGAIN)
    page.locator('.tree [title="layer1.0.conv1"]').wait_for()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "options"), [("png", {}), ("webp", {"lossless": True, "exact": True})])
def test_the_photo_under_a_map_has_the_colours_under_its_transparency(open_server, visit, kind, options):
    sides = np.zeros((240, 240, 4), dtype=np.uint8)
    sides[:120, :120], sides[:120, 120:] = (255, 0, 0, 0), (0, 0, 255, 255)
    sides[120:, :120], sides[120:, 120:] = (0, 200, 0, 128), (90, 60, 30, 1)
    buffer = io.BytesIO()
    PIL.Image.fromarray(sides).save(buffer, kind, **options)
    photo = buffer.getvalue()
    data = torch.frombuffer(bytearray(photo), dtype=torch.uint8)
    seen = torchvision.io.decode_image(data, mode="RGB", apply_exif_orientation=True).numpy().transpose(1, 2, 0)
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3")
    page.set_input_files("input[type=file]", {"name": f"clear.{kind}", "mimeType": f"image/{kind}", "buffer": photo})
    shown(page, "features.3", f"clear.{kind}")
    page.get_by_label("Opacity of the map").fill("0")

    def check():
        found = pixels(page.locator(".stage"))
        at = [(found.shape[0] * down // 4, found.shape[1] * across // 4) for down in (1, 3) for across in (1, 3)]
        wanted = [seen[down, across] for down in (60, 180) for across in (60, 180)]
        assert np.abs([found[place][:3] - colour for place, colour in zip(at, wanted, strict=True)]).max() <= 2
        assert all(found[place][3] == 255 for place in at)

    eventually(page, check)


@pytest.mark.exhaustive
def test_the_chosen_photo_is_marked_under_the_pointer_too(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3")
    shown_channels(page)
    page.locator(".photos .photo").nth(2).click()
    until(page, "document.querySelector('.photo:hover')?.ariaPressed === 'true'")
    colours = "[...document.querySelectorAll('.photo:hover, .brand + .where + nav a')].map((e) => getComputedStyle(e))"
    link, photo = page.evaluate(f"{colours}.map((style, i) => (i ? style.borderTopColor : style.color))")
    assert photo == link


@pytest.mark.exhaustive
def test_the_models_of_a_server_that_was_started_anew_are_listed(start, visit):
    first, second = "efficientnet_lite0,timm.vit_small_patch14_dinov2", "resnet18,timm.vit_tiny_patch16_224"
    server = start(models=first)
    page = visit(server.url).go()
    page.locator(".starts", has_text="dinov2").wait_for()
    page.get_by_text("1 of timm").wait_for()
    server.process.terminate()
    server.process.wait(60)
    server._environment["FXSERVE_MODELS"] = second
    server.begin()
    server.wait()
    page.locator(".results a", has_text="efficientnet_lite0").press("Enter")
    page.locator("#notice", has_text="'efficientnet_lite0'").wait_for()
    until(page, "document.activeElement.tagName === 'H1'")
    page.locator(".results a", has_text="resnet18").wait_for()
    page.get_by_text("1 of timm").wait_for()
    assert listed(page) == ["resnet18"]
    assert page.locator(".starts a").count() == 0


@pytest.mark.exhaustive
def test_only_the_photos_that_are_shown_are_decoded(open_server, visit):
    tab = visit(open_server.url)
    count = """const decode = createImageBitmap; globalThis.decoded = 0
    globalThis.createImageBitmap = (...all) => { decoded++; return decode(...all) }"""
    tab.page.add_init_script(count)
    page = tab.go("m=squeezenet1_1&n=features.3")
    shown_channels(page)
    files = [
        {"name": "one.jpg", "mimeType": "image/jpeg", "buffer": photos.files()[number % 4].read_bytes()}
        for number in range(7)
    ]
    page.set_input_files("input[type=file]", files)
    shown(page, "features.3", "one.jpg")
    for number in range(2, 8):  # which have a name in common
        page.get_by_role("button", name=f"one.jpg ({number})", exact=True).click()
        shown(page, "features.3", f"one.jpg ({number})")
    kept = """async () => (await import("/page/photo.js")).ownPhotos()
        .map(([, { bitmap, small }]) => [bitmap !== null, small !== null])"""
    assert page.evaluate(kept) == [[number > 2, True] for number in range(7)]
    page.reload()
    shown(page, "features.3", "one.jpg (7)")
    assert page.evaluate("decoded") == 1
    assert page.evaluate(kept) == [[number == 6, True] for number in range(7)]
    thumbnail = pixels(page.get_by_role("button", name="one.jpg (7)", exact=True).locator("canvas"))
    with PIL.Image.open(photos.files()[2]) as photo:
        side = min(photo.size)
        left, top = (photo.width - side) // 2, (photo.height - side) // 2
        wanted = np.asarray(photo.convert("RGB").crop((left, top, left + side, top + side)).resize((88, 88)))
    assert np.abs(thumbnail[..., :3] - wanted).mean() < 6


@pytest.mark.exhaustive
def test_the_keyboard_stays_at_the_photos_of_the_first_page(open_server, visit):
    page = visit(open_server.url).go()
    for name in ("astronaut", "coffee"):
        page.get_by_role("button", name=f"Photo {name}").focus()
        page.keyboard.press("Enter")
        page.locator(f'.showcase .stage[aria-label="PCA of C4 over {name}.jpg"]').wait_for()
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == f"Photo {name}"
        assert page.get_by_role("button", name=f"Photo {name}").get_attribute("aria-pressed") == "true"


@pytest.mark.exhaustive
def test_a_search_says_how_many_nodes_it_does_not_list(open_server, visit):
    nodes = open_server.http.get(f"/v1/models/{VIT}/graph?format=json&weights=random").json()["nodes"]
    many = sum("blocks" in node["name"] for node in nodes)
    assert many > 200
    page = visit(open_server.url).go(f"m={VIT}&w=random&i=none")
    page.get_by_label("Search nodes").fill("blocks")
    page.locator(".tree li").first.wait_for()
    page.locator("#tree").evaluate("tree => { tree.scrollTop = tree.scrollHeight }")
    page.locator("#tree").get_by_text(f"200 of {many} nodes").wait_for()
    page.get_by_label("Search nodes").fill("patch_embed")
    until(page, "!document.getElementById('tree').textContent.includes(' of ')")
