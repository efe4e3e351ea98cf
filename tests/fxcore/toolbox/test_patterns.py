"""Subgraphs found by example: what a pattern matches, what keeps a match away, and what takes its place."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18

from fxcore import trace
from fxcore.analysis.verify import verify
from fxcore.tracing.names import names
from fxcore.transforms import BadPattern, applied, op, replace_module, replace_pattern
from tests.fxcore.capture import traced


def conv_then(x: Tensor) -> Tensor:
    return op(nn.ReLU, F.relu, "relu")(op(nn.BatchNorm2d, name="norm")(op(nn.Conv2d, name="conv")(x)))


def test_patterns_find_modules_by_class() -> None:
    module = traced(resnet18())
    changed = replace_pattern(module, conv_then, lambda x, conv, norm: F.silu(norm(conv(x))))
    assert applied(changed)[-1].changes == 9
    assert sum(n.target is F.silu for n in changed.graph.nodes) == 9
    assert "layer1.0.relu" in names(changed.graph)
    x = torch.randn(1, 3, 32, 32)
    want = replace_module(module, "*.relu", lambda old: nn.SiLU())
    assert changed(x).shape == want(x).shape
    same = replace_pattern(module, conv_then, lambda x, conv, norm: norm(conv(x)).relu())
    assert verify(module, same, x).max_abs == 0


class Sums(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.matmul(x, y) + 1
        return torch.matmul(z, y) + 2 + torch.matmul(z, z)


def test_wildcards_stand_for_values_and_literals() -> None:
    module = traced(Sums())
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    changed = replace_pattern(
        module, lambda a, b, c: torch.matmul(a, b) + c, lambda a, b, c: torch.addmm(a * 0 + c, a, b)
    )
    assert applied(changed)[-1].changes == 2
    assert torch.allclose(changed(x, y), module(x, y), atol=1e-5)
    square = replace_pattern(module, lambda a: torch.matmul(a, a), lambda a: torch.linalg.matrix_power(a, 2))
    assert applied(square)[-1].changes == 1
    assert torch.allclose(square(x, y), module(x, y), atol=1e-4)
    only = replace_pattern(module, lambda a, b: torch.matmul(a, b) + 2, lambda a, b: a)
    assert applied(only)[-1].changes == 1


def test_tapped_inner_values_keep_a_match_away() -> None:
    class Tapped(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.exp(x)
            return torch.log(y), y

    kept = replace_pattern(traced(Tapped()), lambda a: torch.log(torch.exp(a)), lambda a: a + 0)
    assert applied(kept)[-1].changes == 0
    assert torch.equal(kept(torch.zeros(2))[1], torch.ones(2))
    with pytest.raises(BadPattern):
        replace_pattern(traced(Tapped()), lambda a: a, lambda a: a)


def test_a_pattern_holds_no_tensor() -> None:
    """Whatever the model's own constant is, it would go by the same name."""

    with pytest.raises(BadPattern, match="tensor"):
        replace_pattern(trace(lambda x: x + torch.tensor([9, 9, 9])), lambda x: x + torch.arange(3), lambda x: x * 0)


def test_arguments_that_hold_computed_values_are_no_literals() -> None:
    x, i = torch.randn(2, 3), torch.tensor(1)
    module = trace(lambda x, i: x[:, i + 1] + x[:, 1:])
    changed = replace_pattern(module, lambda a: op(operator.getitem, name="take")(a), lambda a, take: -take(a))
    assert applied(changed)[-1].changes == 1
    assert torch.equal(changed(x, i), x[:, 2] - x[:, 1:])


def test_a_wildcard_may_be_a_list_of_values() -> None:
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    module = trace(lambda x, y: torch.cat([x, y.exp()], 1))
    changed = replace_pattern(module, lambda xs: op(torch.cat, name="cat")(xs), lambda xs, cat: cat([xs[0].neg(), *xs]))
    assert torch.equal(changed(x, y), torch.cat([-x, x, y.exp()], 1))


def test_a_match_that_writes_what_others_read_stays() -> None:
    class Written(nn.Module):
        def __init__(self, both: bool) -> None:
            super().__init__()
            self.both = both

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x - 0.5
            z = y.relu_() * 2
            return (z, y) if self.both else (z,)

    def twice(a: Tensor) -> Tensor:
        return op("relu_", name="relu")(a) * 2

    x = torch.randn(50)
    kept = replace_pattern(traced(Written(True)), twice, lambda a, relu: relu(a) + a)
    assert applied(kept)[-1].changes == 0
    assert verify(Written(True), kept, x).max_abs == 0
    alone = replace_pattern(traced(Written(False)), twice, lambda a, relu: relu(a) + a)
    assert verify(lambda v: ((v - 0.5).relu() + v - 0.5,), alone, x).allclose


def read_by_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x - 0.5
    view = y.flatten(1)
    return y.relu_() * 2, view


def read_as_another_argument(x: Tensor) -> Tensor:
    y = x - 0.5
    view = y.view(-1).view(4, 6)
    return y.relu_() + view


def overwritten_in_between(x: Tensor) -> Tensor:
    y = x - 0.5
    z = y.relu()
    y.flatten(1).add_(1)
    return z * 2


@pytest.mark.parametrize(
    ("compute", "pattern", "replacement"),
    [
        (read_by_a_view, lambda a: op("relu_")(a) * 2, lambda a: a.relu() * 2),
        (read_as_another_argument, lambda a, b: op("relu_")(a) + b, lambda a, b: a.relu() + b),
        (overwritten_in_between, lambda a: op("relu")(a) * 2, lambda a: a.relu() * 2),
    ],
)
def test_a_match_among_writes_stays(compute: Any, pattern: Any, replacement: Any) -> None:
    x = torch.randn(4, 6)
    kept = replace_pattern(trace(compute), pattern, replacement)
    assert applied(kept)[-1].changes == 0
    assert verify(compute, kept, x).max_abs == 0
