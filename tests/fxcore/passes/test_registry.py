"""Passes by name, with parameters as JSON carries them, also over what torchvision's extractor returns."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, fx
from torchvision.models import resnet18
from torchvision.models.feature_extraction import create_feature_extractor

import fxcore
from fxcore import trace, transforms
from fxcore.errors import FxError
from fxcore.transforms import (
    BadParameter,
    Transform,
    UnknownTransform,
    applied,
    apply_transforms,
    described,
    keep_float,
    list_transforms,
)


@pytest.fixture(scope="module")
def module() -> fx.GraphModule:
    model = resnet18().eval()
    return trace(model)


def test_descriptions_are_json() -> None:
    listed = [described(t) for t in list_transforms()]
    assert json.loads(json.dumps(listed)) == listed
    assert all(d["description"].endswith(".") for d in listed)


def test_passes_are_remembered_in_order(module: fx.GraphModule) -> None:
    changed = apply_transforms(module, ["fuse_conv_bn", {"name": "remove", "identity": False}, "out_of_place"])
    assert [(a.name, a.changes) for a in applied(changed)] == [
        ("fuse_conv_bn", 20),
        ("remove", 0),
        ("out_of_place", 17),
    ]
    assert applied(changed)[1].parameters == {"dropout": True, "identity": False}
    assert applied(module) == ()


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ("fuse", UnknownTransform),
        ({"nam": "remove"}, UnknownTransform),
        ({"name": "remove", "dropouts": True}, BadParameter),
        ({"name": "remove", "dropout": "yes"}, BadParameter),
        ({"name": "replace_activation", "old": "relu"}, BadParameter),
        ({"name": "replace_activation", "old": "relu", "new": "os.system"}, BadParameter),
        ({"name": "decompose", "operations": ["eval"]}, BadParameter),
        ({"name": "fold_normalization", "mean": [True], "std": [1]}, BadParameter),
        ({"name": "insert_after", "node": 3, "function": "tanh"}, BadParameter),
        ({"name": "insert_after", "node": "nowhere", "function": "tanh"}, FxError),
    ],
)
def test_bad_requests_are_refused(module: fx.GraphModule, wanted: Any, error: type[FxError]) -> None:
    with pytest.raises(error) as caught:
        apply_transforms(module, [wanted])
    json.dumps(caught.value.extra)
    assert caught.value.detail


def test_suggestions(module: fx.GraphModule) -> None:
    with pytest.raises(UnknownTransform) as caught:
        apply_transforms(module, ["fuse_conv"])
    assert "fuse_conv_bn" in caught.value.extra["suggestions"]


def test_parameters_have_the_defaults_of_the_functions(module: fx.GraphModule) -> None:
    x = torch.rand(1, 3, 64, 64)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        expected = module((x - mean.view(3, 1, 1)) / std.view(3, 1, 1))
        torch.testing.assert_close(apply_transforms(module, ["fold_normalization"])(x), expected, rtol=1e-3, atol=1e-4)
    for transform in list_transforms():
        signature = inspect.signature(transform.run).parameters
        for name, schema in transform.parameters.items():
            default = signature[name].default
            assert ("default" in schema) == (default is not inspect.Parameter.empty), (transform.name, name)


@pytest.mark.parametrize(
    ("mean", "std", "wrong"), [([float("nan")] * 3, [1] * 3, "mean"), ([0] * 3, [1, 0, 1], "std"), ([], [1], "mean")]
)
def test_the_parameter_that_is_wrong_is_named(module: fx.GraphModule, mean: Any, std: Any, wrong: str) -> None:
    with pytest.raises(BadParameter) as caught:
        apply_transforms(module, [{"name": "fold_normalization", "mean": mean, "std": std}])
    assert caught.value.extra["parameter"] == wrong


def test_one_node_to_keep_in_float(module: fx.GraphModule) -> None:
    assert keep_float(module, nodes="layer1").meta["keep_float"] == ("layer1",)


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


EXAMPLES: dict[str, dict[str, Any]] = {
    "replace_activation": {"old": "relu", "new": "silu"},
    "replace_module": {"old": "layer[12].*.bn?", "new": "identity"},
    "insert_after": {"node": "layer1.0.conv1", "function": "tanh"},
    "keep_float": {"nodes": ["layer1", "conv1"]},
    "fold_normalization": {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
}


@pytest.mark.parametrize("one", list_transforms(), ids=lambda one: one.name)
def test_each_runs_by_name_and_leaves_the_original(
    extractor: fx.GraphModule, expected: dict[str, Tensor], one: Transform
) -> None:
    code, given = extractor.code, EXAMPLES.get(one.name, {})
    changed = apply_transforms(extractor, [json.loads(json.dumps({"name": one.name, **given}))])
    with torch.no_grad():
        found = changed(X)
        assert torch.equal(extractor(X)["late"], expected["late"])
    assert (extractor.code, extractor.training) == (code, False)
    assert applied(changed)[-1].name == one.name
    assert applied(changed)[-1].parameters.keys() >= given.keys()
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].shape == value.shape
        if one.exact and not one.changes_input:
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4)


TOOLS: dict[str, Callable[[fx.GraphModule], Any]] = {
    "create_extractor": lambda f: fxcore.create_extractor(f, {"layer2": "late"}, X)(X),
    "a node inside": lambda f: {"late": fxcore.create_extractor(f, ["layer2.1.relu_1"], X)(X)["layer2.1.relu_1"]},
    "split_at": lambda f: transforms.split_at(f, "layer1.1.relu_1")(X),
    "Transformer": lambda f: fxcore.Transformer(f).transform()(X),
}


@pytest.mark.parametrize("name", list(TOOLS))
def test_tools_give_the_values_of_torchvisions_extractor(
    extractor: fx.GraphModule, expected: dict[str, Tensor], name: str
) -> None:
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
