"""No family of models makes a tensor on another device than its input's: walked on CUDA without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxcore import build_extractor, get_model, model_graph
from tests.fxcore.model_list import OF_FAMILIES, each

CUDA = torch.device("cuda", 0)


def move(module: nn.Module) -> None:
    """Replace parameters and buffers by fake ones on CUDA, those that are shared once."""
    moved: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, value in tensors.items():
                if value is not None and value not in moved:
                    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
                    moved[value] = nn.Parameter(fake, False) if isinstance(value, nn.Parameter) else fake
                if value is not None:
                    tensors[name] = moved[value]


@pytest.mark.parametrize("name", each(OF_FAMILIES))
def test_every_node(name: str) -> None:
    graph = model_graph(name)
    nodes = {name: name for name, node in graph.by_name.items() if isinstance(node.meta.get("value"), Tensor)}
    module = build_extractor(graph, get_model(name).build_weightless().eval(), nodes).module
    with FakeTensorMode(), torch.no_grad():
        move(module)
        x = [torch.empty(2, *(size or 1 for size in spec.shape[1:]), device=CUDA) for spec in graph.inputs]
        values = module(*x)
    assert {key: value.device for key, value in values.items()} == dict.fromkeys(nodes, CUDA)
