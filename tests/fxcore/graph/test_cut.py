"""Parts of a model that begin at inner nodes: two halves are the whole."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

from fxcore.backends import BACKENDS, Options
from fxcore.errors import DuplicateKey
from fxcore.extractor import Extractor, build_extractor
from fxcore.graph.cut import OpenCut, UnneededInput
from fxcore.graph.model_graph import ModelGraph, model_graph
from fxcore.graph.model_part import ModelPart
from fxcore.graph.node_info import is_extractable
from fxcore.models.weights import load_model
from tests.fxcore.model_list import FIXED_SIZE, SMALL, each, entry_of, filled

ALWAYS = frozenset(("resnet18", "timm.test_vit"))
NAMES = [
    *("resnet18", "densenet121", "googlenet", "lraspp_mobilenet_v3_large", "mvit_v2_s", "quantized_shufflenet_v2_x0_5"),
    *("regnet_y_400mf", "swin_t", "swin3d_t", "vit_b_32", "timm.test_vit"),
    *("timm.cpubone_nano", "timm.dpn68", "timm.efficientvit_b0", "timm.gmlp_ti16_224"),
    *("timm.inception_next_atto", "timm.mobilenetv3_small_050", "timm.repghostnet_050", "timm.shvit_s1"),
    *("timm.test_byobnet", "timm.test_nfnet", "timm.visformer_tiny"),
]


def extractors(name: str) -> tuple[ModelGraph, nn.Module]:
    graph = model_graph(entry_of(name))
    drawn_fast = not name.startswith(("timm.", "quantized_"))
    return graph, filled(name) if drawn_fast else load_model(graph.entry, "random")


def images(graph: ModelGraph, rows: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.rand(rows, *(size or 1 for size in spec.shape[1:])) for spec in graph.inputs)


def closed(graph: ModelGraph, model: nn.Module, node: str, wanted: Mapping[str, str]) -> Extractor | None:
    """An extractor that begins at ``node`` and at what an open cut asks for."""
    begin = [node]
    for _ in range(4):
        try:
            return build_extractor(graph, model, wanted, inputs={name: name for name in begin})
        except OpenCut as error:
            begin += error.extra["missing"]
        except UnneededInput as error:
            begin.remove(error.extra["name"])
            if not begin:
                return None
    raise AssertionError("what is missing does not close the cut")


@pytest.mark.parametrize("name", each(NAMES, ALWAYS))
def test_two_halves_are_the_whole(name: str) -> None:
    graph, model = extractors(name)
    if not name.startswith((*FIXED_SIZE, "timm.")):
        graph = graph.at(*[SMALL.get(graph.entry.task, graph.input_size[0])] * 2)
    floating = [
        node
        for node, of in graph.by_name.items()
        if is_extractable(of) and (of.meta["value"].is_floating_point() or of.meta["value"].is_quantized)
    ]
    wanted = {"end": floating[-1]}
    given = images(graph)
    with torch.no_grad():
        whole = build_extractor(graph, model, wanted).module(*given)["end"]
        for node in random.Random(name).sample(floating[:-1], min(3, len(floating) - 1)):
            half = closed(graph, model, node, wanted)
            if half is not None:
                found = half.module(*half.inputs_from(given))["end"]
                assert torch.dist(found, whole) <= 1e-6 * whole.norm(), [spec.node for spec in half.inputs]


@pytest.mark.exhaustive
def test_a_lowered_half_ends_as_the_whole_does(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    graph, model = extractors("timm.test_vit")
    [begin], [end] = (graph.resolve([one]).values() for one in ("blocks.2", graph.eval_nodes[-1]))
    half = closed(graph, model, begin, {"end": end})
    assert half is not None
    given = images(graph, 3)
    with torch.no_grad():
        whole = build_extractor(graph, model, {"end": end}).module(*given)["end"]
        inner = half.inputs_from(given)
        lowered = BACKENDS["openvino"].lower(half.module, tuple(v[:2] for v in inner), Options(cache=tmp_path))
        found = lowered(*inner)["end"]
    assert torch.dist(found, whole) <= 1e-4 * whole.norm()


def test_the_first_half_may_be_torchvisions() -> None:
    graph, model = extractors("resnet18")
    front = create_feature_extractor(model, ["layer2"])
    with torch.no_grad():
        front.eval()
        model.eval()
        image = torch.rand(2, 3, 224, 224)
        half = build_extractor(graph, model, graph.resolve(["fc"]), inputs=graph.resolve(["layer2"]))
        torch.testing.assert_close(half.module(front(image)["layer2"])["fc"], model(image), rtol=0, atol=1e-6)


def test_a_cut_beside_a_shortcut_is_open_until_the_shortcut_is_given() -> None:
    graph, _ = extractors("resnet18")
    with pytest.raises(OpenCut, match=r"not only through layer3\.0\.bn1") as caught:
        ModelPart(graph, {"layer3.0.bn1": "layer3.0.bn1"}, {"C5": "layer4.1.relu_1"})
    [missing] = caught.value.extra["missing"]
    given = {name: name for name in ("layer3.0.bn1", missing)}
    assert [spec.node for spec in ModelPart(graph, given, {"C5": "layer4.1.relu_1"}).inputs] == list(given)


def test_an_output_before_the_cut_is_named() -> None:
    graph, _ = extractors("resnet18")
    with pytest.raises(OpenCut) as caught:
        ModelPart(graph, {"late": "layer3.1.relu_1"}, {"early": "layer1.1.relu_1", "end": "layer4.1.relu_1"})
    assert caught.value.extra["missing"] == ["layer1.1.relu_1"]


def test_an_input_behind_another_is_refused() -> None:
    graph, _ = extractors("resnet18")
    with pytest.raises(UnneededInput, match="'early' besides the other inputs; leave it out"):
        ModelPart(graph, {"early": "layer1.1.relu_1", "late": "layer3.1.relu_1"}, {"end": "fc"})


def test_an_input_is_named_once() -> None:
    graph, _ = extractors("resnet18")
    with pytest.raises(DuplicateKey, match=r"layer3\.1\.relu_1"):
        ModelPart(graph, {"a": "layer3.1.relu_1", "b": "layer3.1.relu_1"}, {"end": "fc"})


def test_a_map_of_another_size_is_taken_where_the_rest_takes_it() -> None:
    graph, model = extractors("resnet18")
    half = build_extractor(graph, model, graph.resolve(["C5", "fc"]), inputs=graph.resolve(["C3"]))
    assert half.inputs[0].shape == (None, 128, None, None)
    image = torch.rand(1, 3, 320, 256)
    with torch.no_grad():
        whole = build_extractor(graph, model, graph.resolve(["C3", "C5", "fc"])).module(image)
        found = half.module(whole["C3"])
    assert torch.equal(found["C5"], whole["C5"])
    assert torch.equal(found["fc"], whole["fc"])
    shape = tuple(whole["C3"].shape[1:])
    assert half.values_at([shape])["layer4.1.relu_1"][0] == [1, 512, 10, 8]


@pytest.mark.exhaustive
def test_shapes_of_a_part_whose_model_is_built_on_the_cpu() -> None:
    """Swin V2 computes its tables when it is built, so the traced module has tensors that are not on meta."""
    graph, model = extractors("timm.swinv2_tiny_window8_256")
    end = graph.resolve(["layers.3.blocks.0.attn"])
    half = build_extractor(graph, model, end, inputs=graph.resolve(["layers.3.downsample"]))
    shapes = [spec.usual for spec in half.inputs]
    with torch.no_grad():
        [value] = half.module(*(torch.rand(1, *shape) for shape in shapes)).values()
    assert half.values_at(shapes)[next(iter(end.values()))][0] == list(value.shape)


def test_a_size_of_the_image_makes_a_part_of_one_size() -> None:
    graph = model_graph("lraspp_mobilenet_v3_large")  # its result has the size of the image
    part = ModelPart(
        graph, graph.resolve(["backbone.16", "classifier.low_classifier"]), graph.resolve(graph.eval_nodes[-1:])
    )
    assert None not in part.inputs[0].shape[1:]


def test_the_number_of_images_is_that_of_the_given_values() -> None:
    graph, model = extractors("timm.test_vit")  # it repeats the class token once for each image
    half = build_extractor(graph, model, graph.resolve(["head"]), inputs=graph.resolve(["patch_embed.proj"]))
    (image,) = images(graph, 3)
    with torch.no_grad():
        model.eval()
        found = half.module(model.patch_embed.proj(image))["head"]
        torch.testing.assert_close(found, model(image), rtol=0, atol=1e-5)
