"""Strides of feature maps; those of levels are in test_levels.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from fxcore import model_graph
from fxcore.graph.annotate import annotate
from fxcore.graph.model_graph import trace_graph
from fxcore.graph.strides import Strides
from fxcore.models.user_models import UserModel, user_entry


def test_a_map_of_its_own_size_has_the_stride_of_its_input() -> None:
    """VGG pools to 7 x 7 positions whatever it is given."""
    graph = model_graph("vgg11")
    for size, stride in ((128, 16), (224, 32), (448, 64)):  # 18.3, 32 and 64 pixels a position
        other = graph.at(size, size)
        assert other.stride_of(other.by_name["avgpool"]) == stride


def strides(size: tuple[int, int], *layers: nn.Module) -> Strides:
    """Of ``layers`` one after another; their nodes are ``_0``, ``_1``, …"""
    module = fx.symbolic_trace(nn.Sequential(*layers))
    annotate(module.to("meta"), [(3, *size)], torch.device("meta"))
    return Strides(size, {node.name: node for node in module.graph.nodes})


def test_the_stride_of_few_positions_counts_their_padding() -> None:
    assert strides((65, 65), *(nn.Conv2d(3, 3, 3, stride=2, padding=1) for _ in range(5))).of("_4") == 32


@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
def test_maps_larger_than_the_input_have_no_stride(size: tuple[int, int]) -> None:
    found = strides(size, nn.Conv2d(3, 12, 3, padding=2), nn.PixelShuffle(2), nn.AvgPool2d(2))
    assert [found.of(name) for name in ("_0", "_1", "_2")] == [1, None, 1]


@pytest.mark.parametrize(("patch", "size"), [(7, (224, 224)), (7, (224, 294)), (14, (518, 518)), (32, (224, 224))])
def test_patches_have_the_stride_of_their_convolution(patch: int, size: tuple[int, int]) -> None:
    assert strides(size, nn.Conv2d(3, 8, patch, patch)).of("_0") == patch


class Padded(nn.Module):
    """Pads images to a multiple of 64 on the right and below, as U-Nets do, and halves them six times."""

    def __init__(self) -> None:
        super().__init__()
        self.halve = nn.ModuleList(nn.Conv2d(3, 3, 3, stride=2, padding=1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, -x.shape[3] % 64, 0, -x.shape[2] % 64))
        for halve in self.halve:
            x = halve(x)
        return x


@pytest.mark.parametrize(("usual", "size"), [(256, 65), (256, 130), (256, 200), (256, 250), (200, 200), (200, 130)])
def test_maps_of_padded_inputs_have_the_strides_of_their_convolutions(usual: int, size: int) -> None:
    entry = user_entry("padded", UserModel(Padded, preprocessing={"crop_size": usual, "resize_size": usual}))
    graph = trace_graph(entry).at(size, size)
    assert [graph.stride_of(graph.by_name[f"halve.{i}"]) for i in range(6)] == [2, 4, 8, 16, 32, 64]
