"""C1…C5 and P2…, held against timm's feature_info and torchvision's own backbones (HAZARDS 17)."""

from __future__ import annotations

import pytest
import timm
import torch
from torchvision.models._utils import IntermediateLayerGetter

from fxcore import build_extractor, get_model, load_model, model_graph
from tests.fxcore.model_list import SWEPT, each

# torchvision name → timm name. Of members of a family that differ in depth or width alone, some. The `_tv` RegNets are
# timm's copies of torchvision's; its own have other widths.
COUNTERPARTS = {
    "resnet18": "resnet18",
    "regnet_x_400mf": "regnetx_004_tv",
    "regnet_y_800mf": "regnety_008_tv",
    "efficientnet_b0": "efficientnet_b0",
    "efficientnet_v2_s": "tf_efficientnetv2_s",
    "mobilenet_v2": "mobilenetv2_100",
    "mobilenet_v3_small": "mobilenetv3_small_100",
    "mnasnet1_0": "mnasnet_100",
    "densenet121": "densenet121",
    "vgg11": "vgg11",
    "inception_v3": "inception_v3",
    "swin_t": "swin_tiny_patch4_window7_224",
    "swin_v2_t": "swinv2_tiny_window8_256",
    "convnext_tiny": "convnext_tiny",
    "maxvit_t": "maxvit_tiny_tf_224",
}


@pytest.mark.parametrize("name", each(COUNTERPARTS, frozenset(("mobilenet_v3_small", "resnet18", "swin_t", "vgg11"))))
def test_channels_and_reductions_are_timms(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(COUNTERPARTS[name], pretrained=False, features_only=True)
    expected = {f["reduction"]: f["num_chs"] for f in model.feature_info.get_dicts() if f["reduction"] > 1}
    levels = model_graph(name).levels
    assert {level.stride: level.channels for level in levels.values()} == expected
    assert list(levels) == [f"C{stride.bit_length() - 1}" for stride in sorted(expected)]


STAGE_ENDS = {
    "resnet18": ["layer1.1.relu_1", "layer2.1.relu_1", "layer3.1.relu_1", "layer4.1.relu_1"],
    "resnet50": ["layer1.2.relu_2", "layer2.3.relu_2", "layer3.5.relu_2", "layer4.2.relu_2"],
    "swin_t": ["features.1.1.add_1", "features.3.1.add_1", "features.5.5.add_1", "features.7.1.add_1"],
    "convnext_tiny": ["features.1.2.add", "features.3.2.add", "features.5.8.add", "features.7.2.add"],
}


@pytest.mark.parametrize("name", STAGE_ENDS)
def test_levels_end_the_stages(name: str) -> None:
    graph = model_graph(name)
    resnet = name.startswith("resnet")
    expected = dict(zip(("C2", "C3", "C4", "C5"), STAGE_ENDS[name], strict=True))
    if resnet:
        expected = {"C1": "relu", **expected}
    assert {key: level.node for key, level in graph.levels.items()} == expected
    # A level, its stage's path and its node are three names for one thing.
    for i, node in enumerate(STAGE_ENDS[name]):
        path = f"layer{i + 1}" if resnet else f"features.{2 * i + 1}"
        assert graph.resolve([path, f"C{i + 2}", node]) == {path: node, f"C{i + 2}": node, node: node}


def test_values_are_those_of_torchvisions_layer_getter() -> None:
    """Detectors and segmenters take their maps with this getter; each level of ours is one of them."""
    x = torch.randn(2, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    cases = {
        "resnet18": {"relu": "C1", "layer1": "C2", "layer2": "C3", "layer3": "C4", "layer4": "C5"},
        # What torchvision's own detectors take of MobileNetV3: `mobilenet_backbone`'s stage ends.
        "mobilenet_v3_small": {"12": "C5"},
    }
    for name, wanted in cases.items():
        model = load_model(get_model(name), "random")
        body = model.features if name.startswith("mobilenet") else model
        with torch.no_grad():
            expected = IntermediateLayerGetter(body, wanted)(x)
            graph = model_graph(name)
            found = build_extractor(graph, model, graph.resolve(list(wanted.values()))).module(x)
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert torch.equal(found[key], value), (name, key)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fasterrcnn_mobilenet_v3_large_320_fpn", {"0": "P5", "pool": "P6"}),
        ("retinanet_resnet50_fpn_v2", {"0": "P3", "1": "P4", "2": "P5", "p6": "P6", "p7": "P7"}),
    ],
)
@pytest.mark.exhaustive
def test_pyramid_levels_are_the_backbones_outputs(name: str, keys: dict[str, str]) -> None:
    entry, graph = get_model(name), model_graph(name)
    model = load_model(entry, "random")
    x = torch.randn(1, 3, 128, 160, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.backbone(x)
        found = build_extractor(graph, model, graph.resolve(list(keys.values()))).module(x)
    for key, level in keys.items():
        assert torch.equal(found[level], expected[key]), level
        assert graph.levels[level].channels == expected[key].shape[1]
    assert {level for level in graph.levels if level[0] == "P"} == set(keys.values())


@pytest.mark.parametrize(
    "name", ["resnet18", "vgg11", *(pytest.param(n, marks=SWEPT) for n in ("mobilenet_v3_small", "inception_v3"))]
)
def test_levels_and_strides_are_the_models_at_any_size(name: str) -> None:
    """Maps of small inputs have few positions, and one of 65 pixels has 3 at stride 32: nearer to stride 16."""
    graph = model_graph(name)
    smallest = 76 if name == "inception_v3" else 33
    for size in ((smallest, smallest), (65, 65), (smallest, 224), (225, 97), (448, 448)):
        if min(size) >= smallest:
            other = graph.at(*size)
            assert other.levels == graph.levels
            for level in graph.levels.values():
                assert other.stride_of(other.by_name[level.node]) == level.stride, (size, level)
