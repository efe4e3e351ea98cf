"""Modules whose graph computes something else are refused. The reference is the module itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import stochastic_depth

from fxcore import create_extractor, get_model, trace
from fxcore.analysis.agreement import GraphDiffers, Rows, changing_node, check_graph, compare_rows, draws
from fxcore.errors import FxError


def with_try(x: Tensor) -> Tensor:
    try:
        scale = int(x.shape[0])
    except TypeError:
        scale = 7
    return x * scale


def with_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.mT


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "isinstance": lambda x: x * 2 if isinstance(x, Tensor) else x,
    "dictionary by size": lambda x: x * {4: 2}.get(x.size(1), 1),
    "try": with_try,
    "autocast": with_autocast,
}


class Net(nn.Module):
    def __init__(self, unseen: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unseen, self.last = nn.Linear(4, 4), unseen, nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unseen(self.first(x)))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("unseen", UNSEEN.values(), ids=UNSEEN.keys())
def test_what_tracing_does_not_see_is_refused(unseen: Callable[[Tensor], Tensor], training: bool) -> None:
    with pytest.raises(FxError) as caught:
        create_extractor(Net(unseen).train(training), ["last"], torch.randn(3, 5, 4))
    if isinstance(caught.value, GraphDiffers):
        assert caught.value.extra["node"] == "last"
        assert "last" in caught.value.detail


def filled(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    made[..., :2] = x[..., :2]
    made[..., 2:] = x[..., 2:].softmax(0)
    return made


def expert(x: Tensor) -> Tensor:
    made, mask = x * 2, x.mean((1, 2)) > 1
    made[mask] = x[mask].exp()
    return made


DRAWING_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "dropout without rate": lambda x: F.dropout(x, 0.0),
    "depth": lambda x: stochastic_depth(x, 0.5, "row", training=False),
    "rrelu": lambda x: F.rrelu(x),
    "memory": filled,
    "memory of a size": lambda x: torch.empty(x.size()).copy_(x),
}


@pytest.mark.parametrize("function", DRAWING_NOTHING.values(), ids=DRAWING_NOTHING.keys())
def test_values_after_a_function_that_draws_nothing_are_compared(function: Callable[[Tensor], Tensor]) -> None:
    model, x = Net(function).eval(), torch.randn(3, 5, 4)
    torch.testing.assert_close(create_extractor(model, ["last"], x)(x)["last"], model(x))
    with pytest.raises(GraphDiffers):
        create_extractor(Net(lambda x: with_try(function(x))).eval(), ["last"], x)


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0) + torch.rand_like(x),
        lambda x: torch.empty_like(x).uniform_(),
    ],
)
def test_random_values_are_not_compared(draw: Callable[[Tensor], Tensor]) -> None:
    model, x = Net(lambda x: x + draw(x)).eval(), torch.randn(3, 5, 4)
    assert create_extractor(model, ["last"], x)(x)["last"].shape == (3, 5, 4)


def with_noise(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return with_noise(x)


@pytest.mark.parametrize("noise", [with_noise, Noise()], ids=["function", "module"])
def test_parts_kept_whole_may_draw(noise: Callable[[Tensor], Tensor]) -> None:
    """As the warning about frozen draws advises."""
    kept: dict[str, Any] = {"leaf_functions": [with_noise], "leaf_modules": [Noise]}
    model, x = Net(noise).eval(), torch.randn(2, 5, 4)
    extractor = create_extractor(model, ["first", "last"], x, **kept)
    one, other = extractor(x), extractor(x)
    assert torch.equal(one["first"], other["first"])
    assert not torch.equal(one["last"], other["last"])
    traced = trace(model, **kept)
    assert draws(traced, [x])
    assert changing_node(traced, [x]) is None
    assert compare_rows(traced, [x]) == Rows()


class Positions(nn.Module):
    """Adds encodings of positions, kept for as many as there were at most; ``whole`` if all depend on that number."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.kept = whole, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.kept) < x.shape[-1]:
            self.kept = torch.arange(x.shape[-1]) / (x.shape[-1] if self.whole else 100)
        return x + self.kept[: x.shape[-1]]


@pytest.mark.parametrize(("whole", "changing"), [(True, "1"), (False, None)])
def test_parts_may_not_remember_the_largest_input(whole: bool, changing: str | None) -> None:
    for layers in ([nn.Conv2d(3, 3, 1)], [nn.Upsample((8, 8))]):  # of which one makes all inputs of one size
        fixed = isinstance(layers[0], nn.Upsample)
        model = nn.Sequential(*layers, Positions(whole)).eval()
        traced, x = trace(model, leaf_modules=[Positions]), torch.randn(2, 3, 8, 8)
        assert changing_node(traced, [x]) == (None if fixed else changing)
        small, large = torch.randn(1, 3, 8, 8), torch.randn(1, 3, 16, 16)
        again = nn.Sequential(*layers, Positions(whole)).eval()
        before, _, after = again(small), again(large), again(small)
        assert torch.equal(before, after) == (fixed or changing is None)


def test_what_runs_beside_a_part_that_draws_is_compared() -> None:
    class Beside(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.unseen(x), self.last(with_try(self.first(x)))])

    with pytest.raises(GraphDiffers, match="first in last"):
        create_extractor(Beside(with_noise).eval(), ["last"], torch.randn(2, 5, 4), leaf_functions=[with_noise])


@dataclass
class Output:
    drawn: Tensor
    hidden: tuple[Tensor, Tensor]


