"""Plain functions and layers of torch.nn traced as models are, and what is traced left as it is."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.testing import assert_close

from fxcore import create_extractor, trace
from fxcore.errors import NotTraceable
from fxcore.tracing.names import names
from fxcore.tracing.trace_arguments import UnknownArgument

SHIFT = torch.arange(3.0)


def halved(x: Tensor) -> Tensor:
    return x / 2


@fx.wrap
def doubled(x: Tensor) -> Tensor:
    return x + x


def repeated(x: Tensor, times: int = 1, negative: bool = False, *, shift: float = 0.0) -> Tensor:
    for _ in range(times):
        x = halved(x)
    return shift + (-x if negative else x)


def positive(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def test_a_function_is_a_module_that_runs() -> None:
    def function(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sum": x + y * SHIFT, "half": halved(x)}

    module = trace(function)
    x, y = torch.rand(2, 3), torch.rand(2, 3)
    torch.testing.assert_close(module(x, y), {"sum": x + y * SHIFT, "half": x / 2}, rtol=0, atol=0)
    assert names(module.graph) == ["x", "y", "mul", "add", "truediv"]
    assert not module.training
    assert type(module).__name__ == "function"


def test_the_advice_for_a_function_can_be_followed() -> None:
    """Both errors advise an argument that :func:`trace` takes for functions too."""
    with pytest.raises(NotTraceable, match="concrete_args") as counted:
        trace(repeated)
    assert "__init__" not in counted.value.detail
    with pytest.raises(NotTraceable, match="concrete_args"):
        trace(positive)
    module = trace(repeated, concrete_args={"times": 3, "negative": True})
    assert torch.equal(module(torch.tensor(8.0), shift=1.0), torch.tensor(0.0))
    assert names(module.graph) == ["x", "shift", "truediv", "truediv_1", "truediv_2", "neg", "add"]
    with pytest.raises(UnknownArgument, match="repeated takes x, times, negative, shift, but not 'time'"):
        trace(repeated, concrete_args={"time": 3})


def test_a_function_that_torch_fx_wraps_is_kept_whole_itself() -> None:
    for leaf_functions in ((), (doubled,)):
        graph = trace(lambda x: doubled(halved(x)), leaf_functions=leaf_functions).graph
        assert [n.target for n in graph.nodes if n.op == "call_function"] == [operator.truediv, doubled]


def test_functions_that_a_function_calls_are_kept_whole() -> None:
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    def outer(x: Tensor) -> Tensor:
        return tripled(halved(positive(x)))

    module = trace(outer, leaf_functions=(positive, tripled, halved))
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [positive, halved, tripled]
    assert torch.equal(module(torch.tensor(-2.0)), torch.tensor(3.0))
    assert names(trace(lambda x: x * len(x), leaf_functions=(len,)).graph) == ["x", "len", "mul"]
    nameless = eval("lambda x: x * 5", {})
    with pytest.raises(NotTraceable, match="cannot be written as code"):
        trace(lambda x: nameless(x), leaf_functions=(nameless,))
    with pytest.raises(UnknownArgument, match="outer has no module 'layer1'"):
        trace(outer, leaf_modules=("layer1",))


@pytest.mark.parametrize(
    ("root", "advice"),
    [
        (torch.relu, "write a function or a lambda that calls it"),
        (functools.partial(repeated, times=2), "concrete_args"),
        (nn.Linear(2, 2).forward, "pass the module itself"),
        (nn.ReLU, "pass an instance"),
        (torch.ones(2), "write a function"),
    ],
    ids=["builtin", "partial", "method", "class", "tensor"],
)
def test_what_is_neither_module_nor_function(root: Any, advice: str) -> None:
    with pytest.raises(NotTraceable, match="neither a module nor a Python function") as caught:
        trace(root)
    assert advice in caught.value.detail


@pytest.mark.parametrize("held", [nn.Linear(2, 2), nn.Parameter(torch.ones(2))], ids=["module", "parameter"])
def test_a_function_that_holds_a_part_of_a_model(held: Any) -> None:
    apply: Callable[..., Any] = operator.call if isinstance(held, nn.Module) else torch.mul

    def function(x: Tensor) -> Any:
        return apply(held, x)

    with pytest.raises(NotTraceable, match=r"trace an nn\.Module that has it as an attribute"):
        trace(function)


class Mixed(nn.Module):
    """A norm in eval mode within a model in train mode, a tensor that is no buffer, and one computed from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.9)
        self.scale = nn.Parameter(torch.ones(3)) * 2  # not a leaf: copy.deepcopy refuses it
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.drop(self.norm(self.conv(x))) * self.scale.view(3, 1, 1) - self.mean.view(3, 1, 1)
        return made


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_module_is_left_as_it_is(mode: bool, training: bool) -> None:
    model = Mixed().train(mode)
    model.norm.eval()
    modes = {name: part.training for name, part in model.named_modules()}
    attributes, state = dict(vars(model)), {name: value.clone() for name, value in model.state_dict().items()}
    module = trace(model, training=training)
    assert {name: part.training for name, part in model.named_modules()} == modes
    assert vars(model).keys() == attributes.keys()
    assert all(vars(model)[key] is value for key, value in attributes.items())
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert all(part.training == training for part in module.modules())
    assert module.get_parameter("conv.weight") is model.conv.weight
    assert module.get_buffer("norm.running_mean") is model.norm.running_mean
    if not training:
        x = torch.rand(2, 3, 4, 4)
        torch.testing.assert_close(module(x), model.eval()(x))


def test_a_module_that_cannot_be_copied_says_what_to_do() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    model = Locked()
    with pytest.raises(NotTraceable, match=r"call \.eval\(\) on it first"):
        trace(model)
    assert model.training
    assert torch.equal(trace(model.eval())(torch.ones(2)), torch.full((2,), 2.0))


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
