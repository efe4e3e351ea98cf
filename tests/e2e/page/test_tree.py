"""The module tree and the graph beside it: walked by keys, and quick for models of thousands of nodes."""

import pytest

from tests.e2e.page.seen import GRAPH, until

VIT = "timm.vit_tiny_patch16_224"


def focused(page):
    return page.evaluate("document.activeElement.title")


@pytest.mark.exhaustive
def test_the_tree_is_one_stop_and_is_walked_by_arrows(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=layer3")
    page.locator('.tree [title="layer3"]').wait_for()
    assert page.locator(".tree button[tabindex='0']").count() == 1
    search = page.get_by_label("Search nodes")
    search.press("ArrowDown")
    assert focused(page) == "x"
    page.keyboard.press("End")
    assert focused(page) == "fc"
    page.locator('.tree [title="layer2"]').focus()
    page.keyboard.press("ArrowRight")
    page.locator('.tree [title="layer2.0"]').wait_for()
    until(page, "document.activeElement.title === 'layer2'")
    page.keyboard.press("ArrowRight")
    assert focused(page) == "layer2.0"
    page.keyboard.press("Enter")
    until(page, "location.hash.includes('n=layer2.0')")
    until(page, "document.activeElement.title === 'layer2.0'")
    page.keyboard.press("ArrowLeft")
    assert focused(page) == "layer2"
    page.keyboard.press("ArrowLeft")
    page.locator('.tree [title="layer2.0"]').wait_for(state="detached")
    search.fill("layer4.1.conv2")
    search.press("Enter")
    until(page, "location.hash.includes('n=layer4.1.conv2')")


@pytest.mark.exhaustive
def test_helpers_without_a_tensor_are_hidden_and_counted(open_server, visit):
    page = visit(open_server.url).go(f"m={VIT}&n=blocks.2&w=random")
    page.locator('.tree [title="blocks"]').wait_for(timeout=90_000)
    count = page.locator(".helpers").inner_text().split()[0]
    assert page.locator(".tree .name:disabled").count() == 0
    page.locator(".helpers").click()
    assert page.locator(".tree .name:disabled").count() == int(count) > 0


@pytest.mark.exhaustive
def test_of_a_long_tree_the_rows_in_sight_are_there(open_server, visit):
    page = visit(open_server.url).go(f"m={VIT}&n=blocks.2&w=random&o=*")
    page.locator(".tree .chosen").wait_for(timeout=90_000)
    rows = page.locator(".tree li")
    assert 20 < rows.count() < 130
    page.locator("#tree").evaluate("tree => tree.scrollTo(0, tree.scrollHeight)")
    page.locator('.tree [title="head"]').wait_for()
    assert 20 < rows.count() < 130
    box, pane = page.locator('.tree [title="head"]').bounding_box(), page.locator("#tree").bounding_box()
    assert pane["y"] <= box["y"] <= pane["y"] + pane["height"]


@pytest.mark.exhaustive
def test_what_the_arrows_pass_in_the_graph_is_not_asked_for(open_server, visit):
    tab = visit(open_server.url)
    page = tab.go("m=resnet18&n=conv1&i=none")
    page.locator(".stage").wait_for()
    page.locator(f'{GRAPH}[aria-busy="false"]').wait_for()
    before = page.evaluate("history.length")
    tab.urls.clear()
    page.locator(GRAPH).evaluate(
        """canvas => {
          for (let i = 0; i < 5; i++) canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown" }))
        }"""
    )
    until(page, "location.hash.includes('n=layer2')")
    page.locator('.stage[aria-label$=" of layer2 over chelsea.jpg"]').wait_for()
    assert len([url for url in tab.urls if "/features" in url]) == 1
    assert page.evaluate("history.length") == before


@pytest.mark.exhaustive
def test_the_small_map_of_the_graph_shows_and_moves_what_is_in_sight(open_server, visit):
    page = visit(open_server.url).go(f"m={VIT}&n=blocks.2&w=random&i=none")
    page.locator(f'{GRAPH}[aria-busy="false"]').wait_for()
    small = page.locator(".minimap")
    small.wait_for()
    before = page.locator(GRAPH).evaluate("canvas => canvas.toDataURL()")
    small.click(position={"x": 10, "y": 5})
    until(page, f"document.querySelector('{GRAPH}').toDataURL().length > 0")
    page.wait_for_timeout(100)
    assert page.locator(GRAPH).evaluate("canvas => canvas.toDataURL()") != before
    page.get_by_role("button", name="Fit").click()
    small.wait_for(state="hidden")
