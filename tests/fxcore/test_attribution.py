"""Attributions are those of captum and of pytorch-grad-cam."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients, LayerGradCam
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.image import scale_cam_image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn

from fxcore.attribution import BadTarget, gradcam, gradients, integration_points, positions
from fxcore.errors import BadTensor
from fxcore.extractor import Extractor, build_extractor
from fxcore.graph.model_graph import model_graph
from fxcore.graph.tokens.token_grid import TokenGrid
from fxcore.models.catalog import get_model
from fxcore.models.weights import load_model

CASES = {  # model: node, its result, the module that gives the node
    "resnet18": ("layer4", "fc", "layer4"),
    "swin_t": ("features.7", "head", "features.7"),
    "timm.test_vit": ("blocks.4", "head", "blocks.4"),
}


@cache
def model(name: str) -> nn.Module:
    return load_model(get_model(name), "random").eval()


def image(name: str) -> Tensor:
    [spec] = model_graph(name).inputs
    return torch.rand(2, *(size or 1 for size in spec.shape[1:]), generator=torch.Generator().manual_seed(0))


def back(name: str, node: str, result: str) -> Extractor:
    graph = model_graph(name)
    return build_extractor(graph, model(name), graph.resolve([result]), inputs=graph.resolve([node]))


def front(name: str, node: str) -> Extractor:
    graph = model_graph(name)
    return build_extractor(graph, model(name), graph.resolve([node]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_gradcam_are_captums_and_grad_cams(name: str) -> None:
    node, result, path = CASES[name]
    begin, x, target = front(name, node), image(name), 7
    [value] = begin.module(x).values()
    found = gradients(back(name, node, result).module, [value], 0, target)
    info = begin.outputs[0]
    cam = gradcam(positions(value, info.layout, info.tokens), positions(found.values, info.layout, info.tokens))

    seen: dict[str, Tensor] = {}
    layer = model(name).get_submodule(path)
    with layer.register_forward_hook(lambda _, __, output: seen.update(value=output)):
        score = model(name)(x.clone().requires_grad_())[:, target].sum()
        [expected] = torch.autograd.grad(score, seen["value"])
    torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-6)
    assert found.targets.tolist() == [target] * 2

    def to_map(output: Tensor) -> Tensor:
        return positions(output, info.layout, info.tokens)

    theirs = GradCAM(model(name), [layer], reshape_transform=None if info.layout == "NCHW" else to_map)
    size = (x.shape[3], x.shape[2])
    ours = scale_cam_image(scale_cam_image(cam.numpy(), size))  # as theirs are, once a layer and once for all
    np.testing.assert_allclose(ours, theirs(x.requires_grad_(), [ClassifierOutputTarget(target)] * 2), atol=1e-4)
    if info.layout == "NCHW":
        captums = LayerGradCam(model(name), layer).attribute(x, target, relu_attributions=True)
        torch.testing.assert_close(cam[:, None], captums, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_integrated_gradients_at_an_inner_node_are_captums_of_what_follows() -> None:
    """From zeros at that node: captum's LayerIntegratedGradients begin at what a black image gives there."""

    def follows(value: Tensor) -> Tensor:
        resnet: Any = model("resnet18")
        made: Tensor = resnet.fc(resnet.avgpool(resnet.layer4(value)).flatten(1))
        return made

    [value] = front("resnet18", "layer3").module(image("resnet18")).values()
    half, found = back("resnet18", "layer3", "fc").module, torch.zeros_like(value)
    for share, weight in integration_points(5):
        found += weight * gradients(half, [share * value], 0, torch.tensor([3, 8])).values
    expected = IntegratedGradients(follows).attribute(value, target=torch.tensor([3, 8]), n_steps=5)
    torch.testing.assert_close(found * value, expected.float(), rtol=1e-4, atol=1e-6)


def test_the_largest_result_is_found() -> None:
    x = image("resnet18")
    found = gradients(back("resnet18", "x", "fc").module, [x], 0)
    with torch.no_grad():
        assert found.targets.tolist() == model("resnet18")(x).argmax(1).tolist()


@pytest.mark.parametrize(("result", "target", "said"), [("fc", 1000, "from 0 to 999"), ("layer4", 0, "one vector")])
def test_what_has_no_such_result_is_refused(result: str, target: int, said: str) -> None:
    with pytest.raises(BadTarget, match=said):
        gradients(back("resnet18", "layer3", result).module, [torch.zeros(1, 256, 14, 14)], 0, target)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "tokens"])
def test_values_of_several_rows_per_image_have_no_positions(layout: str) -> None:
    """``[n, k, C, H, W]``, or tokens of windows."""
    grid = TokenGrid("patches", 3, 4, 0, False)
    with pytest.raises(BadTensor, match="gradcam needs a feature map"):
        positions(torch.rand(2, 5, 12, 3) if layout == "tokens" else torch.rand(2, 5, 8, 3, 4), layout, grid)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (torch.tensor([5000]), "from 0 to 4"),
        (np.int64(5), "from 0 to 4"),
        (2**63, "from 0 to 4"),
        (-(2**64), "from 0 to 4"),
        (torch.tensor([0, -1]), "from 0 to 4"),
        (torch.tensor([0.0, 1.0]), "from 0 to 4"),
        (torch.tensor([0, 1, 2]), "one index, or 2, not 3"),
    ],
)
def test_targets_that_do_not_exist_are_refused(target: Any, said: str) -> None:
    with pytest.raises(BadTarget, match=said):
        gradients(lambda x: {"y": x * 2}, [torch.zeros(2, 5)], 0, target)


@pytest.mark.parametrize("target", [np.int64(3), torch.tensor(3), torch.tensor([3, 3], dtype=torch.int32)])
def test_targets_may_be_any_integers(target: Any) -> None:
    found = gradients(lambda x: {"y": x * 2}, [torch.zeros(2, 5)], 0, target)
    assert found.targets.tolist() == [3, 3]
    assert found.values.tolist() == [[0, 0, 0, 2, 0]] * 2


@pytest.mark.parametrize("kept", [False, True])
def test_what_has_no_gradient_is_refused(kept: bool) -> None:
    """Integers cut it off, as quantized layers do; parameters behind them may have one nevertheless."""
    layer = nn.Linear(3, 2).requires_grad_(kept)
    with pytest.raises(BadTarget, match="no gradient of the result"):
        gradients(lambda x: {"y": layer(x.int().float())}, [torch.ones(1, 3)], 0)


def test_gradients_in_inference_mode() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    with torch.inference_mode():
        found = gradients(lambda x: {"y": x @ weight}, [torch.ones(1, 2)], 0, 0)
    assert torch.equal(found.values, weight[:, 0][None])


def test_parameters_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        layer = nn.Linear(3, 2)
    with pytest.raises(BadTensor, match=r"made in inference mode.*or copy it there"):
        gradients(lambda x: {"y": layer(x)}, [torch.ones(1, 3)], 0)
    made = copy.deepcopy(layer)
    assert torch.equal(gradients(lambda x: {"y": made(x)}, [torch.ones(1, 3)], 0, 1).values, layer.weight[1:])


def test_integers_have_no_gradients() -> None:
    with pytest.raises(BadTarget, match=r"int64 have no gradients"):
        gradients(lambda x: {"y": x.float()}, [torch.ones(1, 2, dtype=torch.int64)], 0, 0)
