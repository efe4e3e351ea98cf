"""The images with the largest values of the channel that is looked at, where the server has them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from fxcore import photos
from service.engine import FeatureOptions
from service.http.access.keys import make
from service.offline import Job, extract
from service.schemas.specs import ExtractorSpec
from service.settings import Settings
from tests.e2e.page.seen import TILES, shown, until

parquet = pytest.importorskip("pyarrow.parquet")

ROW = 'section[aria-label="Top images"]'
LOADED = f"""[...document.querySelectorAll('{ROW} img')].filter((one) => one.naturalWidth).length === 3
    && document.querySelector('{ROW} ol').getAttribute('aria-busy') === 'false'"""


@pytest.mark.exhaustive
def test_the_top_images_of_the_chosen_channel_are_shown(start, visit, tmp_path):
    spec = ExtractorSpec(model="resnet18", weights="random", return_nodes=["layer3"])
    files = tuple(str(file) for file in photos.files())
    job = Job(files, tmp_path / "out", "safetensors", spec, FeatureOptions(), reduce="mean,top:3")
    with ThreadPoolExecutor(1) as thread:  # this one has Playwright's event loop
        thread.submit(extract, job, Settings(device="cpu", lowering=False)).result()
    rows = parquet.read_table(tmp_path / "out" / "top.parquet").to_pylist()
    key, secret = make("page", "admin")
    (tmp_path / "keys").write_text(key.line + "\n")
    tab = visit(start(models="resnet18", statistics=tmp_path / "out", api_keys_file=tmp_path / "keys").url)
    page = tab.go("m=resnet18&w=random&n=layer3&v=channels&s=number&ch=5")
    page.get_by_role("textbox", name="Key").fill(secret)
    page.get_by_role("button", name="Use this key").click()
    for channel in (5, 9):
        page.locator(f'{TILES}[data-channel="{channel}"][aria-pressed="true"]').wait_for()
        until(page, LOADED)
        names = page.locator(f"{ROW} img").evaluate_all("all => all.map((one) => one.alt)")
        assert names == [row["path"].rpartition("/")[2] for row in rows if row["channel"] == channel]
        page.fill('input[aria-label="Channel"]', "9")
        page.keyboard.press("Enter")
    asked = [url for url in tab.urls if "/statistics/images/" in url]
    assert len(asked) == len(set(asked))  # each once
    page.evaluate("location.hash = 'm=resnet18&w=random&n=layer2&v=channels&ch=5'")
    shown(page, "layer2")
    assert page.locator(ROW).count() == 0
    assert tab.complaints == ["Failed to load resource: the server responded with a status of 401 (Unauthorized)"]