@pytest.mark.parametrize("wrong", [False, True])
def test_returned_dataclasses_are_compared(wrong: bool) -> None:
    """Except for fields that are random."""

    class Returning(nn.Module):
        def forward(self, x: Tensor) -> Output:
            same = x * 2 if wrong and isinstance(x, Tensor) else x
            return Output(F.dropout(x, training=True), (torch.exp(x), torch.sin(same)))

    module = Returning().eval()
    traced, x = trace(module), torch.rand(2, 4)
    if not wrong:
        check_graph(module, traced, [x])
        return
    with pytest.raises(GraphDiffers, match="first in sin"):
        check_graph(module, traced, [x])


def test_memory_that_is_never_set_is_the_same_in_both() -> None:
    model, x = Net(lambda x: torch.cat([x, torch.empty_like(x)], 1)).eval(), torch.randn(300, 5, 4)
    assert create_extractor(model, ["last"], x)(x)["last"].shape == (300, 10, 4)


BATCHES: dict[str, tuple[Callable[[Tensor], Tensor], list[str], str | None]] = {
    "alone": (lambda x: x.flatten(1).softmax(1), [], None),
    "time first": (lambda x: x.permute(1, 0, 2).softmax(2).permute(1, 0, 2), [], None),
    "time first, flat": (
        lambda x: x.permute(1, 0, 2).reshape(-1, 4).exp().view(5, -1, 4).mean(0),
        ["reshape", "exp"],
        None,
    ),
    "stacked": (lambda x: torch.stack([x, -x]).flatten(0, 1), ["flatten"], None),
    "expanded": (lambda x: x.expand(3, -1, -1, -1).reshape(-1, 5, 4).view(3, -1, 5, 4)[0], ["reshape"], None),
    "repeated": (lambda x: x.repeat_interleave(2, 0), [], None),
    "ascending": (lambda x: x[x.sum((1, 2)).argsort()], ["argsort", "getitem"], None),
    "descending": (lambda x: x[(-x.sum((1, 2))).argsort()], ["argsort", "getitem"], None),
    "mean": (lambda x: x - x.mean(0), ["sub"], "sub"),
    "softmax": (lambda x: x.softmax(0) * 2, ["softmax", "mul"], "softmax"),
    "statistics": (nn.BatchNorm1d(5, track_running_stats=False), ["0"], "0"),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), [], None),
    "attention across": (
        lambda x: F.scaled_dot_product_attention(*[x.permute(1, 0, 2)] * 3).permute(1, 0, 2),
        ["scaled_dot_product_attention", "permute_1"],
        "scaled_dot_product_attention",
    ),
    "function": (lambda x: F.batch_norm(x, None, None, training=True), ["batch_norm"], "batch_norm"),
    "memory": (lambda x: torch.empty_like(x).copy_(x), [], None),
    "memory across": (lambda x: filled(x).exp(), ["softmax", "exp"], "softmax"),
    "sign of a mean": (lambda x: torch.where(x.mean() > 0.5, -x, x) * 2, ["where", "mul"], "where"),
    "any": (lambda x: x * ((x.mean((1, 2)) > 1).any() * 2), ["mul_1"], "mul_1"),
    "count": (lambda x: x + (x.mean((1, 2)) > 1).sum(), ["add"], "add"),
    "last row": (lambda x: x + (x[-1:] - 2).relu(), ["add"], "add"),
    "largest row": (lambda x: x + (x.max(0).values - 2).relu(), ["add"], "add"),
    "less the largest": (lambda x: (x - x.max()).softmax(-1) * 2, ["sub"], None),
    "mask": (lambda x: x[x.mean((1, 2)) > 1] * 2, ["getitem", "mul"], None),
    "mask, then mean": (lambda x: (y := x[x.mean((1, 2)) > -1]) - y.mean(0), ["getitem", "sub"], "sub"),
    "maximum of no values": (lambda x: x / x[x > 0].max(), ["truediv"], "truediv"),
    "numbers": (
        lambda x: x.index_select(0, (x.mean((1, 2)) > 1).nonzero()[:, 0]),
        ["nonzero", "getitem", "index_select"],
        None,
    ),
    "written by mask": (expert, ["getitem", "exp"], None),
    "columns by mask": (lambda x: x[:, torch.arange(5) > 1], [], None),
    "unused": (lambda x: torch.stack([x.softmax(0), x])[1], ["softmax", "stack"], None),
    "unused rows": (lambda x: torch.cat([x.softmax(0), x], 1)[:, 5:], ["softmax", "cat"], None),
}


@pytest.mark.parametrize(("function", "apart", "dependent"), BATCHES.values(), ids=BATCHES.keys())
def test_rows_that_are_not_one_images(
    function: Callable[[Tensor], Tensor], apart: list[str], dependent: str | None
) -> None:
    root = nn.Sequential(function).eval() if isinstance(function, nn.Module) else function
    found = compare_rows(trace(root), [torch.randn(2, 5, 4)])
    assert (found.apart, found.dependent) == (apart, dependent)


def test_a_check_leaves_the_random_numbers_of_another_threads_model_alone() -> None:
    """The model waits in the middle of its initialisation; a check does not begin before its end."""
    begun, checked = threading.Event(), threading.Event()

    class Checked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            checked.set()
            return x + 1

    def build(**_: Any) -> nn.Module:
        first = nn.Linear(3, 3)
        begun.set()
        checked.wait(1)
        return nn.Sequential(first, nn.Linear(3, 3))

    entry, module, built = replace(get_model("resnet18"), builder=build), Checked().eval(), list[nn.Module]()
    traced = trace(module)
    expected = entry.build().state_dict()  # nothing to wait for: tracing has set the event
    begun.clear()
    checked.clear()
    thread = threading.Thread(target=lambda: built.append(entry.build()))
    thread.start()
    assert begun.wait(60)
    check_graph(module, traced, (torch.ones(2),))
    thread.join()
    for key, value in built[0].state_dict().items():
        assert torch.equal(value, expected[key]), key
