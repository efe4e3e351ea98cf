"""Transformers keep names: torch.fx's own does not."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxcore import Transformer, trace
from fxcore.tracing.names import PATH
from fxcore.transforms import applied, fuse_conv_bn
from tests.fxcore.model_list import filled, small_input


def names(module: fx.GraphModule) -> list[tuple[str, Any, Any]]:
    return [(n.name, n.target, n.meta.get(PATH)) for n in module.graph.nodes]


@pytest.mark.parametrize("name", ["resnet18", "vit_b_32", "swin3d_t"])
def test_a_transformer_that_changes_nothing_keeps_names_meta_and_values(name: str) -> None:
    module = fuse_conv_bn(trace(filled(name, shrink=True)))
    for node in module.graph.nodes:
        node.meta["mine"] = node.name
    before = names(module)
    made = Transformer(module).transform()
    assert names(made) == names(module) == before
    assert [n.meta["mine"] for n in made.graph.nodes if n.op != "output"] == [b[0] for b in before[:-1]]
    assert applied(made) == applied(module)
    assert {k: id(v) for k, v in made.state_dict(keep_vars=True).items()} == {
        k: id(v) for k, v in module.state_dict(keep_vars=True).items()
    }
    assert not any(m.training for m in made.modules())
    x = small_input(name)
    with torch.no_grad():
        torch.testing.assert_close(made(x.clone()), module(x.clone()), rtol=0, atol=0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.GELU()

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        y = torch.relu(self.first(torch.relu(self.first(x))))
        return {"a": self.act(y) * scale, "b": y}


class ReluIsTwoNodes(Transformer):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.relu:
            (x,) = args
            return x * (x > 0)
        return super().call_function(target, args, kwargs)


def test_what_a_method_makes_has_the_name_of_its_node() -> None:
    module = trace(Net().eval())
    made = ReluIsTwoNodes(module).transform()
    assert [(n.name, n.meta[PATH]) for n in made.graph.nodes if n.op.startswith("call_")] == [
        ("first", "first"),
        ("gt", "relu.gt"),
        ("relu", "relu"),
        ("first_1", "first_1"),
        ("gt_1", "relu_1.gt_1"),
        ("relu_1", "relu_1"),
        ("act", "act"),
        ("mul", "mul"),
    ]
    assert {n.name for n in module.graph.nodes} <= {n.name for n in made.graph.nodes}
    made.graph.lint()
    x = torch.randn(3, 4)
    torch.testing.assert_close(made(x), module(x), rtol=0, atol=0)
    torch.testing.assert_close(made(x, 3.0), module(x, 3.0), rtol=0, atol=0)


def test_a_node_that_is_left_out_leaves_the_others_names() -> None:
    class WithoutActivation(Transformer):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            return args[0] if target == "act" else super().call_module(target, args, kwargs)

    module = trace(Net().eval())
    made = WithoutActivation(module).transform()
    assert [n.name for n in made.graph.nodes] == [n.name for n in module.graph.nodes if n.name != "act"]


def test_tensors_that_a_method_brings_are_not_given_to_the_original() -> None:
    class Shifted(Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().call_function(target, args, kwargs) + torch.ones(4)

    module = trace(Net().eval())
    before = set(vars(module)) | set(module.state_dict())
    made = Shifted(module).transform()
    assert set(vars(module)) | set(module.state_dict()) == before
    x = torch.randn(2, 4)
    relu = torch.relu
    expected = relu(module.first(relu(module.first(x)) + 1)) + 1
    torch.testing.assert_close(made(x)["b"], expected)
    assert all(PATH in n.meta for n in made.graph.nodes if n.op.startswith("call_"))


def test_a_module_that_has_two_names_keeps_both() -> None:
    module = trace(Net().eval())
    module.add_module("second", module.first)
    module.graph.find_nodes(op="call_module", target="first")[1].target = "second"
    module.recompile()
    made = Transformer(module).transform()
    assert [n.target for n in made.graph.nodes if n.op == "call_module"] == ["first", "second", "act"]
    assert made.first is made.second is module.first


def test_names_are_kept_on_pickling() -> None:
    made = ReluIsTwoNodes(trace(Net().eval())).transform()
    again = pickle.loads(pickle.dumps(made))
    assert names(again) == names(made)
    x = torch.randn(3, 4)
    torch.testing.assert_close(again(x), made(x), rtol=0, atol=0)
