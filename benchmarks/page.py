"""Measure how long the page keeps visitors waiting, in Chromium, on its own servers with default settings.

    python benchmarks/page.py
    python benchmarks/page.py --only tree --rounds 1

- ``start``: from opening the page of a server that has just become ready to the first picture.
- ``tree``: the longest time that the page is blocked while the expanded tree of a large model is walked and searched.
- ``attention``: from choosing the attention of DINOv2-S at 518 x 518, with the maps of its last block shown, to its
  picture; for a first photo, then for others, each after all earlier requests of the page are answered and the server
  is not compiling.
- ``pca``: the principal components of a map of 256 x 200 x 304.

It needs Playwright (``pip install 'fxserve[test]'``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Callable

from playwright.sync_api import Browser, Page, Request, sync_playwright
from servers import Server, fxserve

WAIT = 300_000  # milliseconds
LARGE = ("mvit_v2_s", "densenet201", "timm.vit_large_patch16_224")
DINO = "m=timm.vit_small_patch14_dinov2&n=blocks.11&w=random"
PHOTOS = ("chelsea", "rocket", "coffee", "astronaut")
# Tasks of the main thread that take 50 ms or more; browsers do not report shorter ones.
WATCH = """() => {
  window.blocked = []
  new PerformanceObserver((list) => window.blocked.push(...list.getEntries().map((task) => task.duration)))
    .observe({ type: "longtask" })
}"""
# Opens a location and resolves with the seconds until an element exists, by the page's own clock.
SHOW = """([fragment, selector]) => new Promise((resolve) => {
  const begun = fragment === null ? 0 : performance.now()
  const look = () => document.querySelector(selector) && resolve((performance.now() - begun) / 1000)
  new MutationObserver(look).observe(document, { childList: true, subtree: true, attributes: true })
  if (fragment !== null) location.hash = fragment
  look()
})"""
PCA = """async () => {
  const { rgb } = await import("/page/pca.js")
  const data = Float32Array.from({ length: 256 * 200 * 304 }, () => Math.random() - 0.5)
  const begun = performance.now()
  rgb([{ data, channels: 256, height: 200, width: 304 }])
  return (performance.now() - begun) / 1000
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MEASURED)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    with sync_playwright() as playwright:
        path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name in [options.only] if options.only else MEASURED:
            MEASURED[name](browser, options.rounds)
        browser.close()


def start(browser: Browser, rounds: int) -> None:
    """Measure the time to the first picture from a server that has just become ready."""
    taken = []
    for _ in range(rounds):
        with fxserve() as server:
            page = tab(browser, server.port)
            page.goto("/", wait_until="commit")
            taken.append(page.evaluate(SHOW, [None, ".showcase canvas"]))
            page.close()
    report("first picture of a fresh start", taken)


def tree(browser: Browser, rounds: int) -> None:
    """Measure the longest task while every node is in the tree."""
    with fxserve() as server:
        for model in LARGE:
            longest = []
            for _ in range(rounds):
                page = tab(browser, server.port)
                page.goto(f"/#m={model}&w=random&o=*")
                page.locator(".tree li").first.wait_for()
                page.wait_for_timeout(2000)
                page.evaluate(WATCH)
                search = page.get_by_label("Search nodes")
                search.press("ArrowDown")
                for key in ["ArrowDown"] * 20 + ["PageDown", "End", "Home", "ArrowLeft", "ArrowRight"]:
                    page.keyboard.press(key)
                search.press_sequentially("conv", delay=50)
                for _ in range(4):
                    search.press("Backspace")
                page.wait_for_timeout(500)
                longest.append(max(page.evaluate("window.blocked"), default=0) / 1000)
                page.close()
            report(f"longest task of the tree of {model} (0: under 50 ms)", longest)


def attention(browser: Browser, rounds: int) -> None:
    """Measure the time to show the attention of DINOv2-S for a new photo."""
    with fxserve() as server:
        page = tab(browser, server.port)
        under_way = requests(page)
        page.goto("/")
        taken = []
        for photo in PHOTOS:
            with page.expect_request_finished(lambda request: "features" in request.url):
                page.evaluate(SHOW, [f"{DINO}&p={photo}", ".grid .tile canvas"])
            rest(page, server, under_way)
            taken.append(page.evaluate(SHOW, [f"{DINO}&p={photo}&v=attention", ".grid.heads canvas"]))
        page.close()
    report("attention of DINOv2-S, first", taken[:1])
    report("attention of DINOv2-S, warm", taken[1:])


def requests(page: Page) -> set[Request]:
    """Return a live set of the page's requests in flight."""
    under_way: set[Request] = set()
    page.on("request", lambda request: under_way.add(request))
    page.on("requestfinished", lambda request: under_way.discard(request))
    page.on("requestfailed", lambda request: under_way.discard(request))
    return under_way


def rest(page: Page, server: Server, under_way: set[Request]) -> None:
    """Wait until, for a second, the page has no requests in flight and the server is not compiling."""
    quiet = 0
    while quiet < 10:
        page.wait_for_timeout(100)
        quiet = 0 if under_way or server.process.children() else quiet + 1


def pca(browser: Browser, rounds: int) -> None:
    """Measure the principal components of a detector's largest map."""
    with fxserve() as server:
        page = tab(browser, server.port)
        page.goto("/")
        report("PCA of 256 x 200 x 304", [page.evaluate(PCA) for _ in range(rounds)])
        page.close()


MEASURED: dict[str, Callable[[Browser, int], None]] = {
    "start": start,
    "tree": tree,
    "attention": attention,
    "pca": pca,
}


def tab(browser: Browser, port: int) -> Page:
    page = browser.new_page(base_url=f"http://127.0.0.1:{port}", viewport={"width": 1280, "height": 800})
    page.set_default_timeout(WAIT)
    return page


def report(what: str, taken: list[float]) -> None:
    print(f"{what}: {statistics.median(taken):.2f} s (of {len(taken)}: {min(taken):.2f} to {max(taken):.2f})")


if __name__ == "__main__":
    main()
