"""Layers of torch.nn that are all of a model."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fxcore import create_extractor, trace

LAYERS = [
    (nn.BatchNorm2d(3), (torch.randn(2, 3, 4, 4),)),
    (nn.GRU(4, 5, batch_first=True), (torch.randn(2, 3, 4),)),
    (nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(2, 3, 8),) * 3),
    (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(2, 3, 8),)),
]


@pytest.mark.parametrize(("layer", "inputs"), LAYERS, ids=lambda value: type(value).__name__)
def test_a_layer_is_the_one_part_of_its_graph(layer, inputs):
    layer.eval()
    name = type(layer).__name__.lower()
    assert [node.target for node in trace(layer).graph.nodes if node.op == "call_module"] == [name]
    extractor = create_extractor(layer, [name], inputs)
    assert_close(extractor(*inputs)[name], layer(*inputs))


def test_the_mode_of_the_layer_stays():
    layer = nn.BatchNorm2d(3).train()
    extractor = create_extractor(layer, ["batchnorm2d"], torch.randn(2, 3, 4, 4))
    extractor(torch.randn(2, 3, 4, 4))
    assert layer.training
    assert layer.num_batches_tracked == 0


def test_layers_that_can_be_traced_are():
    nodes = [node.name for node in trace(nn.Linear(3, 4)).graph.nodes]
    assert "linear" in nodes
    assert nodes == [node.name for node in torch.fx.symbolic_trace(nn.Linear(3, 4)).graph.nodes]
