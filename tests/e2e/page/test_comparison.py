"""Two models, or two weights of one, side by side: against NumPy and PyTorch."""

import numpy as np
import pytest
import torch

from tests.e2e.page.seen import BLOCK, TILES, VIT, asked, looks, principal_colours, until

NODE = "features.12"
TRAINED, RANDOM = "squeezenet1_1 IMAGENET1K_V1", "squeezenet1_1 random"


def rows(maps, size):
    """``[positions, channels]`` of maps averaged to ``size``."""
    return torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(maps), size).flatten(1).T.double().numpy()


def linear_cka(one, other):
    """Kornblith et al., 2019, section 3: of features whose columns are centred."""
    one, other = one - one.mean(axis=0), other - other.mean(axis=0)
    norms = np.linalg.norm(one.T @ one) * np.linalg.norm(other.T @ other)
    return np.linalg.norm(other.T @ one) ** 2 / norms


def numbers(page):
    """The linear CKA, and the mean cosine if there is one."""
    until(page, "/[0-9]$/.test(document.querySelector('.likeness summary')?.textContent)")
    cka, *mean = page.locator(".likeness summary").inner_text().removeprefix("Linear CKA ").split(", mean cosine ")
    return float(cka), *map(float, mean)


def label(view, title):
    return f"{view} of {NODE} of {title} over chelsea.jpg"


@pytest.mark.exhaustive
def test_two_weights_of_a_model(open_server, visit):
    page = visit(open_server.url).go(f"m=squeezenet1_1&n={NODE}&v=mean")
    page.get_by_label("Compare with", exact=True).select_option("weights random")
    assert "w2=random" in page.evaluate("location.hash")
    both = [asked(open_server, "squeezenet1_1", NODE, weights)[0] for weights in ("DEFAULT", "random")]
    means = [np.abs(one).mean(axis=0) for one in both]
    scale = min(map(np.min, means)), max(map(np.max, means))
    for title, values in zip((TRAINED, RANDOM), means, strict=True):
        looks(page, label("Heat-map", title), values, scale)
    captions = page.locator(".stages figcaption span:first-child").all_inner_texts()
    assert captions == [f"{NODE} of {TRAINED}", f"{NODE} of {RANDOM}"]
    page.get_by_role("button", name="Each its own scale").click()
    for title, values in zip((TRAINED, RANDOM), means, strict=True):
        looks(page, label("Heat-map", title), values)
    vectors = [one.reshape(len(one), -1) for one in both]
    dots = (vectors[0] * vectors[1]).sum(axis=0)
    cosine = dots / np.prod([np.linalg.norm(one, axis=0) for one in vectors], axis=0)
    size = both[0].shape[1:]
    assert numbers(page) == pytest.approx((linear_cka(*(rows(one, size) for one in both)), cosine.mean()), abs=6e-4)
    page.get_by_role("button", name="Agreement").click()
    looks(page, f"Agreement with {RANDOM} of {NODE} over chelsea.jpg", cosine.reshape(size))
    page.get_by_role("button", name="PCA").click()
    page.get_by_text("equal colours are alike in both. It means something for weights").wait_for()
    for title, values in zip((TRAINED, RANDOM), principal_colours(both), strict=True):
        looks(page, label("PCA", title), values)
    page.get_by_label("Compare with", exact=True).select_option("rocket")
    page.locator('.stage[aria-label$=" over rocket.jpg"]').wait_for()
    assert "w2" not in page.evaluate("location.hash")


