"""Passes by name, with parameters as JSON carries them."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from torch import fx
from torchvision.models import resnet18

from fxcore import trace
from fxcore.errors import FxError
from fxcore.transforms import (
    BadParameter,
    UnknownTransform,
    applied,
    apply_transforms,
    described,
    keep_float,
    list_transforms,
)
from tests.fxcore.model_list import filled


@pytest.fixture(scope="module")
def module() -> fx.GraphModule:
    model = resnet18().eval()
    return trace(model)


EXAMPLES: dict[str, dict[str, Any]] = {
    "replace_activation": {"old": "relu", "new": "silu"},
    "replace_module": {"old": "layer[34].*.bn?", "new": "identity"},
    "insert_after": {"node": "layer1.0.conv1", "function": "tanh"},
    "keep_float": {"nodes": ["layer1", "fc"]},
    "fold_normalization": {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
}


@pytest.mark.parametrize("name", [t.name for t in list_transforms()])
def test_each_runs_by_name_and_leaves_the_original(module: fx.GraphModule, name: str) -> None:
    x = torch.randn(1, 3, 32, 32)
    before, code = module(x), module.code
    wanted = json.loads(json.dumps({"name": name, **EXAMPLES.get(name, {})}))
    changed = apply_transforms(module, [wanted])
    assert changed is not module
    assert module.code == code
    assert torch.equal(module(x), before)
    assert changed(x).shape == before.shape
    assert applied(changed)[-1].name == name
    assert set(EXAMPLES.get(name, {})) <= set(applied(changed)[-1].parameters)
    exact = next(t for t in list_transforms() if t.name == name)
    if exact.exact and not exact.changes_input:
        assert torch.allclose(changed(x), before, atol=1e-4)


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
        ({"name": 3}, UnknownTransform),
        ({"name": "remove", "dropouts": True}, BadParameter),
        ({"name": "remove", "dropout": "yes"}, BadParameter),
        ({"name": "replace_activation", "old": "relu"}, BadParameter),
        ({"name": "replace_activation", "old": "relu", "new": "os.system"}, BadParameter),
        ({"name": "decompose", "operations": "relu"}, BadParameter),
        ({"name": "decompose", "operations": ["eval"]}, BadParameter),
        ({"name": "fold_normalization", "mean": ["a"], "std": [1]}, BadParameter),
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [t.name for t in list_transforms() if t.exact and not t.changes_input])
def test_with_every_node_tapped_every_value_stays(name: str) -> None:
    """Nothing is fused across a tapped node, and what is taken out hands on the value that it had."""
    model = filled("resnet18")
    pure = apply_transforms(trace(model), ["out_of_place"])
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(pure.graph, copies)
    graph.output({old.name: new for old, new in copies.items()})
    tapped = fx.GraphModule(pure, graph).eval()
    x = torch.randn(1, 3, 32, 32)
    changed = apply_transforms(tapped, [{"name": name, **EXAMPLES.get(name, {})}])
    before, after = tapped(x), changed(x)
    assert list(after) == list(before)
    for key, value in before.items():
        assert torch.allclose(after[key], value, rtol=1e-5), key


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
