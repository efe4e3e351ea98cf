"""A module cut in two, and the inverse of a function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torchvision.models import resnet18

from fxcore import trace
from fxcore.transforms import NotInvertible, invert, split_at
from fxcore.verify import verify
from tests.fxcore.tracing import traced


def paths(module: fx.GraphModule) -> list[str]:
    return [n.meta["path"] for n in module.graph.nodes if "path" in n.meta]


# splitting


@pytest.mark.parametrize("node", ["relu", "layer1.0.conv2", "layer2.0.downsample.0", "avgpool", "fc", "x"])
def test_halves_make_the_whole(node: str) -> None:
    module = traced(resnet18())
    halves = split_at(module, node)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(halves(x), module(x))
    ours = {id(p) for half in halves[:2] for p in half.parameters()}
    assert ours == {id(p) for p in module.parameters()}
    if node != "x":
        assert node in halves.crossing or node in ("layer1.0.conv2", "layer2.0.downsample.0")
        assert paths(halves.front)[-1] == node


def test_sizes_cross_too() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            n = x.shape[0]
            z = x.exp()
            return {"a": z.view(n, -1), "b": y}

    module = traced(Sized())
    halves = split_at(module, "exp")
    x, y = torch.randn(2, 3, 4), torch.randn(1)
    assert verify(module, halves, (x, y)).max_abs == 0


def test_a_graph_without_inputs() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(3))

        def forward(self) -> Tensor:
            return self.table.exp() + 1

    model = Fixed()
    assert torch.equal(split_at(traced(model), "exp")(), model())


# inversion


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tanh(2 * x + 1),
        lambda x: 3 - x / 4,
        lambda x: 5 / (x.exp() + 1),
        lambda x: (x.permute(1, 0).flip(0) ** 3).roll(1, 0),
        lambda x: 2.0**x,
        lambda x: torch.sigmoid(x.neg()),
        lambda x: x * torch.tensor([2.0, 3.0, 4.0]) - torch.arange(3),
    ],
)
def test_inverses(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(3, 3) * 0.5 + 0.1
    assert torch.allclose(invert(function)(function(x)), x, atol=1e-4)


def test_inverse_of_a_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 4)).double().eval()
    module = traced(model)
    x = torch.randn(5, 4, dtype=torch.float64) * 0.3
    assert torch.allclose(invert(module)(module(x)), x, atol=1e-8)


def test_a_linear_layer_without_bias_has_an_inverse_without() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
    inverse = invert(traced(model))
    assert [name.split(".")[-1] for name in inverse.state_dict()] == ["weight"]
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.allclose(inverse(model(x)), x, atol=1e-8)


@pytest.mark.parametrize(
    "function", [lambda x: x + x, lambda x: x.relu(), lambda x: x**2, lambda x: x.exp() * x, lambda x: x - x]
)
def test_what_has_no_inverse(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotInvertible):
        invert(function)


def test_an_identity_that_is_none_has_no_inverse() -> None:
    class Doubled(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = nn.Sequential(Doubled())
    with pytest.raises(NotInvertible):
        invert(trace(model, leaf_modules=[Doubled]))


@pytest.mark.parametrize(
    "function", [lambda x: 0**x, lambda x: (-2.0) ** x, lambda x: 1**x, lambda x: x * 0, lambda x: 0 / x]
)
def test_arithmetic_that_loses_its_input_has_no_inverse(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotInvertible, match="many inputs"):
        invert(function)


@pytest.mark.parametrize("kind", [nn.Identity, nn.Tanh, lambda: nn.Linear(3, 3)])
def test_a_layer_that_does_more_than_its_class_says_has_no_inverse(kind: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(kind())
    model[0].register_forward_hook(lambda m, given, made: 3 * made)
    with pytest.raises(NotInvertible, match="no inverse"):
        invert(traced(model))

    class More(type(kind())):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    model[0] = kind()
    model[0].__class__ = More
    with pytest.raises(NotInvertible, match="no inverse"):
        invert(trace(model, leaf_modules=[More]))


def test_singular_layers_have_no_inverse() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.data.fill_(1)
    with pytest.raises(NotInvertible, match="singular"):
        invert(traced(model))