@pytest.mark.exhaustive
def test_two_models(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=C4&v=pca")
    page.locator(TILES).or_(page.locator(".stage")).first.wait_for()
    page.get_by_label("Compare with", exact=True).select_option("model")
    field = page.get_by_label("Model to compare with")
    field.fill("squeezenet1_1")
    field.press("Enter")
    page.get_by_label("Weights to compare with").select_option("random")
    page.locator('.stage[aria-label="PCA of C4 of squeezenet1_1 random over chelsea.jpg"]').wait_for()
    first = asked(open_server, "resnet18", "C4", "random")[0]
    other = asked(open_server, "squeezenet1_1", "C4", "random")[0]
    size = min(first.shape[1], other.shape[1])
    assert len(first) != len(other)
    assert numbers(page) == pytest.approx((linear_cka(rows(first, size), rows(other, size)),), abs=6e-4)
    page.get_by_text("their colours cannot be compared").wait_for()
    page.get_by_role("button", name="Agreement").click()
    page.get_by_text("so no position has a cosine").wait_for()
    page.goto(f"{open_server.url}/#m=resnet18&n=layer3&v=mean&m2={VIT}&n2={BLOCK}")  # as a link has it
    tokens = asked(open_server, VIT, BLOCK, "random")[0, 1:].T.reshape(-1, 14, 14)
    means = [np.abs(one).mean(axis=0) for one in (first, tokens)]
    scale = min(map(np.min, means)), max(map(np.max, means))
    for title, values in zip((f"{'layer3'} of resnet18", f"{BLOCK} of {VIT}"), means, strict=True):
        looks(page, f"Heat-map of {title} random over chelsea.jpg", values, scale)
    assert numbers(page) == pytest.approx((linear_cka(rows(first, 14), rows(tokens, 14)),), abs=6e-4)
    page.get_by_label("Node to compare with").fill("blocks.3")
    page.get_by_label("Node to compare with").press("Enter")
    page.locator(f'.stage[aria-label="Heat-map of blocks.3 of {VIT} random over chelsea.jpg"]').wait_for()


@pytest.mark.exhaustive
def test_the_other_models_choices_stay_where_a_view_is_chosen_while_it_is_computed(open_server, visit):
    page = visit(open_server.url).page
    held = []
    page.route("**/models/squeezenet1_1/features*", lambda route: held.append(route), times=1)
    page.goto(f"{open_server.url}/#m=resnet18&n=C4&m2=squeezenet1_1")
    page.locator(".stage").wait_for()
    page.get_by_role("button", name="Heat-map").click()
    page.locator('.stage[aria-label^="Heat-map"]').wait_for()
    page.get_by_label("Weights to compare with").wait_for()
    held[0].continue_()
    page.locator('.stage[aria-label*=" of squeezenet1_1 "]').wait_for()
    page.get_by_label("Weights to compare with").wait_for()


@pytest.mark.exhaustive
def test_why_compares_a_class_by_number_only_where_that_means_the_same(open_server, visit):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.7&v=why&w2=random")
    page.locator('.stage[aria-label^="Evidence for "]').nth(
        1
    ).wait_for()  # 1000 classes each, of which one has the names
    page.route(
        "**/v1/models/efficientnet_lite0?categories=*",
        lambda route: route.fulfill(json=reversed_names(route.fetch().json())),
    )
    found = page.evaluate(
        """async () => {
          const { classAlike } = await import("/page/predictions.js")
          const { loadModel } = await import("/page/model.js")
          const load = (name, weights) => loadModel(name, weights, new AbortController().signal)
          const [trained, random] = [await load("squeezenet1_1"), await load("squeezenet1_1", "random")]
          const larger = await load("squeezenet1_1", "random")
          larger.nodes.findLast((node) => node.extractable).shape[1] = 21843  // as of weights for other classes
          const models = [random, larger, await load("resnet18", "random"), await load("efficientnet_lite0")]
          return Promise.all(models.flatMap((other) => [classAlike(trained, 9, other), classAlike(other, 9, trained)]))
        }"""
    )
    assert found == [9, 9, -1, -1, -1, -1, 990, 990]
    page.route("**/attributions?*at=features.6&*weights=random*", lambda route: route.abort())
    page.goto(f"{open_server.url}/#m=squeezenet1_1&n=features.6&v=why&w2=random&k=3")
    evidence = '.stage[aria-label="Evidence for tiger shark of features.6 over chelsea.jpg"]'
    page.locator(evidence).or_(page.locator(".failure")).wait_for()
    assert page.locator(".failure").count() == 0
    assert page.locator(".stages .note").inner_text() == "The server does not answer. Is it still running?"


def reversed_names(answer):
    for weights in answer["weights"].values():
        weights["category_names"] = weights["category_names"] and weights["category_names"][::-1]
    return answer


@pytest.mark.exhaustive
def test_two_models_with_equally_many_channels_have_no_colours_in_common(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=layer3&v=pca&m2=squeezenet1_1&w2=random&n2=features.7")
    page.get_by_text("their colours cannot be compared").wait_for()
    for model, node in (("resnet18", "layer3"), ("squeezenet1_1", "features.7")):
        maps = asked(open_server, model, node, "random")[0]
        assert len(maps) == 256
        label = f"PCA of {node} of {model} random over chelsea.jpg"
        looks(page, label, principal_colours([maps])[0])


@pytest.mark.exhaustive
def test_predictions_of_two_models_lie_side_by_side(open_server, visit):
    page = visit(open_server.url).go("m=efficientnet_lite0&n=C4&v=why&m2=squeezenet1_1")
    found = page.locator(".predictions")
    found.nth(1).wait_for()
    assert [" by squeezenet1_1 " in (one.get_attribute("aria-label") or "") for one in found.all()] == [False, True]
    boxes = [one.bounding_box() for one in found.all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.locator('.stage[aria-label^="Evidence for Egyptian cat of C4 of squeezenet1_1"]').wait_for()


@pytest.mark.exhaustive
def test_what_cannot_be_compared_with_is_said_beside_the_maps(open_server, visit):
    page = visit(open_server.url).go("m=resnet18&n=C4&v=mean&m2=nothing")
    page.locator(".failure", has_text="nothing").wait_for()
    page.locator('.stage[aria-label="Heat-map of C4 over chelsea.jpg"]').wait_for()
    page.get_by_label("Model to compare with").fill("r3d_18")
    page.get_by_label("Model to compare with").press("Enter")
    page.get_by_text("r3d_18 takes tensors, not photos.").wait_for()
    held = []
    page.route("**/models/swin_t/features?*", lambda route: held.append(route))
    page.get_by_label("Model to compare with").fill("swin_t")
    page.get_by_label("Model to compare with").press("Enter")
    page.get_by_text("Computing C4 of swin_t").wait_for()
    page.locator('.stage[aria-label="Heat-map of C4 over chelsea.jpg"]').wait_for()  # which does not wait for it
    page.get_by_label("Node to compare with").press_sequentially("C3")  # not chosen yet
    page.get_by_role("button", name="Expand all").evaluate("button => button.click()")  # which moves no focus
    until(page, "location.hash.includes('o=')")
    page.wait_for_timeout(200)
    assert page.evaluate("document.activeElement.value") == "C3"
    page.get_by_label("Node to compare with").fill("")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled.").wait_for()
    page.unroute("**/models/swin_t/features?*")
    page.get_by_role("button", name="Try again").click()
    page.locator('.stage[aria-label="Heat-map of C4 of swin_t random over chelsea.jpg"]').wait_for()
