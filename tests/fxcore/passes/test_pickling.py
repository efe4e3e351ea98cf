"""What passes make can be pickled, and is the same where it is read."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

from fxcore import build_extractor, get_model, load_model, model_graph, trace
from fxcore.tracing.names import MODULE, public_name
from fxcore.transforms import applied, attention_maps, fold_normalization, fuse_conv_bn, out_of_place, remove
from tests.e2e.forked import script
from tests.fxcore.capture import traced


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
    assert table(again) == table(made)
    assert applied(again) == applied(made)
    assert again.state_dict().keys() == made.state_dict().keys()
    assert not any(part.training for part in again.modules())


def table(module: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Names, operations and arguments of all nodes."""
    return [
        (n.name, public_name(n), n.op, n.target, str(n.args), str(n.kwargs), n.meta.get(MODULE))
        for n in module.graph.nodes
    ]


def whole(x: Tensor) -> Tensor:
    return x * 2 + 1


def function(x: Tensor, mode: str = "max") -> dict[str, Tensor]:
    pooled = F.max_pool2d(whole(x)[:, ::2], kernel_size=[2, 2])
    return {mode: torch.ops.aten.add.Tensor(pooled, 1), "sizes": pooled * x.shape[0]}


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_functions_kept_whole_stay_so(protocol: int) -> None:
    made = trace(function, leaf_functions=(whole,), concrete_args={"mode": "max"})
    again = pickle.loads(pickle.dumps(made, protocol))
    assert table(again) == table(made)
    assert whole in [n.target for n in again.graph.nodes]
    x = torch.rand(2, 4, 4, 4)
    torch.testing.assert_close(again(x), made(x), rtol=0, atol=0)
    assert again.code == made.code
    assert table(remove(again)) == table(made)


@pytest.mark.exhaustive
def test_an_extractor_is_read_in_another_process(tmp_path: Path) -> None:
    graph = model_graph("resnet18")
    made = build_extractor(graph, load_model(get_model("resnet18"), "random"), graph.resolve({"C2": "c2"})).module
    torch.save(fuse_conv_bn(made), tmp_path / "module.pt")
    program = (
        "import sys, torch; from fxcore.transforms import applied; from fxcore.tracing.names import names\n"
        "module = torch.load(sys.argv[1], weights_only=False)\n"
        "print(names(module.graph)[-1], applied(module)[-1].name, float(module(torch.ones(1, 3, 64, 64))['c2'].sum()))"
    )
    assert script(program, tmp_path, str(tmp_path / "module.pt")).wait(300) == 0, (tmp_path / "stderr").read_text()
    node, name, total = (tmp_path / "stdout").read_text().split()
    assert (node, name) == (graph.levels["C2"].node, "fuse_conv_bn")
    with torch.no_grad():
        assert float(total) == pytest.approx(float(made(torch.ones(1, 3, 64, 64))["c2"].sum()), rel=1e-3)
