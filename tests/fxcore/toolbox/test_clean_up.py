"""Dead code, common subexpressions and arguments: what goes, what has to stay, and names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxcore import trace
from fxcore.tracing.leaves import one_node
from fxcore.tracing.names import PATH
from fxcore.transforms import (
    applied,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    normalize_arguments,
    out_of_place,
)
from tests.fxcore.capture import traced

SEEN: list[str] = []


@one_node
def noted(x: Tensor) -> Tensor:
    """Nothing says what it does besides, and it does something."""
    SEEN.append("noted")
    return x


@one_node
def doubled(x: Tensor) -> Tensor:
    """Nothing says that it writes."""
    return x.mul_(2)


class Of(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Any], *parts: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self.parts[0](x) if len(self.parts) else x)


class Unread(nn.Module):
    """Computes what nothing reads, in every way that torch.fx records."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        torch.relu(self.unused(x)).view(2, 4) * self.scale
        out: Tensor = self.used(x)
        return out


def calls(module: fx.GraphModule) -> list[str]:
    return [n.name for n in module.graph.nodes if n.op.startswith("call_")]


def test_what_nothing_reads_goes() -> None:
    module = traced(Unread())
    made = eliminate_dead_code(module)
    assert [(n.op, n.name, n.meta.get(PATH)) for n in made.graph.nodes][:-1] == [
        ("placeholder", "x", "x"),
        ("call_module", "used", "used"),
    ]
    assert applied(made)[-1].changes == len(module.graph.nodes) - 3
    assert not hasattr(made, "unused")
    x = torch.randn(2, 4)
    assert torch.equal(made(x), module(x))


def write_in_place(x: Tensor) -> Tensor:
    x.clamp_(min=0)
    return x + 1


def write_by_argument(x: Tensor) -> Tensor:
    F.relu(x, inplace=True)
    return x + 1


