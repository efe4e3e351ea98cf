"""From what a client writes to one node of the graph, or to a refusal that helps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from fxcore import build_extractor, get_model, load_model, model_graph
from fxcore.errors import DuplicateKey, UnknownNode
from fxcore.graph.model_graph import trace_graph
from tests.fxcore.conftest import OwnEntry
from tests.fxcore.written import Of


def test_an_exact_name_comes_before_a_path() -> None:
    """`features.0` of a VGG is a node; `layer1` of a ResNet is a path and means the last node under it."""
    assert model_graph("vgg11").resolve(["features.0"]) == {"features.0": "features.0"}
    graph = model_graph("resnet18")
    assert graph.resolve({"layer1": "a", "layer1.0": "b", "relu": "c"}) == {
        "a": "layer1.1.relu_1",
        "b": "layer1.0.relu_1",
        "c": "relu",
    }


def test_each_name_is_a_key_in_the_order_of_the_asking() -> None:
    """HAZARDS 8: not the order of execution. A node may have several names."""
    resolved = model_graph("resnet18").resolve(["layer4", "C5", "layer4.1.relu_1", "x"])
    last = "layer4.1.relu_1"
    assert list(resolved.items()) == [("layer4", last), ("C5", last), (last, last), ("x", "x")]


@pytest.mark.parametrize("asked", [{"layer3": "a", "layer4": "a"}, ["layer4", "layer4"]])
def test_duplicate_keys_are_refused(asked: dict[str, str] | list[str]) -> None:
    """HAZARDS 3: torchvision returns one tensor for the two."""
    with pytest.raises(DuplicateKey) as caught:
        model_graph("resnet18").resolve(asked)
    assert caught.value.extra == {"key": "a" if isinstance(asked, dict) else "layer4"}


@pytest.mark.parametrize(
    "name", ["layer.", "layer4(", "layer4.+", "layer[34]", "layer", "lay", "", ".", "layer4.", "relu_"]
)
def test_names_are_no_patterns(name: str) -> None:
    """HAZARDS 2: torchvision takes `layer.` and returns nothing, and dies of `layer4(`."""
    with pytest.raises(UnknownNode) as caught:
        model_graph("resnet18").resolve([name])
    assert caught.value.extra["name"] == name
    assert repr(name) in caught.value.detail


@pytest.mark.parametrize("name", ["(a+)+$" * 20_000, "layer4." * 20_000, "(" * 100_000, "\x00\n\udc80" * 1000])
def test_no_name_burns_time(name: str) -> None:
    """HAZARDS 2: a crafted name must not keep a processor busy."""
    graph = model_graph("densenet121")
    started = time.thread_time()
    with pytest.raises(UnknownNode):
        graph.resolve([name])
    assert time.thread_time() - started < 5


@pytest.mark.parametrize(
    ("model", "name", "meant"),
    [
        ("resnet18", "layer4.1.relu1", "layer4.1.relu"),
        ("resnet18", "Layer3", "layer3"),
        ("resnet18", "c4", "C4"),
        ("resnet50", "layer4.2.conv33", "layer4.2.conv3"),
        ("vit_b_32", "encoder.layers.encoder_layer_0.mlp_0", "encoder.layers.encoder_layer_0.mlp"),
    ],
)
def test_a_typo_gets_suggestions(model: str, name: str, meant: str) -> None:
    with pytest.raises(UnknownNode) as caught:
        model_graph(model).resolve([name])
    assert meant in caught.value.extra["suggestions"]
    assert meant in caught.value.detail


def test_suggestions_go_by_target_too() -> None:
    """HAZARDS 9: in ViT the module `ln_1` is the node `ln`, and the node `ln_1` is the module `ln_2`."""
    graph = model_graph("vit_b_32")
    block = "encoder.layers.encoder_layer_0"
    info = {n.name: n for n in graph.nodes}
    assert info[f"{block}.ln"].target == f"{block}.ln_1"
    assert info[f"{block}.ln_1"].target == f"{block}.ln_2"
    with pytest.raises(UnknownNode) as caught:
        graph.resolve([f"{block}.ln_2"])
    assert caught.value.extra["suggestions"][0] == f"{block}.ln_1"


def test_suggestions_go_by_target_where_the_name_is_quite_another(own_entry: OwnEntry) -> None:
    numbered = Of(lambda m, x: m.c_123456789(x), c_123456789=nn.Conv2d(3, 3, 1))
    graph = trace_graph(own_entry(lambda: numbered))
    assert graph.eval_nodes == ["x", "c"]
    with pytest.raises(UnknownNode) as caught:
        graph.resolve(["c_123456789"])
    assert caught.value.extra["suggestions"] == ["c"]


def test_every_suggestion_can_be_asked_for() -> None:
    for model, name in (
        ("resnet18", "layer5"),
        ("swin_t", "features.9"),
        ("vit_b_32", "encoder.layer"),
    ):
        graph = model_graph(model)
        with pytest.raises(UnknownNode) as caught:
            graph.resolve([name])
        for suggestion in caught.value.extra["suggestions"]:
            graph.resolve([suggestion])


def test_nodes_that_are_no_tensors_are_refused_by_name() -> None:
    """HAZARDS 10: sizes, comparisons, assertions, tuples and attributes are nodes too."""
    refused = {
        "vit_b_32": [
            "getattr",
            "eq",
            "_assert",
            "floordiv",
            "getitem",
            "encoder.layers.encoder_layer_0.self_attention",
        ],
        "shufflenet_v2_x0_5": ["stage2.1.chunk", "stage2.0.size"],
        "swin_t": ["features.1.0.attn.relative_position_bias_table"],
    }
    for model, names in refused.items():
        graph = model_graph(model)
        extractable = {n.name: n.extractable for n in graph.nodes}
        for name in names:
            if name not in graph.by_name:
                name = next(n for n in graph.by_name if n.endswith(name.rsplit(".", 1)[-1]) and not extractable[n])
            assert extractable[name] is False
            with pytest.raises(UnknownNode) as caught:
                graph.resolve([name])
            assert repr(name) in caught.value.detail
            assert caught.value.extra["name"] == name
            near = caught.value.extra["suggestions"]
            assert near
            graph.resolve(near)


def test_what_is_marked_extractable_is_a_tensor_with_a_row_per_image() -> None:
    """HAZARDS 10, from the other side: every node that is not refused comes out."""
    graph = model_graph("shufflenet_v2_x0_5")
    names = [n.name for n in graph.nodes if n.extractable]
    model = load_model(get_model("shufflenet_v2_x0_5"), "random")
    with torch.no_grad():
        values = build_extractor(graph, model, graph.resolve(names)).module(torch.zeros(3, 3, 64, 64))
    assert list(values) == names
    assert all(isinstance(v, torch.Tensor) and v.shape[0] == 3 for v in values.values())


def test_no_names_at_all() -> None:
    with pytest.raises(UnknownNode, match="at least one") as caught:
        model_graph("resnet18").resolve([])
    assert caught.value.extra["suggestions"]


@pytest.mark.parametrize(
    ("model", "name", "part"),
    [
        ("fasterrcnn_mobilenet_v3_large_320_fpn", "roi_heads.box_head.fc6", "roi_heads"),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", "transform", "transform"),
        ("raft_small", "update_block.flow_head.conv1", "update_block"),
    ],
)
def test_untraceable_parts_say_why(model: str, name: str, part: str) -> None:
    """HAZARDS 12: detectors and RAFT cannot be traced whole."""
    graph = model_graph(model)
    reason = next(c.reason for c in graph.untraceable if c.path == part)
    with pytest.raises(UnknownNode) as caught:
        graph.resolve([name])
    assert part in caught.value.detail
    assert reason in caught.value.detail
    assert len(reason) > 20
    graph.resolve(caught.value.extra["suggestions"])


def test_a_star_is_each_component_in_order() -> None:
    graph = model_graph("vit_b_32")
    layers = [f"encoder.layers.encoder_layer_{i}" for i in range(12)]
    assert list(graph.resolve(["encoder.layers.*"])) == layers
    assert graph.resolve(["encoder.layers.*"]) == graph.resolve(layers)
    assert graph.resolve(["encoder.*.encoder_layer_3.mlp", "heads"]) == graph.resolve(
        ["encoder.layers.encoder_layer_3.mlp", "heads"]
    )


@pytest.mark.parametrize(
    ("names", "said", "suggestions"),
    [
        (["encoder.layer.*"], r"no path of vit_b_32 matches 'encoder\.layer\.\*'", ["encoder.*"]),
        (["encoder.layers.encoder_*"], "each \\* stands for one component", ["encoder.layers.*"]),
        ({"encoder.*": "e"}, "give a list of names without keys", ["encoder.add"]),
    ],
)
def test_a_group_that_stands_for_nothing_is_refused(names: Any, said: str, suggestions: list[str]) -> None:
    with pytest.raises(UnknownNode, match=said) as caught:
        model_graph("vit_b_32").resolve(names)
    assert caught.value.extra["suggestions"][: len(suggestions)] == suggestions
