"""What becomes of answers and of work that is no longer wanted."""

import pytest

from tests.e2e.page.seen import asked, check_tiles, shown_channels


@pytest.mark.exhaustive
def test_a_slow_response_is_cancelled_and_requested_again(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3")
    shown_channels(page)
    held = []
    page.route("**/features?*", lambda route: held.append(route))  # an answer that takes its time
    page.locator('.tree [title="features.4"]').click()
    page.get_by_text("Computing features.4 of squeezenet1_1").wait_for()
    with page.expect_event("requestfailed") as failed:
        page.get_by_role("button", name="Cancel").click()
    assert "features.4" in failed.value.url
    page.get_by_text("Cancelled.").wait_for()
    page.unroute("**/features?*")
    page.get_by_role("button", name="Try again").click()
    check_tiles(page, asked(open_server, "squeezenet1_1", "features.4", "DEFAULT")[0])


@pytest.mark.exhaustive
def test_what_is_shown_is_held_however_large_it_is(open_server, visit):
    page = visit(open_server.url).go()
    found = page.evaluate(
        """async () => {
          const { opened } = await import("/page/answers.js")
          const { reduce } = await import("/page/reductions.js")
          const header = new TextEncoder().encode('{"n": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}')
          const answers = []
          async function add(signal) {
            const bytes = new Uint8Array(90e6)
            bytes.set([header.length])
            bytes.set(header, 8)
            const message = { key: "n", layout: null, tokens: null }
            answers.push(await opened(null, new Response(bytes), message, { name: "none" }, "n", "n", signal))
          }
          const value = ({ slot }) => reduce("values", { slot, most: 1 })
          const held = async () => (await Promise.all(answers.map(value))).map(Boolean)
          const place = new AbortController()
          for (let i = 0; i < 3; i++) await add(place.signal)
          const then = await held()
          place.abort()
          await add(new AbortController().signal)
          return [then, await held()]
        }"""
    )
    assert found == [[True] * 3, [False, False, True, True]]  # the last ones that take no more than 256 MB


@pytest.mark.exhaustive
def test_work_that_is_no_longer_wanted_is_not_done(open_server, visit):
    page = visit(open_server.url).go()
    done = page.evaluate(
        """async () => {
          const { reduce, isStale } = await import("/page/reductions.js")
          const shape = [1, 64, 100, 100], count = 64 * 100 * 100
          const header = new TextEncoder().encode(JSON.stringify(
            { v: { dtype: "F32", shape, data_offsets: [0, 4 * count] } }).padEnd(96))
          const buffer = new ArrayBuffer(8 + header.length + 4 * count)
          new DataView(buffer).setBigUint64(0, BigInt(header.length), true)
          new Uint8Array(buffer, 8).set(header)
          new Float32Array(buffer, 8 + header.length).fill(1)
          await reduce("open", { slot: "t", key: "v", layout: "NCHW", tokens: null, buffer }, { transfer: [buffer] })
          const jobs = [...Array(9).keys()].map((row) =>
            reduce("similarity", { slot: "t", row, column: 0 }, { topic: "pointer" })
            .then(() => row, (error) => (isStale(error) ? null : error)))
          return (await Promise.all(jobs)).filter((row) => row !== null)
        }"""
    )
    assert done in ([0, 8], [8])  # the last, and the first where it ran before the others came


@pytest.mark.exhaustive
def test_an_answer_is_not_shown_under_a_choice_made_while_it_was_awaited(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3&v=mean")
    stage = '.stage[aria-label="Heat-map of features.{} over chelsea.jpg"]'
    page.locator(stage.format(3)).wait_for()
    held = []
    page.route("**/features?*", lambda route: held.append(route))
    page.locator('.tree [title="features.4"]').click()
    page.get_by_text("Computing features.4 of squeezenet1_1").wait_for()
    page.get_by_role("button", name="Expand all").click()  # changes the place, not what is asked for
    page.wait_for_timeout(300)
    assert page.locator(".stage").count() == 0
    for route in held:
        route.continue_()
    page.locator(stage.format(4)).wait_for()
