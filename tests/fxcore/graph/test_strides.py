"""Strides of feature maps; those of levels are in test_levels.py."""

from __future__ import annotations

import torch
from torch import fx

from fxcore.graph.annotate import annotate
from fxcore.graph.model_graph import model_graph
from fxcore.graph.strides import Strides


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
