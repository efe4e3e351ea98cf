"""Models of one's own: values of any type, finite or not, inputs that are no photos, and outputs that are no scores."""

import os

import numpy as np
import pytest
import safetensors.numpy

from tests.e2e.page.seen import TILES, asked, eventually, run_curl, run_python, shown_channels
from tests.e2e.page.test_pictures import pictured_soon

MODULE = """
import torch
from torch import nn

def built(kind):
    torch.manual_seed(0)
    return kind().eval()

class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=8)

    def forward(self, x):
        x = self.conv(x)
        short = (10 * x).to(torch.int16)
        long = (10 * x).long()
        root = torch.sqrt(x)
        never = x * float("nan")
        none = x[:, :0]
        return sum(torch.nan_to_num(one).float().sum((1, 2, 3)) for one in (short, long, root, never, none))

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, image, depth):
        return (self.one(image) + self.other(depth)).mean((2, 3))

class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=8)

    def forward(self, x):
        return self.conv(x).mean((2, 3)) * float("nan")

def nothing():
    return built(Nothing)

class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, stride=8)

    def forward(self, x):
        return self.conv(x).mean((2, 3))

def four():
    return built(Four)

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 16, stride=16)
        self.conv.weight.data *= 1e7

    def forward(self, x):
        return self.conv(x).mean((2, 3))

def large():
    return built(Large)

def values():
    return built(Values)

def two():
    return built(Two)
"""
MODELS = """
[models.values]
builder = "own_for_the_page:values"
[models.nothing]
builder = "own_for_the_page:nothing"
[models.four]
builder = "own_for_the_page:four"
[models.large]
builder = "own_for_the_page:large"
[models.two]
builder = "own_for_the_page:two"
"""
ROOT, NEVER, NONE, SHORT, LONG = "sqrt", "mul_2", "getitem", "to", "long"


@pytest.fixture(scope="module")
def own_server(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_for_the_page.py").write_text(MODULE)
    (folder / "models.toml").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        return start(models_dir=folder)


def numbers(page, title):
    """The statistics under that title."""
    section = page.locator(f"section[aria-label='{title}']")
    return dict(zip(section.locator("dt").all_inner_texts(), section.locator("dd").all_inner_texts(), strict=True))


@pytest.mark.exhaustive
def test_channels_are_in_order_of_their_finite_values(own_server, visit):
    page = visit(own_server.url).go(f"m=values&n={ROOT}")
    maps = asked(own_server, "values", ROOT, "DEFAULT")[0]
    assert np.isnan(maps).any(axis=(1, 2)).sum() > 4
    variation = np.nanstd(maps, axis=(1, 2))
    assert shown_channels(page) == np.argsort(-variation).tolist()
    assert "constant" not in page.locator(".body").first.inner_text()
    page.get_by_label("Order").select_option("strength")
    strongest = np.argsort(-np.nanmean(np.abs(maps), axis=(1, 2))).tolist()

    def check():
        assert shown_channels(page) == strongest

    eventually(page, check)
    page.goto(f"{own_server.url}/#m=values&n={NEVER}")
    page.locator(".colour-bar", has_text="no finite value").wait_for()


@pytest.mark.exhaustive
@pytest.mark.parametrize("node", [SHORT, LONG])
def test_integers_are_shown_with_the_bytes_that_they_take(own_server, visit, node):
    page = visit(own_server.url).go(f"m=values&n={node}")
    page.wait_for_selector(TILES)
    values = asked(own_server, "values", node, "DEFAULT")
    assert values.dtype == {SHORT: np.int16, LONG: np.int64}[node]
    said = numbers(page, "All values")
    assert (float(said["Minimum"]), float(said["Maximum"])) == (values.min(), values.max())
    assert float(said["Mean"]) == pytest.approx(values.mean(), rel=1e-3)
    assert f"; {values.nbytes / 1e3:#.3g} kB" in page.locator(".request").inner_text()


@pytest.mark.exhaustive
def test_values_beyond_those_of_float16_are_pictures_too(own_server, visit):
    assert np.abs(asked(own_server, "large", "conv", "DEFAULT")).max() > np.finfo(np.float16).max
    page = visit(own_server.url).go("m=large&n=conv&i=none")
    page.locator(".stage").wait_for()
    page.get_by_role("button", name="Fit").click()
    page.get_by_label("Pictures").select_option("mean")
    pictured_soon(page, own_server, "conv", "large", "DEFAULT")


@pytest.mark.exhaustive
def test_what_cannot_be_shown_has_a_request_of_its_own(own_server, visit):
    page = visit(own_server.url).go("m=resnet18&w=random&n=C3")
    page.wait_for_selector(TILES)
    page.goto(f"{own_server.url}/#m=values&n={NONE}")
    page.get_by_text("is not a map over the image").wait_for()
    assert f"nodes={NONE}" in page.locator(".request code").inner_text()
    assert numbers(page, "All values")["Zeros"] == "0.0 %"
    page.goto(f"{own_server.url}/#m=values&n=conv&v=why")  # its output is one number, no scores of classes
    page.wait_for_selector(TILES)
    assert page.get_by_role("button", name="Why", exact=True).count() == 0
    page.goto(f"{own_server.url}/#m=resnet18&w=random&n=C3&v=why&k=99999")
    page.get_by_role("alert").wait_for()
    assert "/models/resnet18/features?nodes=C3" in page.locator(".request code").inner_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["two", "four", "r3d_18"])
