"""A module cut in two, and the inverse of a function."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models import resnet18

from fxcore import trace
from fxcore.analysis.verify import verify
from fxcore.tracing.names import names
from fxcore.transforms import NotInvertible, invert, split_at
from tests.fxcore.capture import traced

# splitting


@pytest.fixture(scope="module")
def resnet() -> fx.GraphModule:
    return traced(resnet18())


@pytest.mark.parametrize("node", ["relu", "layer1.0.conv2", "layer2.0.downsample.0", "fc", "x"])
def test_halves_make_the_whole(node: str, resnet: fx.GraphModule) -> None:
    module = resnet
    halves = split_at(module, node)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(halves(x), module(x))
    ours = {id(p) for half in halves[:2] for p in half.parameters()}
    assert ours == {id(p) for p in module.parameters()}
    if node != "x":
        assert node in halves.crossing or node in ("layer1.0.conv2", "layer2.0.downsample.0")
        assert names(halves.front.graph)[-1] == node


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
        lambda x: x.swapdims(0, 1) ** 3.0,
        lambda x: 2.0**x,
        lambda x: torch.sigmoid(x.neg()),
        lambda x: x * torch.tensor([2.0, 3.0, 4.0]) - torch.arange(3),
    ],
)
def test_inverses(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(3, 3) * 0.5 + 0.1
    assert torch.allclose(invert(function)(function(x)), x, atol=1e-4)


INF, HALF_PI = 8.0, math.pi / 2
# What the docstring says each is invertible on; ``INF`` stands for as far as rounding loses nothing.
DOMAINS: list[tuple[Callable[[Tensor], Tensor], float, float]] = [
    (torch.sin, -HALF_PI, HALF_PI),
    (torch.cos, 0, math.pi),
    (torch.tan, -HALF_PI + 0.001, HALF_PI - 0.001),
    (torch.asin, -1, 1),
    (torch.acos, -1, 1),
    (torch.atan, -INF, INF),
    (torch.sinh, -INF, INF),
    (torch.arcsinh, -INF, INF),
    (torch.acosh, 1, INF),
    (torch.atanh, -0.999, 0.999),
    (torch.tanh, -5, 5),
    (torch.erf, -3, 3),
    (torch.erfinv, -0.999, 0.999),
    (torch.exp, -INF, INF),
    (torch.log10, 0.001, INF),
    (torch.log1p, -0.999, INF),
    (torch.rsqrt, 0.001, INF),
    (torch.sqrt, 0, INF),
    (torch.logit, 0.001, 0.999),
    (lambda x: torch.logit(x, eps=1e-4), 0.001, 0.999),
    (F.leaky_relu, -INF, INF),
    (lambda x: F.leaky_relu(x, 3), -INF, INF),
    (nn.LeakyReLU(0.2), -INF, INF),
    (F.softplus, -INF, 30),
    (lambda x: F.softplus(x, 3.0, threshold=15), -INF, INF),
    (nn.Softplus(2), -INF, INF),
    (lambda x: torch.add(x, 3, alpha=2), -INF, INF),
    (lambda x: torch.add(torch.ones(()), x, alpha=4), -INF, INF),
    (lambda x: x.sub(3, alpha=2), -INF, INF),
    (lambda x: torch.sub(torch.ones(()), x, alpha=4), -INF, INF),
    (lambda x: torch.divide(torch.subtract(torch.multiply(x, 3), 2), 7), -INF, INF),
    (lambda x: torch.negative(x), -INF, INF),
]


@pytest.mark.parametrize(("function", "low", "high"), DOMAINS)
def test_inverses_on_their_domain(function: Callable[[Tensor], Tensor], low: float, high: float) -> None:
    x = torch.linspace(low, high, 1001, dtype=torch.float64)
    model = nn.Sequential(function) if isinstance(function, nn.Module) else function
    # torch's own functions are no Python functions, which a trace needs.
    given = traced(model) if isinstance(model, nn.Module) else lambda x: function(x)
    inverse, values = invert(given), function(x)
    torch.testing.assert_close(inverse(values), x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(function(inverse(values)), values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "outside", "principal"),
    [(torch.sin, 2.0, math.pi - 2), (torch.cos, -1.0, 1.0), (torch.tan, 2.0, 2 - math.pi)],
)
def test_a_periodic_function_is_inverted_on_its_principal_branch(
    function: Callable[[Tensor], Tensor], outside: float, principal: float
) -> None:
    found = invert(lambda x: function(x))(function(torch.tensor(outside, dtype=torch.float64)))
    assert float(found) == pytest.approx(principal)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(-1, 6) + 1,
        lambda x: x.view(x.size(0), -1) * 2,
        lambda x: x.reshape((x.shape[0], 3, 2)),
        lambda x: torch.reshape(x, (2, 3, -1)).transpose(0, 1),
        lambda x: torch.flatten(x),
        lambda x: x.flatten(1).unflatten(1, (3, 2)).unsqueeze(0).squeeze(),
        nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Unflatten(1, (3, 2))).double(),
    ],
)
def test_reshapes_are_undone_to_the_shape_of_an_example(function: Callable[[Tensor], Tensor]) -> None:
    given = traced(function) if isinstance(function, nn.Module) else function
    x = torch.rand(4, 2, 3, dtype=torch.float64)
    with pytest.raises(NotInvertible, match=r"give an example of the input"):
        invert(given)
    inverse = invert(given, torch.rand(4, 2, 3, dtype=torch.float64))
    with torch.no_grad():
        torch.testing.assert_close(inverse(function(x)), x)


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.exp(x + torch.arange(3.0)[:, None]), lambda x: torch.arange(1.0, 4.0)[:, None] / x],
)
def test_a_step_that_broadcasts_the_example_has_no_inverse(function: Callable[[Tensor], Tensor]) -> None:
    for shape in ((4,), (1, 4)):
        with pytest.raises(NotInvertible, match=rf"broadcasts its input from {' x '.join(map(str, shape))} to 3 x 4"):
            invert(function, torch.rand(shape))
    x = torch.rand(3, 4) + 1
    torch.testing.assert_close(invert(function, x)(function(x)), x)


def test_rows_of_a_reshape_that_keeps_them_may_be_any_number() -> None:
    inverse = invert(lambda x: x.view(x.shape[0], -1) * 2, torch.rand(1, 2, 3))
    x = torch.rand(5, 2, 3)
    torch.testing.assert_close(inverse(x.flatten(1) * 2), x)


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


def test_an_identity_that_is_none_has_no_inverse() -> None:
    class Doubled(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = nn.Sequential(Doubled())
    with pytest.raises(NotInvertible):
        invert(trace(model, leaf_modules=[Doubled]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.leaky_relu(x, 0.0),
        lambda x: F.softplus(x, threshold=2),
        lambda x: torch.add(torch.ones(()), x, alpha=0),
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: x.view(torch.int32),
        lambda x: x / x.shape[0],
        lambda x: torch.sin(x) + torch.cos(x),
        lambda x: torch.cosh(x),
        lambda x: x.relu(),
        lambda x: x**2,
    ],
)
def test_what_has_no_inverse(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotInvertible):
        invert(function, torch.rand(2))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 0**x,
        lambda x: (-2.0) ** x,
        lambda x: 1**x,
        lambda x: x * 0,
        lambda x: 0 / x,
        lambda x: x / float("inf"),
        lambda x: x * torch.tensor([1.0, 0.0]),
        lambda x: torch.tensor([0.0, 2.0]) / x,
        lambda x: torch.tensor([1.0, 2.0]) ** x,
        lambda x: x + torch.tensor([1.0, float("nan")]),
    ],
)
def test_arithmetic_that_loses_its_input_has_no_inverse(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotInvertible, match="many inputs"):
        invert(function)


@pytest.mark.parametrize("kind", [nn.Identity, nn.Tanh, lambda: nn.Linear(3, 3)])
def test_a_layer_that_does_more_than_its_class_says_has_no_inverse(kind: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(kind())
    model[0].register_forward_hook(lambda m, given, made: 3 * made)
    with pytest.raises(NotInvertible, match="no known inverse"):
        invert(traced(model))

    class More(type(kind())):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    model[0] = kind()
    model[0].__class__ = More
    with pytest.raises(NotInvertible, match="no known inverse"):
        invert(trace(model, leaf_modules=[More]))


def test_singular_layers_have_no_inverse() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.data.fill_(1)
    with pytest.raises(NotInvertible, match="singular"):
        invert(traced(model))
