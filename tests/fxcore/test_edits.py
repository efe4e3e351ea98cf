"""Edits of inner values equal forward hooks of the model's own modules that do the same."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxcore.backends import BACKENDS, Options
from fxcore.edits import BadEdit, Edit, PlannedFactors, edited_node, stacked
from fxcore.extractor import Extractor, build_extractor
from fxcore.graph.model_graph import ModelGraph, model_graph
from fxcore.graph.node_info import is_extractable
from fxcore.models.entry import ModelEntry
from fxcore.models.weights import load_model
from tests.fxcore.model_list import FIXED_SIZE, SMALL, each, entry_of, filled, small_swin

MODELS = [
    *("convnext_tiny", "efficientnet_b0", "googlenet", "lraspp_mobilenet_v3_large", "mc3_18", "mvit_v2_s", "resnet18"),
    *("shufflenet_v2_x0_5", "swin_t", "vit_b_32", "timm.test_vit"),
]
ALWAYS = frozenset(("resnet18", "timm.test_vit"))


@functools.lru_cache(1)
def built(name: str) -> tuple[ModelGraph, nn.Module]:
    graph = model_graph(entry_of(name))
    if not name.startswith((*FIXED_SIZE, "timm.")):
        graph = graph.at(*[SMALL.get(graph.entry.task, graph.input_size[0])] * 2)
    torch.manual_seed(0)
    return graph, load_model(graph.entry, "random").eval() if name.startswith("timm.") else filled(name)


def images(graph: ModelGraph, rows: int) -> Tensor:
    torch.manual_seed(0)
    return torch.rand(rows, *(size or 1 for size in graph.inputs[0].shape[1:]))


def once_called(graph: ModelGraph) -> list[str]:
    """Names of nodes with floating values, of modules that are called once, which a hook can edit, but for those inside
    attention, whose axes are unknown."""
    calls = Counter(node.target for node in graph.graph.nodes if node.op == "call_module")
    found = []
    for name, node in graph.by_name.items():
        single = node.op == "call_module" and calls[node.target] == 1 and is_extractable(node)
        known = not name.endswith(("attn.q_norm", "attn.k_norm"))
        if single and known and node.meta["value"].is_floating_point() and node.meta["rows"] == 1:
            found.append(name)
    return found


def channels_of(graph: ModelGraph, name: str) -> int:
    node = graph.by_name[name]
    value, axes = node.meta["value"], node.meta.get("axes")
    if axes and len(axes) == value.ndim:
        return axes.index("C")
    return value.ndim - (3 if name.endswith(("softmax", "attn_drop")) else 1)


def hooked(model: nn.Module, graph: ModelGraph, edits: Sequence[Edit], x: Tensor) -> Tensor:
    """What ``model`` returns with forward hooks that do ``edits``: of images, and of channels or everything."""
    handles = []
    for edit in edits:
        node = graph.by_name[edit.node]

        def change(module: nn.Module, given: Any, value: Tensor, edit: Edit = edit) -> Tensor:
            value = value.clone()
            part = value.movedim(channels_of(graph, edit.node), 1)
            for row in range(len(value)) if edit.images is None else edit.images:
                for channel in range(part.shape[1]) if edit.channels is None else edit.channels:
                    part[row, channel] = part[row, channel] * edit.scale + edit.shift
            return value

        handles.append(model.get_submodule(str(node.target)).register_forward_hook(change))
    try:
        with torch.no_grad():
            result = model(x)
    finally:
        for handle in handles:
            handle.remove()
    while not isinstance(result, Tensor):
        result = result["out"] if isinstance(result, dict) else result[0]
    return result


@pytest.mark.parametrize("name", each(MODELS, ALWAYS))
def test_equal_to_forward_hooks(name: str) -> None:
    graph, model = built(name)
    x = images(graph, 3)
    end = list(graph.by_name)[-1]
    if hasattr(model, "heads"):  # which torchvision makes of zeros
        nn.init.normal_(model.heads.head.weight)
    randomly = random.Random(name)
    nodes = [node for node in once_called(graph) if node != end]
    with torch.no_grad():
        plain = build_extractor(graph, model, {"end": end}).module(x)["end"]
    compared = 0
    for node in randomly.sample(nodes, min(4, len(nodes))):
        other = randomly.choice(nodes)
        assert edited_node(node, graph.by_name[node], graph.input_size).channel_dim == channels_of(graph, node), node
        channels = graph.by_name[node].meta["value"].shape[channels_of(graph, node)]
        some = randomly.sample(range(channels), channels // 2 + 1)
        edits = [
            Edit(node, channels=some, scale=0, shift=1.5, images=[1]),
            Edit(other, scale=-0.5, images=[1, 2]),
            Edit(node, scale=2.0, shift=-0.25, images=[2]),
        ]
        try:
            edited = build_extractor(graph, model, {"end": end}, edits={name: name for name in {node, other}})
        except BadEdit:  # of a branch that the result does not depend on
            continue
        with torch.no_grad():
            found = edited.module(x, *edited.factors(edits, x))["end"]
        expected = hooked(model, graph, edits, x)
        assert torch.dist(found, expected) <= 1e-5 * expected.norm(), (node, other)
        assert torch.dist(found[0], plain[0]) <= 1e-6 * plain[0].norm()
        compared += not torch.equal(found[1:], plain[1:])
    assert compared


def resnet(*edits: str, wanted: Sequence[str] = ("layer2", "fc")) -> tuple[Extractor, nn.Module]:
    graph, model = built("resnet18")
    return build_extractor(graph, model, graph.resolve(list(wanted)), edits=graph.resolve(list(edits))), model


def test_the_returned_value_is_the_edited_one_and_what_reads_it_follows() -> None:
    extractor, model = resnet("C3")
    x = images(extractor.graph, 2)
    with torch.no_grad():
        plain = resnet("C3", wanted=["layer2"])[0].module(x, torch.ones(()), torch.zeros(()))["layer2"]
        found = extractor.module(x, *extractor.factors([Edit("C3", box=[1, 2, 3, 6], channels=[5], scale=3.0)], x))
        expected = plain.clone()
        expected[:, 5, 2:6, 1:3] *= 3.0
        assert torch.equal(found["layer2"], expected)
        after = model.layer4(model.layer3(expected))
        torch.testing.assert_close(found["fc"], model.fc(model.avgpool(after).flatten(1)), rtol=0, atol=1e-6)


def test_edits_of_a_node_follow_each_other() -> None:
    extractor, _ = resnet("layer2", wanted=["layer2"])
    x = images(extractor.graph, 3)
    with torch.no_grad():
        plain = extractor.module(x, *extractor.factors([], x))["layer2"]
        edits = [
            Edit("layer2", scale=[2.0, -1.0], shift=[0.5, 1.0], channels=[3, 1]),
            Edit("layer2", shift=1.0, images=[2]),
            Edit("layer2.1.relu_1", scale=10.0, channels=[1]),
        ]
        found = extractor.module(x, *extractor.factors(edits, x))["layer2"]
    expected = plain.clone()
    expected[:, 3] = plain[:, 3] * 2 + 0.5
    expected[:, 1] = -plain[:, 1] + 1
    expected[2] += 1
    expected[:, 1] *= 10
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("node", ["blocks.0", "blocks.2.attn"])
def test_tokens_and_boxes_of_their_grid(node: str) -> None:
    graph, model = built("timm.test_vit")
    wanted = graph.resolve({node: "block"})
    extractor = build_extractor(graph, model, wanted, edits=graph.resolve([node]))
    x = images(graph, 1)
    with torch.no_grad():
        plain = extractor.module(x, *extractor.factors([], x))["block"]
        prefix = extractor.outputs[0].prefix.count
        side = extractor.outputs[0].tokens.width  # type: ignore[union-attr]
        edits = [Edit(node, tokens=[0], scale=0, shift=7.0), Edit(node, box=[1, 2, 3, 3], scale=2.0)]
        found = extractor.module(x, *extractor.factors(edits, x))["block"]
    expected = plain.clone()
    expected[:, 0] = 7.0
    first = prefix + 2 * side + 1
    expected[:, first : first + 2] *= 2
    assert prefix == 1
    assert torch.equal(found, expected)


@pytest.fixture
def swin(own_entry: Callable[[Callable[[], nn.Module]], ModelEntry]) -> tuple[ModelGraph, nn.Module]:
    return model_graph(own_entry(small_swin)), small_swin()


@pytest.mark.parametrize("end", ["softmax", "attn_drop"])
def test_the_channels_of_attention_weights_are_the_heads(swin: tuple[ModelGraph, nn.Module], end: str) -> None:
    graph, model = swin
    node, attention = f"layers.0.blocks.1.attn.{end}", model.get_submodule("layers.0.blocks.1.attn")
    extractor = build_extractor(graph, model, {"end": "head.fc"}, edits={node: node})
    x = images(graph, 2)
    with pytest.raises(BadEdit, match=f"no channel 2 in {node}: it has 2"):
        extractor.factors([Edit(node, channels=[2])], x)
    with pytest.raises(BadEdit, match="no tokens"):
        extractor.factors([Edit(node, tokens=[0])], x)
    with torch.no_grad():
        plain = model(x)
        found = extractor.module(x, *extractor.factors([Edit(node, channels=[1], scale=0)], x))["end"]
        attention.proj.weight[:, 4:] = 0  # what that head writes
        torch.testing.assert_close(found, model(x), rtol=0, atol=1e-6)
    assert torch.dist(found, plain) > 1e-3 * plain.norm()


@pytest.mark.parametrize("steps", [False, True])
def test_attention_weights_that_the_model_does_not_read_are_refused(
    steps: bool, swin: tuple[ModelGraph, nn.Module]
) -> None:
    graph, model = swin if steps else built("timm.test_vit")
    graph = graph.with_nodes_of("attention_maps")
    node = next(node for node in graph.by_name if node.endswith(".attention"))
    with pytest.raises(BadEdit, match=f"attention_maps added '{node}', and the model does not read it"):
        build_extractor(graph, model, {"weights": node}, edits={node: node})


@pytest.mark.parametrize("node", ["layers.0.blocks.0.attn.proj", "layers.0.blocks.0.attn.proj_drop"])
def test_windows_of_an_image_have_its_factors(swin: tuple[ModelGraph, nn.Module], node: str) -> None:
    graph, model = swin
    assert graph.by_name[node].meta["rows"] == 4
    extractor = build_extractor(graph, model, {"end": "head.fc"}, edits={node: node})
    x = images(graph, 2)

    def change(module: nn.Module, given: Any, value: Tensor) -> Tensor:
        windows = value.unflatten(0, (2, -1)).clone()
        windows[1, ..., 4] = 0.5
        return windows.flatten(0, 1)

    with torch.no_grad():
        edit = Edit(node, channels=[4], scale=0, shift=0.5, images=[1])
        found = extractor.module(x, *extractor.factors([edit], x))["end"]
        plain = model(x)
        handle = model.get_submodule(node).register_forward_hook(change)
        expected = model(x)
        handle.remove()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not torch.equal(expected[1], plain[1])
    assert torch.equal(expected[0], plain[0])


def test_names_that_are_no_identifiers() -> None:
    graph, model = built("regnet_y_400mf")
    node = next(name for name in graph.by_name if "-" in name)
    extractor = build_extractor(graph, model, {"value": node}, edits={node: node})
    x = images(graph, 1)
    with torch.no_grad():
        assert not extractor.module(x, *extractor.factors([Edit(node, scale=0)], x))["value"].any()


def test_a_node_that_an_extractor_begins_at() -> None:
    graph, model = built("resnet18")
    begin = graph.resolve(["layer2"])
    half = build_extractor(graph, model, graph.resolve(["layer3"]), inputs=begin, edits=begin)
    value = torch.rand(2, 128, 8, 8)
    with torch.no_grad():
        found = half.module(value, *half.factors([Edit("layer2", channels=[7], scale=0)], value))["layer3"]
        value[:, 7] = 0
        torch.testing.assert_close(found, model.layer3(value), rtol=0, atol=1e-6)


@pytest.mark.parametrize("node", ["x", "conv1", "layer1.0.add"])
def test_eager_backends_fold_around_edits(node: str) -> None:
    extractor, _ = resnet(node, wanted=[node, "fc"])
    x = images(extractor.graph, 2)
    factors = extractor.factors([Edit(node, channels=[0, 2], scale=-2, shift=0.5)], x)
    with torch.no_grad():
        expected = extractor.module(x, *factors)
        found = BACKENDS["eager"].lower(extractor.module, (x, *factors), Options())(x, *factors)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-4)


def test_factors_of_several_requests_are_one_batch() -> None:
    [node] = resnet("layer1")[0].edited
    dims = [1, 64, 4, 5]
    channel = PlannedFactors(node, [Edit("layer1", channels=[1], scale=0)], 2, dims).make()
    box = PlannedFactors(node, [Edit("layer1", box=[0, 1, 2, 3], shift=3.0, images=[0])], 3, dims)
    assert channel.scales.shape == (1, 64, 1, 1)
    made = box.make()
    assert made.scales.shape == (2, 64, 4, 5)
    assert box.bytes == made.scales.nbytes + made.shifts.nbytes
    scale = stacked([channel.of(slice(1, 2))[0], made.of(slice(0, 3))[0]])
    shift = stacked([channel.of(slice(1, 2))[1], made.of(slice(0, 3))[1]])
    assert scale.shape == shift.shape == (4, 64, 4, 5)
    assert scale[0].unique(dim=0).shape[0] == 2
    assert bool((scale[1:] == 1).all())
    assert bool((shift[1, :, 1:3, :2] == 3).all())
    assert float(shift.sum()) == 64 * 4 * 3.0


@pytest.fixture(scope="module")
def both() -> Extractor:
    return resnet("layer2", "fc")[0]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (Edit("layer2", channels=[128]), "no channel 128 in layer2: it has 128"),
        (Edit("layer2", channels=[True]), "no channel True"),
        (Edit("layer2", channels=[]), "names no channel"),
        (Edit("layer2", channels=[1, 1]), "names channel 1 of layer2 twice"),
        (Edit("layer2", tokens=[0]), "has no tokens but 128 x 8 x 8; select channels or a box, or scale or"),
        (Edit("layer2", box=[0, 0, 9, 1]), "x1 < x2 <= 8"),
        (Edit("layer2", box=[3, 0, 3, 1]), "x1 < x2 <= 8"),
        (Edit("fc", box=[0, 0, 1, 1]), "'fc' is neither a map nor tokens on a grid, but 1000; select channels, or"),
        (Edit("layer2", images=[2]), "no image 2 in the request: it has 2"),
        (Edit("layer2", scale=float("nan")), "scale nan is not a finite float32 number"),
        (Edit("layer2", shift=1e39), "not a finite float32 number"),
        (Edit("layer2", scale=[1.0, 2.0], channels=[1]), "has 2 numbers for 1 channels"),
        (Edit("layer2", scale=[1.0, 2.0]), "has 2 numbers for 128 channels"),
        (Edit("layer3"), "edits layer2, fc, but not 'layer3'"),
    ],
)
def test_selectors_that_do_not_exist_are_refused(edit: Edit, said: str, both: Extractor) -> None:
    extractor = both
    with pytest.raises(BadEdit, match=said) as caught:
        extractor.factors([Edit("layer2"), edit], images(extractor.graph, 2))
    assert caught.value.extra["edit"] == 1
    assert str(caught.value).startswith("edit 1: ")


def test_nodes_that_cannot_be_edited_are_refused() -> None:
    graph, model = built("resnet18")
    with pytest.raises(BadEdit, match=r"depends on 'layer3.1.relu_1'"):
        build_extractor(graph, model, graph.resolve(["layer2"]), edits=graph.resolve(["layer3"]))
    begin = graph.resolve(["layer2"])
    with pytest.raises(BadEdit, match=r"'layer1.1.relu_1' lies before the inputs; edit an input"):
        build_extractor(graph, model, graph.resolve(["layer4"]), inputs=begin, edits=graph.resolve(["layer1"]))
    with pytest.raises(BadEdit, match=r"no requested node depends on 'fc'"):
        build_extractor(graph, model, graph.resolve(["layer4"]), inputs=begin, edits=graph.resolve(["fc"]))
    quantized = model_graph("quantized_shufflenet_v2_x0_5", "IMAGENET1K_FBGEMM_V1")
    with pytest.raises(BadEdit, match="are quantized"):
        edited_node("stage2", quantized.by_name[quantized.resolve(["stage2"])["stage2"]], (224, 224))


@pytest.mark.parametrize("node", ["blocks.2.attn.transpose", "blocks.0.attn.reshape"])
def test_axes_of_an_unknown_layout_are_not_guessed(node: str) -> None:
    graph, model = built("timm.test_vit")
    extractor = build_extractor(graph, model, {"end": node}, edits={node: node})
    x = images(graph, 1)
    for selected in ({"channels": [0]}, {"tokens": [0]}, {"box": [0, 0, 1, 1]}):
        with pytest.raises(BadEdit, match="scale or shift the whole value"):
            extractor.factors([Edit(node, **selected)], x)
    with torch.no_grad():
        assert not extractor.module(x, *extractor.factors([Edit(node, scale=0)], x))["end"].any()


def test_what_is_known_of_windows_is_advised(swin: tuple[ModelGraph, nn.Module]) -> None:
    graph, model = swin
    node = "layers.0.blocks.0.attn.proj"
    extractor = build_extractor(graph, model, {"end": node}, edits={node: node})
    for selected, axis in (({"tokens": [0]}, "axis has tokens"), ({"box": [0, 0, 1, 1]}, "axes a box is on")):
        said = f"unknown which {axis} in '{node}', which is 4 x 16 x 8; select channels, or scale or shift the whole"
        with pytest.raises(BadEdit, match=said):
            extractor.factors([Edit(node, **selected)], images(graph, 1))


def test_factors_of_doubles_are_doubles() -> None:
    [node] = resnet("layer1")[0].edited
    edits = [Edit("layer1", scale=0.1), Edit("layer1", channels=[1], shift=[1e300])]
    made = PlannedFactors(node, edits, 1, [1, 64, 4, 5], dtype=torch.float64).make()
    assert made.scales.unique().tolist() == [0.1]
    assert made.shifts.unique().tolist() == [0, 1e300]
