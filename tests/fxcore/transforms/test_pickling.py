"""What passes make can be pickled: torch.fx writes the code, and traces it again where it is read."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

from fxcore.transforms import attention_maps, fold_normalization, fuse_conv_bn, out_of_place
from tests.fxcore.tracing import traced


class Beside(nn.Module):
    """Reads the images beside the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x) * x.mean()
        return out


def assigned(module: fx.GraphModule) -> fx.GraphModule:
    """With a row of what the convolution made overwritten."""
    conv = module.graph.find_nodes(op="call_module")[0]
    with module.graph.inserting_after(conv):
        module.graph.call_function(operator.setitem, (conv, 0, 0.5))
    module.recompile()
    return out_of_place(module)


def with_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Returning the weights too, so that they are not dropped."""
    opened = attention_maps(module)
    output = opened.graph.find_nodes(op="output")[0]
    weights = next(n for n in opened.graph.nodes if str(n.meta.get("path")).endswith("attention"))
    output.args = ((output.args[0], weights),)
    opened.recompile()
    return opened


CONVOLUTION = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))


@pytest.mark.parametrize(
    ("model", "edit"),
    [
        (CONVOLUTION, lambda module: module),
        (CONVOLUTION, fuse_conv_bn),
        (CONVOLUTION, fold_normalization),
        (Beside(), fold_normalization),
        (Beside(), assigned),
        (ShiftedWindowAttention(3, [4, 4], [0, 0], 1), with_attention),
    ],
    ids=["none", "fused", "padded", "normalized", "written", "attention"],
)
def test_a_pickled_module_computes_the_same(model: nn.Module, edit: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
    made = edit(traced(model))
    again = pickle.loads(pickle.dumps(made))
    x = torch.rand(2, 8, 8, 3) if isinstance(model, ShiftedWindowAttention) else torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(again(x), made(x), rtol=0, atol=0)
