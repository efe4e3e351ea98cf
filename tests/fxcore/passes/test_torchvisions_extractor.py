"""What torchvision's ``create_feature_extractor`` returns goes through every pass and tool."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, fx
from torchvision.models.feature_extraction import create_feature_extractor

import fxcore
from fxcore import transforms
from fxcore.transforms import apply_transforms, list_transforms

X = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def extractor() -> fx.GraphModule:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=5).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(part.running_var, 0.5, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: fx.GraphModule = create_feature_extractor(model, {"layer1": "early", "layer2": "late"})
    return made.eval()


@pytest.fixture(scope="module")
def expected(extractor: fx.GraphModule) -> dict[str, Tensor]:
    with torch.no_grad():
        found: dict[str, Tensor] = extractor(X)
    return found


EXACT = [t.name for t in list_transforms() if t.exact and not t.changes_input]


@pytest.mark.parametrize("name", EXACT)
def test_every_pass_that_keeps_the_values_does(
    extractor: fx.GraphModule, expected: dict[str, Tensor], name: str
) -> None:
    required = {"keep_float": {"nodes": ["layer1.0"]}}.get(name)
    steps = [{"name": name, **required}] if required else [name]
    with torch.no_grad():
        found = apply_transforms(extractor, steps)(X)
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4)
    assert not extractor.training
    with torch.no_grad():
        assert torch.equal(extractor(X)["late"], expected["late"])


TOOLS: dict[str, Callable[[fx.GraphModule], Any]] = {
    "create_extractor": lambda f: fxcore.create_extractor(f, {"layer2": "late"}, X)(X),
    "a node inside": lambda f: {"late": fxcore.create_extractor(f, ["layer2.1.relu_1"], X)(X)["layer2.1.relu_1"]},
    "split_at": lambda f: transforms.split_at(f, "layer1.1.relu_1")(X),
    "Transformer": lambda f: fxcore.Transformer(f).transform()(X),
}


@pytest.mark.parametrize("name", list(TOOLS))
def test_tools_give_its_values(extractor: fx.GraphModule, expected: dict[str, Tensor], name: str) -> None:
    with torch.no_grad():
        assert torch.equal(TOOLS[name](extractor)["late"], expected["late"])


def test_tools_that_describe(extractor: fx.GraphModule, expected: dict[str, Tensor]) -> None:
    assert fxcore.verify(extractor, extractor, X)
    assert fxcore.profile(extractor, X)
    assert "layer2" in fxcore.render(extractor, "table")
    quantized = fxcore.quantize(extractor, [X])
    error = (quantized.module(X)["late"] - expected["late"]).norm() / expected["late"].norm()
    assert error < 0.1
    assert "layer1.0.conv1" in {layer.name for layer in quantized.layers}