def test_the_request_for_a_model_that_takes_tensors_works_as_it_stands(own_server, visit, tmp_path, model):
    inputs = own_server.http.get(f"/v1/models/{model}").json()["inputs"]
    sent = {one["name"]: np.ones([1, *one["shape"][1:]], np.float32) for one in inputs}
    node, weights = {"two": ("one", "builder"), "four": ("conv", "builder"), "r3d_18": ("stem", "random")}[model]
    page = visit(own_server.url).go(f"m={model}&n={node}")
    page.get_by_text("takes tensors").wait_for()
    if len(sent) > 1:
        safetensors.numpy.save_file(sent, tmp_path / "tensors.safetensors")
    else:
        np.save(tmp_path / "tensors.npy", *sent.values())
    wanted = own_server.http.post(
        f"/v1/models/{model}/features",
        params={"nodes": node, "weights": weights},
        content=safetensors.numpy.save(sent),
        headers={"accept": "application/x-safetensors", "content-type": "application/x-safetensors"},
    )
    values = safetensors.numpy.load(wanted.content)[node]
    run_curl(page.locator(".request code").inner_text(), tmp_path)
    np.testing.assert_allclose(safetensors.numpy.load_file(tmp_path / f"{node}.safetensors")[node], values, atol=1e-5)
    page.get_by_role("button", name="Python").click()
    assert run_python(page.locator(".request code").inner_text(), tmp_path) == f"{node} {values.shape} float32\n"


@pytest.mark.exhaustive
def test_channels_and_positions_of_a_link_are_whole_numbers(own_server, visit):
    page = visit(own_server.url).go("m=values&n=conv&ch=1.5&at=1.5,2&v=channels")
    page.locator('.stage[aria-label="Channel 1 of conv over chelsea.jpg"]').wait_for()
    assert page.get_by_text("Position 1.5").count() == 0
    page.goto(f"{own_server.url}/#m=values&n=conv&ch=-5")
    page.locator('.stage[aria-label="Channel 0 of conv over chelsea.jpg"]').wait_for()


@pytest.mark.exhaustive
def test_scores_that_are_no_numbers_explain_no_class(own_server, visit):
    page = visit(own_server.url).go("m=nothing&n=conv&v=why")
    page.get_by_text("The scores of chelsea.jpg are not numbers").wait_for()
    assert page.get_by_role("alert").count() == 0
    assert "/models/nothing/features?nodes=conv" in page.locator(".request code").inner_text()
