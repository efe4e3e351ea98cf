"""Constants are computed once, and nothing is taken for one that is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxcore.analysis.verify import verify
from fxcore.transforms import fold_constants
from tests.fxcore.capture import traced


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("index", torch.tensor([0, 2, 1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table[self.index].permute(1, 0).contiguous()
        return x.view(-1, self.table.size(1), self.table.shape[0]) + bias + torch.arange(4)


def test_constants_are_computed_once() -> None:
    module = traced(Constant())
    folded = fold_constants(module)
    assert {n.op for n in folded.graph.nodes} == {"placeholder", "get_attr", "call_method", "call_function", "output"}
    assert sum(n.op.startswith("call_") for n in folded.graph.nodes) == 3
    assert verify(module, folded, torch.randn(2, 3, 4)).max_abs == 0


def test_what_is_random_or_overwritten_is_no_constant() -> None:
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chance = nn.Parameter(torch.full((100,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.bernoulli(self.chance)
            total = self.chance + 0
            total.add_(1)
            return x + noise.exp() + total

    folded = fold_constants(traced(Restless()))
    assert any(n.target is torch.bernoulli for n in folded.graph.nodes)
    assert any(n.target == "add_" for n in folded.graph.nodes)
    with torch.no_grad():
        first, second = folded(torch.zeros(100)), folded(torch.zeros(100))
    assert not torch.equal(first, second)
    # What is added in place is added once a run, not to what an earlier run left.
    assert {round(float(v), 3) for run in (first, second) for v in run} == {2.5, round(1.5 + torch.e, 3)}


@fx.wrap
def hidden_write(x: Tensor) -> Tensor:
    """fx does not look inside, and no annotation says what it does."""
    return x.add_(1)


class OfScores(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(100), requires_grad=False)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return x + self.compute(self.scores)


@pytest.mark.parametrize(
    "draw", [F.gumbel_softmax, lambda s: torch.zeros_like(s).normal_(), lambda s: torch.bernoulli(s + 0.5)]
)
def test_no_sample_is_frozen(draw: Callable[[Tensor], Tensor]) -> None:
    folded = fold_constants(traced(OfScores(draw)))
    with torch.no_grad():
        assert not torch.equal(folded(torch.zeros(100)), folded(torch.zeros(100)))


@pytest.mark.parametrize(
    "write", [lambda s: hidden_write(s.mul(2)[:50]).sum(), lambda s: hidden_write(s).sqrt(), lambda s: hidden_write(s)]
)
def test_nothing_is_written_to_that_was_not(write: Callable[[Tensor], Tensor]) -> None:
    module, eager = traced(OfScores(write)), OfScores(write)
    folded = fold_constants(module)
    with torch.no_grad():
        for _ in range(2):  # the model may write to its parameter in each run, and no oftener
            assert torch.equal(module.scores, eager.scores)
            assert torch.equal(folded(torch.zeros(100)), eager(torch.zeros(100)))


# out of place
