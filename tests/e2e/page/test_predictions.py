"""What the page makes of the model that is there with its trained weights: its predictions, by name."""

from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

import fxcore.photos
from tests.e2e.page.seen import asked, run_curl, run_python, until

TRAINED = "efficientnet_lite0"


@pytest.mark.exhaustive
def test_a_classifier_says_what_it_sees_by_name(open_server, visit):
    page = visit(open_server.url).go(f"m={TRAINED}&n=C5")
    page.locator(".predictions li").first.wait_for()
    logits = asked(open_server, TRAINED, "classifier.1", "DEFAULT")[0].astype(np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares)[:5]
    rows = page.locator(".predictions li")
    assert [int(row.get_attribute("data-class")) for row in rows.all()] == order.tolist()
    said = rows.first.locator("button, span").all_inner_texts()
    assert said == ["Egyptian cat", f"{100 * shares[order[0]]:.1f} %"]
    page.get_by_role("button", name="Photo coffee").click()
    until(page, "document.querySelector('.predictions li')?.textContent.startsWith('espresso')")
    page.goto(f"{open_server.url}/#m={TRAINED}&n=classifier.1")
    page.locator(".bars.named li", has_text="Egyptian cat").wait_for()
    page.goto(f"{open_server.url}/#m=resnet18&n=C5")  # with random weights
    page.get_by_text("Random weights").wait_for()
    page.locator(".stage").wait_for()
    assert page.locator(".predictions").count() == 0


@pytest.mark.exhaustive
def test_the_first_look_is_a_picture(open_server, visit):
    page = visit(open_server.url).go()
    page.locator('.showcase .stage[aria-label="PCA of C4 over chelsea.jpg"]').wait_for()
    page.locator(".showcase .predictions", has_text="Egyptian cat").wait_for()
    page.get_by_role("button", name="Photo coffee").click()
    page.locator('.showcase .stage[aria-label="PCA of C4 over coffee.jpg"]').wait_for()
    page.get_by_role("link", name="Look inside it").click()
    page.locator('.stage[aria-label$=" of C4 over coffee.jpg"]').wait_for()


@pytest.mark.exhaustive
def test_a_class_is_explained_where_one_asks(open_server, visit, tmp_path):
    page = visit(open_server.url).go(f"m={TRAINED}&n=classifier.1")
    page.locator(".predictions button").nth(1).click()  # of a vector: shown at the deepest level
    page.locator('.stage[aria-label="Evidence for tiger cat of C5 over chelsea.jpg"]').wait_for()
    photo = (Path(fxcore.photos.__file__).parent / "chelsea.jpg").read_bytes()

    def highest(level, index):
        response = httpx.post(
            f"{open_server.url}/v1/models/{TRAINED}/attributions?of=classifier.1&at={level}&target={index}",
            headers={"Content-Type": "image/jpeg", "Accept": "application/x-safetensors"},
            content=photo,
        )
        assert response.status_code == 200
        return pytest.approx(load(response.content)["attribution"].max(), rel=0.02)

    def most():
        return [float(bar.locator("span").last.inner_text()) for bar in page.locator(".scale-bar").all()]

    assert most() == [highest("C5", 282)]
    page.get_by_role("button", name="Copy").wait_for()
    assert page.get_by_role("button", name="Make an extractor").count() == 0
    run_curl(page.locator(".request code").inner_text(), tmp_path)
    assert load((tmp_path / "C5.safetensors").read_bytes())["attribution"].max() == highest("C5", 282)
    page.get_by_role("button", name="Python").click()
    assert "attribution (1, 7, 7) float32" in run_python(page.locator(".request code").inner_text(), tmp_path)
    page.get_by_role("button", name="curl").click()
    page.goto(f"{open_server.url}/#m={TRAINED}&n=C4&n2=C5&v=why")  # of the first class
    for level in ("C4", "C5"):
        page.locator(f'.stage[aria-label="Evidence for Egyptian cat of {level} over chelsea.jpg"]').wait_for()
    assert most() == [highest("C4", 285), highest("C5", 285)]  # different nodes have no scale in common


@pytest.mark.exhaustive
def test_two_photos_of_one_name_have_predictions_of_their_own(open_server, visit):
    page = visit(open_server.url).go(f"m={TRAINED}&n=C5")
    page.locator(".predictions li").first.wait_for()
    page.set_input_files(
        "input[type=file]",
        [
            {"name": "image.png", "mimeType": "image/png", "buffer": fxcore.photos.files()[number].read_bytes()}
            for number in (1, 2)
        ],
    )
    page.get_by_label("Compare with").select_option(label="image.png (2)")
    for title, best in (("image.png", "Egyptian cat"), ("image.png (2)", "espresso")):
        found = page.locator(f'section[aria-label="Predictions for {title}"]')
        found.locator("li").first.filter(has_text=best).wait_for()
        assert found.locator("p").inner_text() == f"{title}:"
        page.locator(f'.stage[aria-label$=" of C5 over {title}"]').wait_for()
    assert "'@image.png'" in page.inner_text(".request code")
