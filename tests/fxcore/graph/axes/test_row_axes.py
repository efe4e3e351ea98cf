"""The axes of values whose layout is unknown, by what writes and reads them."""

from __future__ import annotations

import copy

import pytest
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import StochasticDepth

from fxcore import model_graph
from fxcore.graph.axes.row_axes import output_layout, row_axes
from fxcore.graph.model_graph import ModelGraph
from tests.fxcore.conftest import OwnEntry
from tests.fxcore.model_list import entry_of


class Reads(nn.Module):
    """A map reshaped to windows, from there on with ``before``, ``layer`` and ``after``."""

    def __init__(self, shape: tuple[int, ...], before: nn.Module, layer: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.stem, self.before, self.layer, self.after = nn.Conv2d(3, 4, 2, 2), before, layer, after

    def forward(self, x: Tensor) -> Tensor:
        windows = self.stem(x).reshape(-1, *self.shape)
        return self.after(self.layer(self.before(windows))).sum()


def of(own_entry: OwnEntry, *args: object) -> ModelGraph:
    return model_graph(own_entry(lambda: Reads(*args)))  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [nn.Dropout(), nn.GELU(), nn.Identity(), StochasticDepth(0.1, "row")])
def test_elementwise_nodes_have_the_axes_of_a_linear_layer_beside_them(own_entry: OwnEntry, other: nn.Module) -> None:
    after = nn.Sequential(nn.SiLU(), copy.deepcopy(other))
    graph = of(own_entry, (2, 64, 8), nn.Sequential(other, nn.ReLU()), nn.Linear(8, 6), after)
    found = {name: row_axes(node) for name, node in graph.by_name.items()}
    for name in ("reshape", "before.0", "before.1", "layer", "after.0", "after.1"):
        assert found[name] == "N??C", name


@pytest.mark.parametrize(
    ("layer", "shape", "axes"),
    [
        (nn.Conv2d(8, 2, 1), (8, 4, 4), "NKC??"),
        (nn.Conv1d(8, 2, 1), (8, 16), "NKC?"),
        (nn.GroupNorm(2, 8), (8, 4, 4), "NKC??"),
        (nn.BatchNorm2d(1024), (1024, 1, 1), "NC??"),
        (nn.MaxPool2d(2), (8, 8, 16), "NC??"),
    ],
)
def test_what_a_layer_of_channels_first_reads_has_them_there(
    own_entry: OwnEntry, layer: nn.Module, shape: tuple[int, ...], axes: str
) -> None:
    graph = of(own_entry, shape, nn.Hardswish(), layer, nn.Identity())
    assert [row_axes(graph.by_name[name]) for name in ("reshape", "before")] == [axes, axes]


class Convolves(nn.Module):
    """Reads windows of its input as the weight of a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, x.reshape(-1, 3, 4, 4)).sum()


def test_a_weight_is_no_input(own_entry: OwnEntry) -> None:
    assert row_axes(model_graph(own_entry(Convolves)).by_name["reshape"]) == "NK???"


def test_tokens_of_attention_that_pools_its_queries() -> None:
    """Their layout is unknown until they are added to others."""
    graph = model_graph(entry_of("mvit_v2_s"))
    node = graph.by_name[graph.resolve(["blocks.1.attn"])["blocks.1.attn"]]
    assert node.meta["axes"] is None
    assert row_axes(node) == "NLC"


def test_the_layout_of_attention_weights_in_windows_names_the_heads_only() -> None:
    """64 windows with 2 heads, of 49 queries and 49 keys."""
    graph = model_graph(entry_of("maxvit_t"))
    node = graph.by_name["blocks.0.layers.0.layers.window_attention.attn_layer.1.softmax"]
    assert node.meta["value"].shape == (1, 64, 2, 49, 49)
    assert output_layout(node) == "N?C??"
