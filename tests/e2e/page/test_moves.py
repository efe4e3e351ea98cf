"""What comes late: the page shows the place of now, and says so where something does not come at all."""

import pytest

from fxcore import photos
from tests.e2e.page.seen import AGAIN, GRAPH, TILES, asked, check_tiles, eventually, shown, until

COFFEE = photos.files()[2].read_bytes()


def outputs(url):
    return "/features?" in url and "dtype=float16" not in url


def pictures(url):
    return "/features?" in url and "dtype=float16" in url


class Held:
    """Requests that wait until they are let go; routes may only be continued while the browser is waited for."""

    def __init__(self, page, which):
        self.page, self.routes, self.released = page, [], False
        page.route(which, lambda route: route.continue_() if self.released else self.routes.append(route))

    def wait(self, number=1):
        def check():
            assert len(self.routes) >= number

        eventually(self.page, check)

    def release(self):
        self.released = True
        for route in self.routes:
            route.continue_()


@pytest.mark.exhaustive
def test_pictures_that_are_turned_off_before_the_first_output_stay_off(open_server, visit):
    tab = visit(open_server.url)
    held = Held(tab.page, outputs)
    page = tab.go("m=resnet18&n=layer3")
    held.wait()
    page.get_by_label("Pictures").select_option("none")
    held.release()
    shown(page, "layer3")
    page.wait_for_timeout(400)
    assert page.get_by_label("Pictures").input_value() == "none"
    assert not any(map(pictures, tab.urls))


@pytest.mark.exhaustive
def test_no_pictures_are_asked_for_of_the_photo_before(open_server, visit):
    tab = visit(open_server.url)
    page = tab.page
    sent = []
    page.on("request", lambda one: sent.append(one.post_data_buffer) if pictures(one.url) else None)
    held = Held(page, outputs)
    tab.go("m=resnet18&n=layer3")
    held.wait()
    page.get_by_role("button", name="Photo coffee").click()
    held.wait(2)
    page.wait_for_timeout(400)
    held.release()
    shown(page, "layer3", "coffee.jpg")
    until(page, "performance.getEntriesByType('resource').some(({ name }) => name.includes('dtype=float16'))")
    assert set(sent) == {COFFEE}


@pytest.mark.exhaustive
def test_a_layout_that_comes_late_is_shown_with_what_is_chosen_now(open_server, visit):
    tab = visit(open_server.url)
    page = tab.go("m=resnet18&n=layer3&o=&i=none")
    shown(page, "layer3")
    page.locator(f'{GRAPH}[aria-busy="false"]').wait_for()
    held = Held(page, lambda url: "format=layout" in url)
    page.get_by_role("button", name="Expand all").click()
    held.wait()
    page.get_by_role("button", name="C2", exact=True).click()
    page.get_by_role("button", name="Photo coffee").click()
    page.get_by_label("Pictures").select_option("mean")
    shown(page, "C2", "coffee.jpg")
    assert page.locator('.tree [title="layer1.0.conv1"]').count() == 0  # the tree is as open as the graph
    held.release()
    page.locator(f'{GRAPH}[aria-busy="false"]').wait_for()
    page.locator('.tree [title="layer1.0.conv1"]').wait_for()
    assert page.locator(".tree .chosen .name").get_attribute("title") == "layer1.1.relu_1"
    assert page.locator(".sheet strong").text_content() == "layer1.1.relu_1"
    assert page.get_by_label("Pictures").input_value() == "mean"


@pytest.mark.exhaustive
def test_a_layout_leaves_the_measurement_under_way_in_sight(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=layer3&o=&i=none")
    shown(page, "layer3")
    held = Held(page, lambda url: "profile=true" in url)
    page.get_by_label("Colour by").select_option("time")
    held.wait()
    page.get_by_role("button", name="Expand all").click()
    page.locator('.tree [title="layer1.0.conv1"]').wait_for()
    page.locator(".graph .note", has_text="Measuring").get_by_role("button", name="Cancel").wait_for()
    held.release()
    page.locator(".legend", has_text=" ms").wait_for()


@pytest.mark.exhaustive
def test_a_sample_that_does_not_come_leaves_no_other_output_in_its_place(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3")
    page.wait_for_selector(TILES)
    page.clock.install()
    page.context.set_offline(True)
    page.get_by_role("button", name="Photo coffee").click()
    page.get_by_role("alert").filter(has_text="does not answer").wait_for()
    assert page.locator(".stage").count() == 0
    assert page.locator(".request").count() == 0
    with page.expect_request(lambda one: pictures(one.url)):
        page.context.set_offline(False)
        page.clock.run_for(AGAIN)
    shown(page, "features.3", "coffee.jpg")
    check_tiles(page, asked(open_server, "squeezenet1_1", "features.3", "DEFAULT", COFFEE)[0])


@pytest.mark.exhaustive
def test_a_request_without_an_answer_is_not_repeated_where_the_server_is_there(open_server, visit):
    """It would get none again, and might be what ends the server's processes."""
    tab = visit(open_server.url)
    tab.page.clock.install()
    tab.page.route("**/features?*", lambda route: route.abort("connectionreset"))
    page = tab.go("m=squeezenet1_1&n=features.3&i=none")
    page.get_by_role("alert").filter(has_text="does not answer").wait_for()
    sent = sum("/features?" in url for url in tab.urls)
    page.clock.run_for(2 * AGAIN)
    page.wait_for_timeout(500)
    assert sum("/features?" in url for url in tab.urls) == sent


@pytest.mark.exhaustive
def test_a_browser_that_keeps_nothing_asks_for_the_key_once(locked_server, visit):
    server, key = locked_server
    tab = visit(server.url)
    tab.page.add_init_script(
        """for (const name of ["sessionStorage", "localStorage", "indexedDB"])
          Object.defineProperty(globalThis, name, { get() { throw new DOMException("denied", "SecurityError") } })"""
    )
    page = tab.go("m=squeezenet1_1&n=features.3")
    page.get_by_role("textbox", name="Key").fill(key)
    page.get_by_role("button", name="Use this key").click()
    shown(page, "features.3")
    page.get_by_role("button", name="Photo coffee").click()
    shown(page, "features.3", "coffee.jpg")
    assert page.get_by_role("dialog").count() == 0


@pytest.mark.exhaustive
def test_maps_that_could_not_be_computed_are_once_one_tries_again(open_server, visit):
    tab = visit(open_server.url)
    tab.page.route("**/page/pca.js", lambda route: route.abort(), times=1)  # of the worker
    page = tab.go("m=squeezenet1_1&n=features.3&i=none")
    page.get_by_role("alert").filter(has_text="computes maps has failed").wait_for()
    page.get_by_role("button", name="Try again").click()
    check_tiles(page, asked(open_server, "squeezenet1_1", "features.3", "DEFAULT")[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", ["", "m=squeezenet1_1&n=features.3&i=none"])
def test_the_pictures_of_a_model_that_one_leaves_are_not_waited_for(open_server, visit, other):
    page = visit(open_server.url).go("m=resnet18&n=layer3&i=none")
    shown(page, "layer3")
    held = Held(page, pictures)
    page.get_by_label("Pictures").select_option("mean")
    held.wait()
    with page.expect_event("requestfailed", lambda one: pictures(one.url)):
        page.evaluate("(other) => { location.hash = other }", other)
