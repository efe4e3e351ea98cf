"""Take the README's screenshot of the page: ``python benchmarks/screenshot.py http://127.0.0.1:8000``.

It needs Playwright (``pip install 'fxserve[test]'``), Chromium and a running server.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

FRAGMENT = "m=efficientnet_lite0&n=C3&o=features,features.3&c=flops&p=chelsea"
OUT = Path(__file__).parent / "results/page.jpg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="URL of the server")
    parser.add_argument("--fragment", default=FRAGMENT, help="fragment of the page's URL")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 860}, color_scheme="light")
        page.goto(f"{arguments.server}/#{arguments.fragment}")
        page.locator(".grid .tile canvas").first.wait_for(timeout=120_000)
        page.wait_for_timeout(1000)
        page.screenshot(path=arguments.out, type="jpeg", quality=82)
        browser.close()
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
