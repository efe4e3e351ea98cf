"""A real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from service.http.access.keys import make
from tests.e2e.conftest import Server

# The headless shell opens a tab in a fifth of the time of the full browser, which draws a window around each.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MODELS = (
    *("squeezenet1_1", "resnet18", "swin_t", "vit_b_16", "r3d_18", "fasterrcnn_mobilenet_v3_large_320_fpn"),
    *("timm.vit_tiny_patch16_224", "efficientnet_lite0", "mobilenet_v2"),
)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium; without it, or without Playwright, the tests are skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="there is no Playwright: the page is not tested")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium (apt-get install chromium-headless-shell): the page is not tested")
    with (
        sync_api.sync_playwright() as playwright,
        closing(
            playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        ) as started,
    ):
        yield started


@pytest.fixture(scope="package")
def open_server(start: Callable[..., Server]) -> Server:
    """A server without keys; squeezenet1_1 has weights in its cache."""
    return start(models=",".join(MODELS))


@pytest.fixture(scope="package")
def locked_server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, str]:
    """A server that requires keys, and a key with scope ``admin``."""
    key, secret = make("page", "admin")
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(key.line + "\n")
    return start(models=",".join(MODELS), api_keys_file=file), secret


class Visit:
    """A tab, with its requests and errors.

    Attributes:
        page: Playwright's page.
        urls: every requested URL.
        complaints: errors of scripts, of the console, and of the Content-Security-Policy.
    """

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        self.context.set_default_timeout(120_000)  # a busy machine may take long
        self.page = self.context.new_page()
        self.urls: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def go(self, fragment: str = "", path: str = "/") -> Any:
        """Open a location of the page."""
        self.page.goto(f"{self.url}{path}#{fragment}")
        return self.page


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Open a tab: ``visit(server.url)``."""
    visits: list[Visit] = []

    def begin(url: str, **options: Any) -> Visit:
        visits.append(Visit(browser, url, **options))
        return visits[-1]

    yield begin
    for one in visits:
        one.context.close()
