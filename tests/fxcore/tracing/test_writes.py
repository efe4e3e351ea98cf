"""In-place operators on values that may be views: only torch knows, so the graph must write as the model does.

The reference is the model run eagerly.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision import ops

from fxcore import build_extractor, trace
from fxcore.graph.model_graph import trace_graph
from fxcore.tracing import writes
from tests.fxcore.conftest import OwnEntry

Operation = Callable[[Tensor], Tensor]


@fx.wrap
def hidden_view(y: Tensor) -> Tensor:
    return y[:, 1:3]


@fx.wrap
def relu(y: Tensor) -> Tensor:
    """Named like an operation of torch, but a view."""
    return y[:, 1:3]


ALIASES: dict[str, Operation] = {
    "adjoint": lambda y: y.adjoint(),
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y, torch.ones(4, 1, 1))[0],
    "broadcast_to": lambda y: y.broadcast_to(y.shape),
    "contiguous": lambda y: y.contiguous(),
    "cpu": lambda y: y.cpu(),
    "dropout": lambda y: F.dropout(y, 0.1, training=False),
    "einsum": lambda y: torch.einsum("nchw->nhwc", y),
    "flatten": lambda y: y.flatten(2),
    "float": lambda y: y.float(),
    "hidden_view": lambda y: hidden_view(y),
    "hsplit": lambda y: torch.hsplit(y, 2)[1],
    "item_at_a_number": lambda y: y[:, y.size(1) - 1],
    "item_at_a_scalar": lambda y: y[:, torch.tensor(0)],
    "moveaxis": lambda y: torch.moveaxis(y, 1, -1),
    "named_like_an_allocating_one": lambda y: relu(y),
    "of_tuples": lambda y: operator.add((y * 2,), y.chunk(2, 1))[1],
    "ravel": lambda y: y.ravel(),
    "reshape": lambda y: y.reshape(-1),
    "second_argument": lambda y: torch.broadcast_tensors(y * 2, y)[1],
    "squeeze": lambda y: y.squeeze(),
    "to": lambda y: y.to(torch.float32),
    "type_as": lambda y: y.type_as(y),
    "unfold": lambda y: y.unfold(2, 2, 2),
}
COPIES: dict[str, Operation] = {
    "double": lambda y: y.double(),
    "einsum_of_two": lambda y: torch.einsum("nchw,c->nhwc", y, torch.ones(4)),
    "permuted": lambda y: y.permute(0, 2, 3, 1).reshape(-1),
    "to_another_type": lambda y: y.to(torch.float16),
    "unfold_to_columns": lambda y: F.unfold(y, 2),
}
ONE = torch.ones(1, 1, 1, 1)
SQUARE, MATRIX, YES = torch.ones(1, 1, 2, 2), ONE[0, 0], ONE == 1
# Arguments with which operations would return the first, were they to return it at all; without these, one image.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add", "sub", "eq", "ge", "gt", "le", "lt", "ne"), (ONE, 0)),
    **dict.fromkeys(("mul", "truediv", "floordiv", "mod", "pow", "div", "full_like"), (ONE, 1)),
    **dict.fromkeys(("and_", "or_", "xor"), (YES, YES)),
    **dict.fromkeys(("maximum", "minimum"), (ONE, ONE)),
    **dict.fromkeys(("layer_norm", "rms_norm"), (ONE, [1])),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), (ONE, 0)),
    **dict.fromkeys(("interpolate", "local_response_norm"), (ONE, 1)),
    **dict.fromkeys(("matmul", "mm", "linear"), (MATRIX, MATRIX)),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), ([ONE],)),
    **{f"conv{t}{n}d": 2 * (ONE.view(*[1] * (n + 2)),) for t in ("", "_transpose") for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": (ONE.view(*[1] * (n + 2)), 1) for kind in ("avg", "max") for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": (ONE.view(*[1] * (n + 2)), 1) for kind in ("avg", "max") for n in (1, 2, 3)},
    "addmm": (MATRIX, MATRIX, MATRIX),
    "baddbmm": (ONE[0], ONE[0], ONE[0]),
    "batch_norm": (ONE, torch.zeros(1), torch.ones(1)),
    "bmm": (ONE[0], ONE[0]),
    "clamp": (ONE, -9.0),
    "embedding": (torch.zeros(1, dtype=torch.int64), MATRIX),
    "flip": (ONE, []),
    "glu": (torch.ones(2), 0),
    "group_norm": (SQUARE, 1),
    "instance_norm": (SQUARE,),
    "invert": (YES,),
    "masked_fill": (ONE, ~YES, 0.0),
    "pad": (ONE, [0, 0]),
    "prelu": (ONE, ONE.view(1)),
    "repeat": (ONE, 1, 1, 1, 1),
    "repeat_interleave": (ONE, 1, 0),
    "roll": (ONE, 0, 0),
    "scaled_dot_product_attention": (ONE, ONE, ONE),
    "threshold": (ONE, -9.0, 0.0),
    "where": (YES, ONE, ONE),
}
LAYERS = [
    *(nn.Conv2d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), nn.BatchNorm2d(1), nn.LayerNorm(1), nn.GroupNorm(1, 1)),
    *(nn.AdaptiveAvgPool2d((None, None)), nn.AdaptiveMaxPool2d(1), nn.AvgPool2d(1), nn.LPPool2d(1, 1), nn.MaxPool2d(1)),
    *(nn.CircularPad2d(0), nn.ConstantPad2d(0, 0), nn.ReflectionPad2d(0), nn.ReplicationPad2d(0), nn.ZeroPad2d(0)),
    *(nn.Linear(1, 1), nn.Bilinear(1, 1, 1), nn.LocalResponseNorm(1), nn.CrossMapLRN2d(1), nn.RMSNorm(1)),
    *(nn.ReLU(), nn.GELU(), nn.RReLU(), nn.Threshold(-9, 0), nn.Hardtanh(-9, 9), nn.Softmax(1), nn.PReLU()),
    *(nn.Softshrink(0), nn.Hardshrink(0), nn.Tanhshrink(), nn.LeakyReLU(1), nn.ELU(), nn.CELU(), nn.SELU()),
    *(ops.Conv2dNormActivation(1, 1), ops.SqueezeExcitation(1, 1), ops.FrozenBatchNorm2d(1)),
    *(nn.Upsample(scale_factor=1), nn.UpsamplingNearest2d(scale_factor=1), nn.Embedding(2, 1), nn.EmbeddingBag(2, 1)),
]


class Writing(nn.Module):
    """Write to what may be a view of the value of ``first``, and read that value."""

    def __init__(self, view: Operation) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.view = nn.Conv2d(3, 4, 3), nn.Sigmoid(), view

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.view(y)
        z *= 2
        return self.last(y) / z.sum()


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What ``model`` returns, and what its layers do when they return it."""
    seen: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_hook(lambda m, i, o, name=name: seen.update({name: o.clone()}))
        for name, layer in model.named_children()
    ]
    with torch.no_grad():
        seen["truediv"] = model(x)
    for handle in handles:
        handle.remove()
    return seen


