"""The size of the model's input, and how a photo comes to it, chosen on the page."""

import io

import numpy as np
import PIL.Image
import pytest

from tests.e2e.page.seen import CHELSEA, asked, check_tiles, coloured, eventually, pixels, shown, until

STAGE = "document.querySelector('.stage')"
WIDTH, HEIGHT = PIL.Image.open(io.BytesIO(CHELSEA.read_bytes())).size


def aspect(page):
    """Width of the picture under a map, over its height."""
    width, height = page.locator(".stage").first.evaluate("c => [c.width, c.height]")
    return width / height


@pytest.mark.exhaustive
def test_a_photo_is_seen_whole_where_that_is_chosen(open_server, visit):
    """The size and the fit are in the address, in the request, and in what is computed and shown."""
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.4")
    shown(page, "features.4")
    assert aspect(page) == 1
    page.get_by_label("Size").select_option("160")
    page.get_by_label("Fit").select_option("native")
    until(page, "location.hash.includes('z=160') && location.hash.includes('f=native')")
    until(page, f"Math.abs({STAGE}?.width / {STAGE}?.height - {WIDTH / HEIGHT}) < 0.02")
    maps = asked(open_server, "squeezenet1_1", "features.4", "DEFAULT", image_size="160", fit="native")[0]
    assert maps.shape[2] > maps.shape[1]
    check_tiles(page, maps)
    assert "image_size=160&fit=native" in page.locator(".request code").inner_text()
    page.get_by_role("button", name="Python").click()
    assert ', image_size=160, fit="native")' in page.locator(".request code").inner_text()
    page.reload()
    shown(page, "features.4")
    check_tiles(page, maps)
    assert page.get_by_label("Fit").input_value() == "native"
    page.get_by_label("Fit").select_option("pad")
    until(page, f"{STAGE} && {STAGE}.width === {STAGE}.height")
    check_tiles(page, asked(open_server, "squeezenet1_1", "features.4", "DEFAULT", image_size="160", fit="pad")[0])
    # Above the photo is nothing of it, and its middle is seen.
    page.get_by_label("Opacity of the map").fill("0")

    def bare():
        picture = pixels(page.locator(".stage").first)
        edge = round(len(picture) * (1 - HEIGHT / WIDTH) / 2)
        assert (picture[edge - 4, :, 3] == 0).all()
        assert (picture[edge + 4, :, 3] == 255).all()

    eventually(page, bare)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fit", ["native", "stretch"])
def test_tokens_of_other_sizes_are_maps(open_server, visit, fit):
    page = visit(open_server.url).go(f"m=timm.vit_tiny_patch16_224&w=random&n=blocks.2&v=mean&z=96&f={fit}")
    page.set_default_timeout(120_000)  # two sizes of a transformer are traced first
    shown(page, "blocks.2")
    tokens = asked(open_server, "timm.vit_tiny_patch16_224", "blocks.2", "random", image_size="96", fit=fit)[0]
    rows, columns = (6, 6) if fit == "stretch" else (6, round(96 / HEIGHT * WIDTH / 16))
    strength = np.abs(tokens[1:]).mean(-1).reshape(rows, columns)
    painted = coloured(strength)
    assert painted.shape == (rows, columns, 3)
    page.get_by_role("button", name="Attention").click()
    shown(page, "blocks.2.attn.attention")
    assert page.get_by_role("alert").count() == 0
