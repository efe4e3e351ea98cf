"""Expected contents of the page, computed from the API's responses."""

import base64
import io
import subprocess
import sys
import time

import numpy as np
import PIL.Image
import pytest
import safetensors.numpy

from fxcore import photos

CHELSEA = photos.files()[1]
# matplotlib's inferno at 0, 1/8, … 1.
INFERNO = [
    *((0, 0, 4), (31, 12, 72), (85, 15, 109), (136, 34, 106), (186, 54, 85)),
    *((227, 89, 51), (249, 140, 10), (249, 201, 50), (252, 255, 164)),
]
# ColorBrewer's RdBu of nine colours, reversed.
BLUE_TO_RED = [
    *((33, 102, 172), (67, 147, 195), (146, 197, 222), (209, 229, 240), (247, 247, 247)),
    *((253, 219, 199), (244, 165, 130), (214, 96, 77), (178, 24, 43)),
]
GRAPH = "section.graph canvas[role=application]"
TILES = ".grid .tile"
AGAIN = 3000  # milliseconds after which a server that was away is asked again
VIT, BLOCK = "timm.vit_tiny_patch16_224", "blocks.2"


def asked(server, model, node, weights, photo=None, headers=None, **query):
    """Return the service's response to the request that the page should have made."""
    response = server.http.post(
        f"/v1/models/{model}/features",
        params={"nodes": node, "weights": weights, **query},
        content=photo or CHELSEA.read_bytes(),
        headers={"accept": "application/x-safetensors", "content-type": "image/jpeg", **(headers or {})},
    )
    assert response.status_code == 200, response.text
    return safetensors.numpy.load(response.content)[node]


def attention(server, model, node, photo=CHELSEA, edits=(), **more):
    """Return the service's attention weights for one photo: ``[heads, L, L]`` or ``[windows, heads, L, L]``."""
    spec = {"model": model, "weights": "random", "return_nodes": [node], "transforms": ["attention_maps"], **more}
    made = server.http.post("/v1/extractors", json=spec).json()
    response = server.http.post(
        f"/v1/extractors/{made['id']}/features",
        json={"images": [base64.b64encode(photo.read_bytes()).decode()], "edits": list(edits)},
        headers={"accept": "application/x-safetensors"},
    )
    assert response.status_code == 200, response.text
    return safetensors.numpy.load(response.content)[node][0]


def coloured(values, low=None, high=None):
    """Colour a map as the page does: from its least to its greatest value, or centred on zero if signs differ."""
    low, high = (values.min() if low is None else low), (values.max() if high is None else high)
    colours = INFERNO
    if low < 0 < high:
        low, high, colours = -max(high, -low), max(high, -low), BLUE_TO_RED
    shares = np.round((values - low) / (high - low) * 255) / 255
    points = np.linspace(0, 1, len(colours))
    return np.stack([np.interp(shares, points, [p[c] for p in colours]) for c in range(3)], axis=-1)


def principal_colours(several):
    """The first three principal components of maps ``[C, H, W]`` on one scale, as colours ``[H, W, 3]``."""
    positions = np.concatenate([maps.reshape(len(maps), -1).T for maps in several])
    centred = positions - positions.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    signs = [np.sign(direction[np.abs(direction).argmax()]) for direction in directions[:3]]
    scores = centred @ (directions[:3].T * signs)
    low, high = (np.quantile(scores, q, axis=0, method=m) for q, m in ((0.01, "lower"), (0.99, "higher")))
    colours = 255 * ((scores - low) / (high - low)).clip(0, 1)
    return colours.reshape(len(several), *several[0].shape[1:], 3)


def pixels(canvas):
    """Return the pixels of ``canvas``, ``[H, W, 4]``."""
    drawn = canvas.evaluate("c => c.toDataURL('image/png')").partition(",")[2]
    return np.array(PIL.Image.open(io.BytesIO(base64.b64decode(drawn))).convert("RGBA")).astype(int)


def listed(page):
    """The models in the list, whether or not they are in memory."""
    return [text.split()[0] for text in page.locator(".results a").all_inner_texts()]


def shown(page, node, photo="chelsea.jpg"):
    """Wait until a map of ``node`` is visible."""
    page.locator(f'.stage[aria-label$=" of {node} over {photo}"]').wait_for()


def until(page, expression):
    """Wait until ``expression`` is true. Playwright's own method evaluates strings, which the page's CSP forbids."""
    deadline = time.monotonic() + 120
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def eventually(page, check, seconds=60):
    """Retry ``check`` until it passes, since the page may still show its earlier contents; return its value."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        page.wait_for_timeout(50)


def shown_channels(page):
    page.wait_for_selector(TILES)
    return [int(tile.get_attribute("data-channel")) for tile in page.locator(TILES).all()]


def looks(page, label, values, scale=(None, None)):
    """Check that the stage with that label, without the photo under it, shows ``values``.

    These are a map, coloured on ``scale`` or its own range, or colours ``[H, W, 3]``. They are compared at the middle
    of each position, with a tolerance for smoothing.
    """
    stage = page.locator(f'.stage[aria-label="{label}"]')
    stage.wait_for()
    page.get_by_label("Opacity of the map").fill("1")
    wanted = values if values.ndim == 3 else coloured(values, *scale)

    def check():
        found = pixels(stage)[..., :3]
        rows, columns = (
            ((np.arange(size) + 0.5) * found.shape[axis] / size).astype(int)
            for axis, size in enumerate(values.shape[:2])
        )
        found = found[rows][:, columns].astype(float)
        assert np.abs(found - wanted).mean() < 12
        assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.97

    eventually(page, check)
    return stage


def check_tiles(page, maps, some=5):
    """Check that the first tiles show the channels of ``maps`` ``[C, H, W]`` that vary most over the positions."""
    variation = maps.std(axis=(1, 2))

    def check():
        channels = shown_channels(page)
        assert variation[channels] == pytest.approx(np.sort(variation)[::-1][: len(channels)], rel=1e-4)
        for channel in channels[:some]:
            found = pixels(page.locator(f'{TILES}[data-channel="{channel}"] canvas'))
            assert found.shape[:2] == maps.shape[1:]
            assert np.abs(found[..., :3] - coloured(maps[channel])).max() <= 2, channel
            assert (found[..., 3] == 255).all()

    eventually(page, check)


def said(page, number=0):
    """Return the location in the readout, and the least and greatest value."""
    place, values = page.locator(".readout").nth(number).inner_text().split(": ")
    return place, *map(float, values.split(" to "))


def point(stage, row, column, size):
    box = stage.bounding_box()
    return {"x": (column + 0.5) * box["width"] / size[1], "y": (row + 0.5) * box["height"] / size[0]}


def run_curl(command, folder):
    """Run the command that the page shows in ``folder``, where it writes its answer."""
    subprocess.run(command, shell=True, check=True, cwd=folder)


def run_python(program, folder):
    """Return what the program that the page shows prints in ``folder``."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


def cosines(maps, row, column):
    unit = maps / np.linalg.norm(maps, axis=0)
    return np.einsum("chw,c->hw", unit, unit[:, row, column])
