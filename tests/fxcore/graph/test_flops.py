"""FLOPs are torch's, and counting them changes nothing for other threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils.flop_counter import FlopCounterMode

from fxcore import get_model, model_graph
from fxcore.graph.annotate import count_flops, values_at
from fxcore.graph.flops import FlopCounter


class Mixed(nn.Module):
    """Convolutions, a composite operator, products and fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.depthwise(self.stem(x)).flatten(2).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        fused = nn.functional.scaled_dot_product_attention(tokens, mixed, tokens)
        return torch.einsum("nlc,nmc->nlm", fused, mixed)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_flops_are_torchs(device: str, mode: type[torch.no_grad] | type[torch.inference_mode]) -> None:
    model, x = Mixed().eval().to(device), torch.rand(2, 3, 32, 32, device=device)
    with mode():
        with FlopCounterMode(display=False) as expected:
            model(x)
        with FlopCounter() as found:
            model(x)
    assert found.total == expected.get_total_flops() > 0


def test_modules_of_other_threads_are_not_hooked() -> None:
    with FlopCounter():
        assert not module._global_forward_hooks
        assert not module._global_forward_pre_hooks


@pytest.mark.parametrize("name", ["resnet18", pytest.param("vit_b_16", marks=pytest.mark.exhaustive)])
def test_a_graph_has_as_many_flops_for_its_shapes_alone(name: str) -> None:
    """Those of its nodes, whether they are run for their FLOPs or for their shapes, in inference mode."""
    graph, dtype = model_graph(name), get_model(name).dtype
    shapes = [(3, 224, 224)]
    each = count_flops(graph._module, shapes, graph.device, dtype)
    with FlopCounter() as counter:
        values_at(graph._module, shapes, graph.device, graph.by_name, dtype)
    assert counter.total == sum(each.values()) > 10**9
