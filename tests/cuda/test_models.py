"""Every model of torchvision's computes on CUDA what it computes on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torchvision.models.feature_extraction import get_graph_node_names

from fxcore import build_extractor, model_graph
from fxcore.backends import BACKENDS, Options
from fxcore.graph.model_graph import ModelGraph
from fxcore.graph.node_info import is_extractable
from tests.fxcore.model_list import ALL, FIXED_SIZE, SMALL, TRACEABLE, each, entry_of, filled

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

CUDA = torch.device("cuda", 0)
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RELATIVE, COSINE = 1e-3, 0.999


def spread(graph: ModelGraph) -> dict[str, str]:
    """A dozen nodes with floating values, from the first to the last."""
    floating = [
        name for name, node in graph.by_name.items() if is_extractable(node) and node.meta["value"].is_floating_point()
    ]
    return {name: name for name in [*floating[:: max(1, len(floating) // 12)], floating[-1]]}


def batch(graph: ModelGraph) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(2, *(size or 1 for size in x.shape[1:]), generator=generator) for x in graph.inputs)


def check(expected: dict[str, Tensor], found: dict[str, Tensor], precision: str) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].device == CUDA, name
        one, other = value.double().flatten(), found[name].cpu().double().flatten()
        assert torch.isfinite(other).all(), name
        if precision == "float32":
            assert (one - other).abs().max() <= RELATIVE * one.abs().max(), name
        else:
            assert torch.cosine_similarity(one, other, 0) > COSINE or not one.abs().max() > 1e-6, name


@pytest.mark.parametrize("name", each(ALL))
def test_values(name: str) -> None:
    graph = model_graph(entry_of(name))
    if not name.startswith(FIXED_SIZE) and graph.entry.task in SMALL:
        graph = graph.at(SMALL[graph.entry.task], SMALL[graph.entry.task])
    model = filled(name)
    nodes, inputs = spread(graph), batch(graph)
    with torch.inference_mode():
        expected = build_extractor(graph, copy.deepcopy(model), nodes).module(*inputs)
    for precision, dtype in PRECISIONS.items():
        moved = copy.deepcopy(model).to(CUDA, dtype)
        given = tuple(x.to(CUDA, dtype) for x in inputs)
        module = build_extractor(graph, moved, nodes, dtype).module
        for backend in ("eager", "cudagraphs"):
            lowered = BACKENDS[backend].lower(module, given, Options(precision))
            for _ in range(2):  # the second pass of CUDA graphs is a replay
                check(expected, lowered(*given), precision)


@pytest.mark.parametrize("name", each(TRACEABLE))
def test_names(name: str) -> None:
    """torchvision's, of the model on the device."""
    model = filled(name).to(CUDA)
    assert list(model_graph(entry_of(name)).eval_nodes) == get_graph_node_names(model)[1]