def image() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [*ALIASES, *COPIES])
def test_who_shares_the_memory_sees_the_write_and_nobody_else(name: str, own_entry: OwnEntry) -> None:
    view = (ALIASES | COPIES)[name]
    model, graph = Writing(view).eval(), trace_graph(own_entry(lambda: Writing(view)))
    expected = run(model, image())
    assert torch.equal(expected["last"], expected["first"].sigmoid()) == (name in COPIES)
    traced, module = trace(model), build_extractor(graph, model, graph.resolve(["first", "last", "truediv"])).module
    with torch.no_grad():
        torch.testing.assert_close(traced(image()), expected["truediv"], rtol=0, atol=0)
        torch.testing.assert_close(module(image()), {key: expected[key] for key in ("first", "last", "truediv")})


def test_one_graph_writes_as_the_model_does_whatever_the_type() -> None:
    model = Writing(lambda y: y.float()).eval()
    traced = trace(model)
    for dtype in (torch.float32, torch.float64):
        expected = run(model.to(dtype), image().to(dtype))
        assert torch.equal(expected["last"], expected["first"].sigmoid()) == (dtype == torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(traced.to(dtype)(image().to(dtype)), expected["truediv"], rtol=0, atol=0)


def test_tuples_of_views_can_be_joined() -> None:
    """Extractors refuse this, since they cannot tell which part of the memory an item is."""
    model = Writing(lambda y: (y.chunk(2, 1) + y.chunk(4, 1)[:1])[1]).eval()
    with torch.no_grad():
        torch.testing.assert_close(trace(model)(image()), model(image()), rtol=0, atol=0)


def test_what_nobody_reads_again_is_an_addition() -> None:
    def function(x: Tensor) -> Tensor:
        z = hidden_view((x * 2).float())
        channels, other = z.size(1), x.to(z.dtype)
        z += 1
        return z * channels + other

    assert not writes.IN_PLACE_OPERATORS.keys() & {node.target for node in trace(function).graph.nodes}


class Narrow(nn.Module):
    """Adds a value to one of a narrower type, in place."""

    def __init__(self, narrow: Callable[[Narrow, Tensor], Tensor]) -> None:
        super().__init__()
        self.narrow = narrow
        self.register_buffer("ones", torch.ones(3, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        z = self.narrow(self, x)
        z += x
        return z


@pytest.mark.parametrize(
    "narrow",
    [
        lambda model, x: x.half(),
        lambda model, x: x.half() * 2,
        lambda model, x: x.bfloat16().relu(),
        lambda model, x: torch.zeros_like(x, dtype=torch.float16),
        lambda model, x: model.ones * 2,
    ],
)
def test_a_narrower_value_keeps_its_type(narrow: Callable[[Narrow, Tensor], Tensor]) -> None:
    model, x = Narrow(narrow), torch.tensor([0.1, 1 / 3, 5.0])
    torch.testing.assert_close(trace(model)(x), model(x), rtol=0, atol=0)


def test_inputs_may_differ_in_type() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        z += y
        return z

    x = torch.tensor([0.1, 1 / 3])
    for given in ((x.half(), x), (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2]))):
        torch.testing.assert_close(trace(function)(*given), function(*given), rtol=0, atol=0)


def test_an_index_is_not_copied() -> None:
    index = torch.tensor(0)
    graph = trace(lambda x: (x[:, index].add_(1), index)).graph
    assert [node.name for node in graph.nodes if node.target == "clone"] == []


def test_neither_constants_nor_weights_keep_what_one_call_wrote() -> None:
    class Totals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            constant = torch.ones(1)
            total, scale = constant.float(), self.scale.float()
            total += x.mean()
            scale += x.mean()
            return x * total + constant + self.scale

    model = Totals().eval()
    traced = trace(model)
    with torch.no_grad():
        values = [traced(torch.ones(2, 2)) for _ in range(2)]
        assert torch.equal(model.scale, torch.ones(1))
        expected = model(torch.ones(2, 2))
    assert torch.equal(values[0], expected)
    assert torch.equal(values[1], expected)


@pytest.mark.parametrize("name", sorted(writes._ALLOCATING))
def test_what_is_said_to_allocate_does(name: str) -> None:
    arguments = ARGUMENTS.get(name, (ONE,))
    home = next(home for home in (F, torch, Tensor, operator) if hasattr(home, name))
    assert storages(getattr(home, name)(*arguments)).isdisjoint(storages(arguments))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_so_do_layers(layer: nn.Module) -> None:
    arguments = (ONE, ONE) if isinstance(layer, nn.Bilinear) else (SQUARE if isinstance(layer, nn.GroupNorm) else ONE,)
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        arguments = (torch.zeros(1, 1, dtype=torch.long),)
    assert writes._is_allocating(layer)
    with torch.no_grad():
        assert storages(layer.eval()(*arguments)).isdisjoint(storages(arguments))


def test_layers_that_return_their_input_do_not() -> None:
    assert not writes._is_allocating(nn.Sequential(nn.Identity(), nn.Dropout()))


def storages(value: Any) -> set[int]:
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    return set(itertools.chain.from_iterable(map(storages, value))) if isinstance(value, (list, tuple)) else set()


class Gated(nn.Module):
    """Along ``2**40`` paths the last sum contains the first."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x + x * torch.sigmoid(-x)
        return x


class Deep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1200):
            x = x + torch.sin(x)
        return x


@pytest.mark.parametrize("model", [Gated(), pytest.param(Deep(), marks=pytest.mark.exhaustive)], ids=["gated", "deep"])
def test_sums_may_be_nested_deeply(model: nn.Module) -> None:
    x = torch.randn(2, 3)
    assert torch.equal(trace(model.eval())(x), model(x))
