"""Strides of feature maps; those of levels are in test_levels.py."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxcore.graph.annotate import annotate
from fxcore.graph.model_graph import model_graph
from fxcore.graph.strides import Strides
from fxcore.models.catalog import get_model


def test_a_map_of_its_own_size_has_the_stride_of_its_input() -> None:
    """VGG pools to 7 x 7 positions whatever it is given."""
    graph = model_graph("vgg11")
    for size, stride in ((128, 16), (224, 32), (448, 64)):  # 18.3, 32 and 64 pixels a position
        other = graph.at(size, size)
        assert other.stride_of(other.by_name["avgpool"]) == stride


def test_the_stride_of_few_positions_counts_their_padding() -> None:
    layers = [torch.nn.Conv2d(3, 3, 3, stride=2, padding=1) for _ in range(5)]
    graph = fx.symbolic_trace(torch.nn.Sequential(*layers))
    annotate(graph.to("meta"), [(3, 65, 65)], torch.device("meta"))
    assert Strides((65, 65), {node.name: node for node in graph.graph.nodes}).of("_4") == 32


@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
def test_maps_larger_than_the_input_have_no_stride(size: tuple[int, int]) -> None:
    layers = [nn.Conv2d(3, 12, 3, padding=2), nn.PixelShuffle(2), nn.AvgPool2d(2)]
    graph = fx.symbolic_trace(nn.Sequential(*layers))
    annotate(graph.to("meta"), [(3, *size)], torch.device("meta"))
    strides = Strides(size, {node.name: node for node in graph.graph.nodes})
    assert [strides.of(name) for name in ("_0", "_1", "_2")] == [1, None, 1]


@pytest.mark.parametrize(
    ("name", "node"), [("vit_h_14", "conv_proj"), ("timm.convmixer_768_32", "stem.0"), ("resnet18", "conv1")]
)
def test_patches_have_the_stride_of_their_convolution(name: str, node: str) -> None:
    graph = model_graph(get_model(name))
    module = graph.traced_modules[node]
    assert isinstance(module, nn.Conv2d)
    assert (graph.stride_of(graph.by_name[node]),) * 2 == module.stride
    if name.startswith("timm"):
        other = graph.at(224, 294)
        assert other.stride_of(other.by_name[node]) == 7
