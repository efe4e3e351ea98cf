"""Attention as maps, against NumPy and PyTorch."""

import numpy as np
import pytest
import safetensors.numpy
import torch

from fxcore import photos
from tests.e2e.page.seen import (
    BLOCK,
    CHELSEA,
    VIT,
    asked,
    attention,
    check_tiles,
    coloured,
    looks,
    pixels,
    point,
    run_curl,
    run_python,
    said,
    until,
)


@pytest.mark.exhaustive
def test_where_a_place_looks_in_a_vision_transformer(open_server, visit):
    node = f"{BLOCK}.attn.attention"
    page = visit(open_server.url).go(f"m={VIT}&n={BLOCK}.norm1&v=attention&head=1&at=2,5&p2=rocket")
    until(page, "document.querySelectorAll('.stage').length === 2")
    rows = [
        attention(open_server, VIT, node, photo)[:, 1 + 2 * 14 + 5, 1:].reshape(-1, 14, 14)
        for photo in (CHELSEA, photos.files()[3])
    ]
    scale = min(one[1].min() for one in rows), max(one[1].max() for one in rows)
    bars = page.locator(".stages .scale-bar")
    assert bars.count() == 2
    for bar in bars.all():
        assert [float(text) for text in bar.locator("span").all_inner_texts()] == pytest.approx(scale, rel=1e-3)
    for number, name in enumerate(("chelsea", "rocket")):
        found = rows[number][1]
        looks(page, f"Head 1 of {node} over {name}.jpg", found, scale)
        least, most = (pytest.approx(value, rel=1e-3) for value in (found.min(), found.max()))
        assert said(page, number) == ("2, 5", least, most)
    captions = page.locator(".stages figcaption").all()
    assert len(captions) == 2
    for caption in captions:
        assert caption.bounding_box()["height"] < 90  # the place that is read out leaves room for what it is of
    page.get_by_label("Head", exact=True).select_option("")
    for found, name in zip(rows, ("chelsea", "rocket"), strict=True):
        means = [one.mean(axis=0) for one in rows]
        scale = min(map(np.min, means)), max(map(np.max, means))
        looks(page, f"Mean of all heads of {node} over {name}.jpg", found.mean(axis=0), scale)
    assert "head" not in page.evaluate("location.hash")
    page.goto(f"{open_server.url}/#m={VIT}&n={BLOCK}.norm1&v=attention&head=1&at=2,5&p=rocket")  # the first photo now
    looks(page, f"Head 1 of {node} over rocket.jpg", rows[1][1])
    weights = attention(open_server, VIT, node, photos.files()[3])[:, 0]  # of the class token
    page.get_by_label("What attends").select_option("0")
    looks(page, f"Head 1 of {node} over rocket.jpg", weights[1, 1:].reshape(14, 14))
    assert "q=0" in page.evaluate("location.hash")
    bits = -(weights * np.log2(weights)).sum(axis=-1)
    for head in range(3):
        tile = page.locator(f'.tile[data-head="{head}"]')
        assert tile.get_attribute("aria-label") == f"Head {head}, entropy {bits[head]:.1f} bits"
        found = pixels(tile.locator("canvas"))[..., :3]
        assert np.abs(found - coloured(weights[head, 1:].reshape(14, 14))).max() <= 2
    page.locator('.tile[data-head="2"]').click()
    looks(page, f"Head 2 of {node} over rocket.jpg", weights[2, 1:].reshape(14, 14))
    page.get_by_role("button", name="The attention after").click()
    page.locator('.stage[aria-label="Head 2 of blocks.3.attn.attention over rocket.jpg"]').wait_for()
    assert "n=blocks.3" in page.evaluate("location.hash")


@pytest.mark.exhaustive
def test_where_a_place_looks_in_a_shifted_window(open_server, visit):
    node = "features.5.3.attn.attention"
    page = visit(open_server.url).go("m=swin_t&w=random&n=features.5.3&v=attention&head=1&at=5,12")
    page.locator(f'.stage[aria-label="Head 1 of {node} over chelsea.jpg"]').wait_for()
    weights = attention(open_server, "swin_t", node)
    # Where torch.roll and cutting into windows bring each place of the map.
    places = torch.arange(14 * 14).reshape(14, 14).roll((-3, -3), (0, 1))
    windows = places.reshape(2, 7, 2, 7).transpose(1, 2).reshape(4, 49)
    (window, query), *_ = (windows == 5 * 14 + 12).nonzero().tolist()
    wanted = np.full(14 * 14, np.nan, dtype=np.float32)
    wanted[windows[window].numpy()] = weights[window, 1, query]
    found = page.evaluate(
        """async ([shape, data]) => {
          const { attended } = await import("/page/attended.js")
          const grid = { height: 14, width: 14, prefix: 0, window: [7, 7], shift: [3, 3] }
          const row = attended({ shape, data: Float32Array.from(data) }, grid, 1, 5, 12)
          return [...row].map((value) => (Number.isNaN(value) ? null : value))
        }""",
        [[1, *weights[:, :2].shape], weights[:, :2].ravel().tolist()],
    )
    np.testing.assert_allclose(np.array(found, dtype=np.float32), wanted, rtol=1e-6)
    inside = wanted[~np.isnan(wanted)]
    assert said(page) == (
        "5, 12",
        pytest.approx(inside.min(), rel=1e-3, abs=1e-9),
        pytest.approx(inside.max(), rel=1e-3),
    )
    page.evaluate(
        "location.hash += '&e=' + JSON.stringify([{node: 'features.5.3.attn.shifted_window_attention', scale: 0}])"
    )
    page.get_by_text(f"No edit changes the weights of {node}").wait_for()