def write_out(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    torch.exp(x, out=y)
    return y


def write_hidden(x: Tensor) -> Tensor:
    doubled(x)
    return x + 1


def write_by_method(x: Tensor) -> Tensor:
    x.__setitem__(0, 5.0)
    x.__imul__(3)
    return x + 1


@pytest.mark.parametrize("write", [write_by_method, write_in_place, write_by_argument, write_out, write_hidden])
@pytest.mark.parametrize("edit", [eliminate_dead_code, eliminate_common_subexpressions, normalize_arguments])
def test_writes_that_nothing_reads_the_result_of_stay(
    write: Callable[[Tensor], Tensor], edit: Callable[[fx.GraphModule], fx.GraphModule]
) -> None:
    x = torch.randn(4)
    for module in (traced(Of(write)), fx.symbolic_trace(Of(write))):
        assert torch.equal(edit(module)(x.clone()), write(x.clone()))


def test_a_module_that_writes_stays() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.both = nn.ReLU(inplace=True), nn.Sequential(nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Tensor:
            self.relu(x[0])
            self.both(x[1])
            return x + 1

    model = Net().eval()
    module = trace(model, leaf_modules=["both"])
    x = -torch.ones(3, 2)
    assert torch.equal(eliminate_dead_code(module)(x.clone()), torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))


def test_what_has_effects_stays() -> None:
    module = traced(Of(lambda x: (noted(x), noted(x), torch._assert(x.ndim == 1, "one dimension"), x + 1)[-1]))
    for edit in (eliminate_dead_code, eliminate_common_subexpressions):
        SEEN.clear()
        edit(module)(torch.zeros(2))
        assert SEEN == ["noted", "noted"]
        with pytest.raises(AssertionError, match="one dimension"):
            edit(module)(torch.zeros(2, 2))


DRAWS: list[Callable[[Tensor], Tensor]] = [
    torch.rand_like,
    torch.bernoulli,
    lambda x: x.bernoulli(),
    lambda x: torch.normal(x, 1.0),
    lambda x: x.new_empty(50).uniform_(),
    lambda x: torch.multinomial(x, 20),
    lambda x: F.gumbel_softmax(x, dim=0),
    lambda x: torch.ops.aten.rand_like.default(x),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_random_operations_are_neither_merged_nor_dropped(draw: Callable[[Tensor], Tensor]) -> None:
    """A draw that is dropped changes all that are drawn after it."""
    module = traced(Of(lambda x: (draw(x), draw(x), draw(x))[1:]))
    x = torch.full((50,), 0.5)
    torch.manual_seed(0)
    one, two = module(x)
    assert not torch.equal(one, two)
    for edit in (eliminate_dead_code, eliminate_common_subexpressions, normalize_arguments):
        torch.manual_seed(0)
        found = edit(module)(x)
        assert torch.equal(found[0], one), edit
        assert torch.equal(found[1], two), edit


def test_modules_random_in_eval_mode_are_not_merged() -> None:
    pool = nn.FractionalMaxPool2d(2, output_size=3)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = pool

        def forward(self, x: Tensor) -> Any:
            return self.pool(x), self.pool(x)

    assert calls(eliminate_common_subexpressions(traced(Net()))) == ["pool", "pool_1"]


@pytest.mark.parametrize(
    ("compute", "left"),
    [
        (lambda x: torch.exp(x) + torch.exp(x), 2),
        (lambda x: x.exp() + x.exp(), 2),
        (lambda x: x[:, 0] + x[:, 0] + x[:, 1], 4),
        (lambda x: torch.cat([x, x], 1) + torch.cat([x, x], 1), 2),
        (lambda x: (x * 1, x * 1.0, x * True), 3),
        (lambda x: (x / 0.0, x / -0.0), 2),
        (lambda x: x.sum(dim=[0]) + x.sum(dim=[0]) + x.sum(dim=(1,)), 4),
        (lambda x: x.exp() + torch.exp(x), 3),
        (lambda x: torch.relu(torch.exp(x)) + torch.relu(torch.exp(x)), 3),
        (lambda x: x.size(0) + x.size(0) + x.size(1), 4),
    ],
)
def test_equal_calls_are_merged_and_no_others(compute: Callable[[Tensor], Any], left: int) -> None:
    module = traced(Of(compute))
    made = eliminate_common_subexpressions(module)
    assert len(calls(made)) == left
    assert applied(made)[-1].changes == len(calls(module)) - left
    assert set(calls(made)) <= set(calls(module))
    x = torch.randn(3, 3)
    torch.testing.assert_close(made(x), module(x), rtol=0, atol=0, equal_nan=True)


def test_a_module_called_twice_is_called_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x) * self.scale + self.linear(x) * self.scale
            return out

    made = eliminate_common_subexpressions(traced(Net()))
    assert [(n.name, n.meta[PATH]) for n in made.graph.nodes if n.op.startswith("call_")] == [
        ("linear", "linear"),
        ("mul", "mul"),
        ("add", "add"),
    ]


def read_before_and_after(x: Tensor) -> Tensor:
    before = x.sum()
    x.add_(1)
    return before + x.sum()


def read_view_before_and_after(x: Tensor) -> Tensor:
    flat = x.mT
    before = flat.sum()
    x.add_(1)
    return before - flat.sum()


def write_one_of_two(x: Tensor) -> Any:
    one, two = x + 1, x + 1
    one.zero_()
    return one, two


@pytest.mark.parametrize("compute", [read_before_and_after, read_view_before_and_after, write_one_of_two, write_hidden])
def test_memory_that_is_written_to_keeps_its_readers_apart(compute: Callable[[Tensor], Any]) -> None:
    module = traced(Of(compute))
    x = torch.randn(3, 2)
    torch.testing.assert_close(eliminate_common_subexpressions(module)(x.clone()), compute(x.clone()), rtol=0, atol=0)


def test_once_nothing_is_written_readers_are_merged() -> None:
    """The sum before the write and the square after it, and the two squares."""
    model = Of(lambda x: x.relu_().square() + x.square())
    module = out_of_place(traced(model))
    made = eliminate_common_subexpressions(module)
    assert calls(made) == ["relu_", "square", "add"]
    x = torch.randn(4)
    assert torch.equal(made(x.clone()), model(x.clone()))


# arguments


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: torch.flatten(x, 1), lambda x: torch.flatten(input=x, start_dim=1, end_dim=-1)),
        (lambda x: torch.cat([x, x], 1), lambda x: torch.cat(tensors=[x, x], dim=1)),
        (lambda x: torch.add(x, 2), lambda x: torch.add(x, other=2, alpha=1)),
        (lambda x: F.softmax(x, 1), lambda x: F.softmax(x, dim=1, _stacklevel=3, dtype=None)),
        (lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, kernel_size=2, stride=None, padding=0)),
        (lambda x: F.interpolate(x, (4, 4)), lambda x: F.interpolate(x, size=(4, 4), mode="nearest")),
        (lambda x: F.layer_norm(x, (4,)), lambda x: F.layer_norm(x, normalized_shape=(4,), eps=1e-5)),
    ],
)
def test_two_ways_of_writing_a_call_become_one(one: Callable[[Tensor], Tensor], other: Any) -> None:
    def written(module: fx.GraphModule) -> tuple[Any, Any]:
        (node,) = (n for n in module.graph.nodes if n.op == "call_function")
        names = {n: n.name for n in module.graph.nodes}
        return fx.node.map_arg((node.args, node.kwargs), lambda n: names[n])  # type: ignore[no-any-return]

    first, second = normalize_arguments(traced(Of(one))), normalize_arguments(traced(Of(other)))
    assert written(first) == written(second)
    assert len(written(first)[0]) == 1
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(first(x), one(x), rtol=0, atol=0)


def test_modules_get_their_arguments_by_name_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.linear = nn.MultiheadAttention(4, 2), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x)[0] + self.linear(input=x)

    model = Net()
    module = normalize_arguments(traced(model))
    attention, linear = (
        module.graph.find_nodes(op="call_module", target="attention"),
        module.graph.find_nodes(op="call_module", target="linear"),
    )
    assert len(attention[0].args) == 1
    assert list(attention[0].kwargs)[:2] == ["key", "value"]
    assert len(linear[0].args) == 1
    x = torch.randn(5, 2, 4)
    assert torch.equal(module(x), model(x))


def only_by_name(*, x: Tensor, times: int = 2) -> Tensor:
    return x * times


def test_what_only_takes_names_gets_names() -> None:
    model = Of(lambda x: only_by_name(x=x)).eval()
    made = normalize_arguments(trace(model, leaf_functions=[only_by_name]))
    (node,) = made.graph.find_nodes(op="call_function", target=only_by_name)
    assert (node.args, node.kwargs["times"]) == ((), 2)
    assert torch.equal(made(torch.ones(2)), torch.full((2,), 2.0))
