"""What changes a module's result from outside its class. The reference is calling the module."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fxcore import create_extractor, trace
from fxcore.errors import NotTraceable
from fxcore.tracing.names import names


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.b(self.a(x)) * scale


class OwnCall(Net):
    def __call__(self, x: Tensor, scale: float = 2.0) -> Any:
        return super().__call__(x / x.norm(dim=1, keepdim=True), scale=scale)


def hook(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda _, inputs, output: output / inputs[0].norm(dim=1, keepdim=True))
    return model


def pre_hook(model: nn.Module) -> nn.Module:
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2 - 1,))
    return model


def hook_with_keywords(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda _, inputs, given, output: output * len(given) + inputs[0], with_kwargs=True)
    return model


def bound_forward(model: Any) -> nn.Module:
    model.forward = types.MethodType(lambda self, x: self.a(x) - 1, model)
    return model  # type: ignore[no-any-return]


def closed_forward(model: Any) -> nn.Module:
    before = model.forward
    model.forward = lambda x: before(x).relu() + model.b(x)
    return model  # type: ignore[no-any-return]


def old_weight_norm(_: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer: Any = nn.utils.weight_norm(nn.Linear(6, 6))  # type: ignore[no-untyped-call]
    layer.weight_g.data *= 3
    return layer  # type: ignore[no-any-return]


def pruned(_: nn.Module) -> nn.Module:
    layer: Any = prune.l1_unstructured(nn.Linear(6, 6), "weight", 0.5)  # type: ignore[no-untyped-call]
    layer.weight_orig.data += 1
    return layer  # type: ignore[no-any-return]


CHANGES = [
    hook,
    pre_hook,
    hook_with_keywords,
    bound_forward,
    closed_forward,
    old_weight_norm,
    pruned,
    lambda _: OwnCall(),
    lambda _: hook(OwnCall()),
]


@pytest.mark.parametrize(("inside", "training"), [(False, True), (True, False)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_computes_what_calling_the_module_does(
    change: Callable[[nn.Module], nn.Module], inside: bool, training: bool
) -> None:
    model = change(Net())
    model = (nn.Sequential(model) if inside else model).train(training)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    graph = trace(model)
    last = names(graph.graph)[-1]
    with torch.no_grad():
        assert torch.equal(graph(x), model(x))
        assert torch.equal(create_extractor(model, [last], x)(x)[last], model(x))
    assert model.training is training


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale


class Partial(nn.Module):
    forward = functools.partial(Static.forward, scale=2.0)


@pytest.mark.parametrize("model", [Static(), hook(Static()), Partial(), hook(Partial())])
def test_a_static_forward_does_not_get_its_module(model: nn.Module) -> None:
    x = torch.randn(2, 6)
    assert torch.equal(trace(model)(x), model(x))
    extractor = create_extractor(model, ["mul"], x)  # of x alone: the scale has its default
    assert torch.equal(extractor(x)["mul"], 2 * x)


def test_a_forward_in_place_of_a_static_one_keeps_all_arguments() -> None:
    model, x = Static(), torch.randn(2, 6)
    model.forward = lambda *given: Static.forward(*given) + 1  # type: ignore[method-assign]
    assert torch.equal(trace(model)(x), model(x))


class Several(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0] * 2


def test_a_failure_outside_the_model_names_no_line() -> None:
    with pytest.raises(NotTraceable, match="iterates over a traced value") as caught:
        trace(hook(Several()))
    assert caught.value.extra["source"] == ""
    assert "<string>" not in caught.value.detail


def test_a_hook_that_is_added_or_removed_later_does_not_change_the_graph() -> None:
    model, x = Net().eval(), torch.ones(2, 6)
    handle = model.a.register_forward_hook(lambda _, __, output: output * 2)
    graph, expected = trace(model), model(x)
    handle.remove()
    model.b.register_forward_hook(lambda _, __, output: output * 3)
    assert torch.equal(graph(x), expected)