@pytest.mark.exhaustive
def test_a_token_of_one_model_and_a_position_of_another_share_a_scale(open_server, visit):
    page = visit(open_server.url).go(f"m={VIT}&n={BLOCK}.norm1&v=attention&q=0&at=5,12&m2=swin_t&n2=features.5.3")
    until(page, "document.querySelectorAll('.stages .scale-bar').length === 2")
    first, second = (bar.locator("span").all_inner_texts() for bar in page.locator(".stages .scale-bar").all())
    assert first == second
    from_token = attention(open_server, VIT, f"{BLOCK}.attn.attention")[:, 0, 1:].mean(axis=0)
    assert float(first[0]) <= from_token.min() + 1e-6
    assert float(first[-1]) >= from_token.max() * 0.999


@pytest.mark.exhaustive
def test_a_model_without_attention_is_shown_by_its_channels(open_server, visit):
    page = visit(open_server.url).go(f"m={VIT}&n={BLOCK}&v=attention")
    page.locator(".stage").wait_for()
    page.get_by_role("link", name="All models").click()
    page.get_by_role("link", name="resnet18").click()
    page.get_by_text("Random weights").wait_for()
    assert "v=attention" in page.evaluate("location.hash")
    check_tiles(page, asked(open_server, "resnet18", "C4", "random")[0])
    assert page.get_by_role("button", name="Channels").get_attribute("aria-pressed") == "true"


@pytest.mark.exhaustive
def test_the_request_and_the_statistics_under_attention_are_those_of_the_weights(open_server, visit, tmp_path):
    node = f"{BLOCK}.attn.attention"
    page = visit(open_server.url).go(f"m={VIT}&n={BLOCK}&v=attention")
    page.locator(".stage").wait_for()
    weights = attention(open_server, VIT, node)
    numbers = page.locator(f'section[aria-label="All weights of {node}"] dd').all_inner_texts()
    assert float(numbers[1]) == pytest.approx(weights.max(), rel=1e-3)
    (tmp_path / "chelsea.jpg").write_bytes(CHELSEA.read_bytes())
    run_curl(page.locator(".request code").inner_text(), tmp_path)
    found = safetensors.numpy.load_file(tmp_path / f"{node}.safetensors")[node]
    np.testing.assert_allclose(found[0], weights, atol=1e-6)


@pytest.mark.exhaustive
def test_of_large_weights_only_the_row_that_is_seen_is_asked_for(open_server, visit, tmp_path):
    tab = visit(open_server.url)
    sizes = []
    tab.page.on("response", lambda answer: sizes.append(answer) if "/features?tokens=" in answer.url else None)
    node, side = f"{BLOCK}.attn.attention", 28
    page = tab.go(f"m={VIT}&n={BLOCK}&v=attention&z=448&head=1&at=5,9")
    weights = attention(open_server, VIT, node, image_size=448)
    assert weights.nbytes > 7e6
    row = weights[:, 1 + 5 * side + 9, 1:].reshape(3, side, side)
    stage = looks(page, f"Head 1 of {node} over chelsea.jpg", row[1])
    assert [answer.url.partition("tokens=")[2] for answer in sizes] == [str(1 + 5 * side + 9)]
    assert len(sizes[0].body()) < 12_000
    bits = -(weights[:, 1 + 5 * side + 9] * np.log2(weights[:, 1 + 5 * side + 9])).sum(axis=-1)
    for head in range(3):
        label = page.locator(f'.tile[data-head="{head}"]').get_attribute("aria-label")
        assert label == f"Head {head}, entropy {bits[head]:.1f} bits"
    (tmp_path / "chelsea.jpg").write_bytes(CHELSEA.read_bytes())
    run_curl(page.locator(".request code").inner_text(), tmp_path)
    found = safetensors.numpy.load_file(tmp_path / f"{node}.safetensors")[node]
    np.testing.assert_allclose(found[0, :, 0, 1:], row.reshape(3, -1), atol=1e-6)
    page.get_by_role("button", name="Python", exact=True).click()
    printed = run_python(page.locator(".request code").inner_text(), tmp_path)
    assert f"{node} (1, 3, 1, {side**2 + 1}) float32" in printed
    for column in range(4, 21, 4):  # only where it rests
        stage.hover(position=point(stage, 20, column, (side, side)))
    under = weights[1, 1 + 20 * side + 20, 1:]
    until(page, "document.querySelector('.readout')?.textContent.startsWith('20, 20: ')")
    assert said(page)[1:] == tuple(pytest.approx(value, rel=1e-3) for value in (under.min(), under.max()))
    assert len(sizes) < 5
    page.mouse.move(10, 10)
    until(page, "document.querySelector('.readout')?.textContent.startsWith('5, 9: ')")
    asked = len(sizes)
    page.get_by_label("Head", exact=True).select_option("2")
    looks(page, f"Head 2 of {node} over chelsea.jpg", row[2])
    page.get_by_role("button", name="The attention after").click()
    page.locator('.stage[aria-label="Head 2 of blocks.3.attn.attention over chelsea.jpg"]').wait_for()
    page.get_by_role("button", name="The attention before").click()
    page.locator(f'.stage[aria-label="Head 2 of {node} over chelsea.jpg"]').wait_for()
    assert len(sizes) == asked + 1  # all others are kept
