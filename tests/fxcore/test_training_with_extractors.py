"""Extractors of modules that are trained: gradients, and weights that change, against the modules themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.feature_extraction import get_graph_node_names

import fxcore


class Trunk(nn.Module):
    """Computes its first part with or without gradients, writes in place, and splits."""

    def __init__(self, gradients: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(4, 6), nn.Linear(6, 4), nn.ReLU(inplace=True)
        self.gradients = gradients

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.gradients):
            y = self.first(x)
            y += 1
            y = self.act(y)
            one, other = y.chunk(2, 1)
            largest, _ = y.max(1, keepdim=True)
        return self.last(torch.cat([one, other.exp()], 1)) * largest + self.first.bias[:4] * x


class WithoutGradientsInside(Trunk):
    @torch.no_grad()
    def looked_up(self, x: Tensor) -> Tensor:
        return self.first(x).softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.looked_up(x) * self.first(x))


class WritesWithoutGradients(Trunk):
    """Adds in place to a value that has gradients, which keeps them."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            y += 1
        return self.last(y)


@pytest.mark.parametrize("made_without", [False, True])
@pytest.mark.parametrize(
    "build", [lambda: Trunk(gradients=True), Trunk, WithoutGradientsInside, WritesWithoutGradients]
)
def test_gradients_are_the_modules(build: Callable[[], nn.Module], made_without: bool) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(3, 4, requires_grad=True)
    with torch.set_grad_enabled(not made_without):
        [last] = get_graph_node_names(model)[1][-1:]
        extractor = fxcore.create_extractor(model, [last], x.detach())
    inputs = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), inputs, allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad(extractor(x)[last].square().sum(), inputs, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found, expected)


def test_values_computed_without_gradients_have_none() -> None:
    model, x = Trunk().eval(), torch.randn(3, 4)
    traced = fxcore.trace(model)
    for extractor in (fxcore.create_extractor(m, ["first", "mul"], x) for m in (model, traced)):
        found = extractor(x)
        assert not found["first"].requires_grad
        assert found["mul"].requires_grad
        assert torch.equal(found["first"], model.first(x))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, found: Tensor) -> Tensor:  # type: ignore[override]
        return found


class Estimator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = StraightThrough.apply(x)  # type: ignore[no-untyped-call]
        return made


def test_parts_kept_whole_keep_their_backward() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Estimator(), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    extractor = fxcore.create_extractor(model, ["2"], x.detach(), leaf_modules=[Estimator])
    [expected], [found] = (torch.autograd.grad(y.sum(), [x]) for y in (model(x), extractor(x)["2"]))
    torch.testing.assert_close(found, expected)
