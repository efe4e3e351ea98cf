"""Rewriting of calls that work in place: later readers, of views too, read what replaces them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxcore import trace
from fxcore.analysis.verify import verify
from fxcore.passes.base import CannotTransform
from fxcore.transforms import (
    applied,
    decompose,
    insert_after,
    op,
    out_of_place,
    remove,
    replace_activation,
    replace_module,
    replace_op,
    replace_pattern,
    wrap,
)
from tests.fxcore.capture import traced


class Acting(nn.Module):
    """Applies ``compute`` to the input less a half, and to an activation, which may be a module."""

    def __init__(self, compute: Callable[[Tensor, Any], Any], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute, self.activation = compute, activation

    def forward(self, x: Tensor) -> Any:
        return self.compute(x - 0.5, self.activation)


IN_PLACE = {
    "module": nn.ReLU(inplace=True),
    "function": lambda x: F.relu(x, inplace=True),
    "underscored function": torch.relu_,
    "method": lambda x: x.relu_(),
}


def act_and_return(y: Tensor, activation: Callable[[Tensor], Tensor]) -> Any:
    z = activation(y)
    return y, z + y


def act_on_the_whole(y: Tensor, activation: Callable[[Tensor], Tensor]) -> Any:
    view = y.flatten(1)
    z = activation(y)
    z += 1
    return view, z * 2


def act_on_a_part(y: Tensor, activation: Callable[[Tensor], Tensor]) -> Any:
    part, _ = y.chunk(2, 1)
    activation(part)
    return y * 2


def act_on_a_row_nobody_reads(y: Tensor, activation: Callable[[Tensor], Tensor]) -> Any:
    activation(y[:, :3])
    return y * 2, y.flatten(1)


def act_on_what_may_be_a_view(y: Tensor, activation: Callable[[Tensor], Tensor]) -> Any:
    activation(y.float())
    return y * 2


@pytest.mark.parametrize(
    "compute",
    [act_and_return, act_on_the_whole, act_on_a_part, act_on_a_row_nobody_reads, act_on_what_may_be_a_view],
)
@pytest.mark.parametrize("activation", IN_PLACE.values(), ids=IN_PLACE)
def test_what_was_written_in_place_is_read_from_what_replaces_it(
    compute: Callable[[Tensor, Any], Any], activation: Callable[[Tensor], Tensor]
) -> None:
    """By later readers of the overwritten value and of its views."""
    model = Acting(compute, activation)
    module = traced(model)
    node = next(n.name for n in module.graph.nodes if "relu" in n.name or "activation" in n.name)
    x = torch.randn(4, 6)
    for same in (decompose(module), wrap(module, node, lambda call, v, **how: call(v, **how))):
        assert verify(model, same, x).allclose
        if compute is not act_on_what_may_be_a_view:  # which out_of_place refuses
            assert verify(model, out_of_place(same), x).allclose
    anything = op(nn.ReLU, F.relu, torch.relu_, "relu_", name="f")
    wanted = Acting(compute, lambda v: v.copy_(torch.tanh(v)))
    for changed in (
        replace_activation(module, old="relu", new="tanh"),
        replace_pattern(module, lambda a: anything(a), lambda a, f: torch.tanh(a)),
        *([replace_module(module, "activation", "tanh")] if isinstance(activation, nn.Module) else []),
    ):
        assert applied(changed)[-1].changes == 1
        assert verify(wanted, changed, x).allclose


@pytest.mark.parametrize("activation", IN_PLACE.values(), ids=IN_PLACE)
def test_a_wrapped_call_overwrites_nothing_but_by_what_its_wrapper_returns(
    activation: Callable[[Tensor], Tensor],
) -> None:
    module = traced(Acting(act_and_return, activation))
    node = [n.meta["path"] for n in module.graph.nodes if "path" in n.meta][-2]
    x = torch.randn(50)
    wanted = Acting(act_and_return, lambda v: v.copy_(v.relu() - (-v).relu() * 3))
    wrapped = wrap(module, node, lambda call, v, **how: call(v, **how) - call(-v, **how) * 3)
    assert verify(wanted, wrapped, x).allclose
    # The original's module still works in place.
    assert verify(Acting(act_and_return, activation), module, x).max_abs == 0


def test_a_view_of_which_only_the_size_is_read_needs_no_copy() -> None:
    def compute(x: Tensor) -> Tensor:
        y = x - 0.5
        view = y.flatten(1)
        return y.relu_() / view.shape[0]

    changed = decompose(trace(compute))
    assert not changed.graph.find_nodes(op="call_method", target="copy_")
    assert verify(compute, changed, torch.randn(4, 6)).allclose


@pytest.mark.parametrize("compute", [lambda y: (y.relu_(), y)[1], lambda y: y.relu_() + y])
def test_a_value_that_was_overwritten_is_that_of_the_write(compute: Callable[[Tensor], Tensor]) -> None:
    module, x = trace(lambda x: compute(x - 0.5)), torch.randn(50)
    times = compute(torch.ones(()))
    assert torch.equal(replace_op(module, "relu_", torch.tanh)(x), times * torch.tanh(x - 0.5))
    assert torch.equal(replace_op(module, "relu_", torch.tanh_)(x), times * torch.tanh(x - 0.5))
    inserted = insert_after(module, "relu_", torch.exp, outputs=True)
    assert torch.equal(inserted(x), times * torch.exp(torch.relu(x - 0.5)))


def test_a_view_of_what_a_replaced_operation_overwrote_reads_the_new_value() -> None:
    def compute(x: Tensor) -> Tensor:
        y = x - 0.5
        y[:, :2].relu_()
        return y

    x = torch.randn(3, 4)
    expected = x - 0.5
    expected[:, :2] = torch.tanh(expected[:, :2])
    assert torch.equal(replace_op(trace(compute), "relu_", torch.tanh)(x), expected)


def test_a_replaced_assignment_may_still_return_nothing() -> None:
    def compute(x: Tensor) -> Tensor:
        y = x - 0.5
        y[0] = 2.0
        return y

    def assign_negative(y: Tensor, index: int, value: float) -> None:
        y[index] = -value

    x = torch.randn(3)
    assert torch.equal(replace_op(trace(compute), operator.setitem, assign_negative)(x)[0], torch.tensor(-2.0))


def test_a_write_stays_if_a_replacement_no_longer_reads_it() -> None:
    module, x = trace(lambda x: (lambda y: torch.atan2(y * 1, y.relu_()) + y)(x - 0.5)), torch.randn(50)
    assert torch.equal(wrap(module, "atan2", lambda call, a, b: a)(x), (x - 0.5) + F.relu(x - 0.5))
    anything = op(torch.atan2, name="f")
    replaced = replace_pattern(module, lambda a, b: anything(a, b), lambda a, b, f: a * 1)
    assert torch.equal(replaced(x), (x - 0.5) + F.relu(x - 0.5))


def test_a_write_within_a_match_goes_with_it() -> None:
    module, x = trace(lambda x: torch.sigmoid((x - 0.5).relu_())), torch.randn(50)
    replaced = replace_pattern(module, lambda a: torch.sigmoid(op("relu_")(a)), lambda a: torch.tanh(a))
    assert torch.equal(replaced(x), torch.tanh(x - 0.5))
    assert "relu_" not in replaced.code


def test_a_value_is_not_inserted_where_views_keep_the_old_one() -> None:
    def compute(x: Tensor) -> Tensor:
        y = x - 0.5
        part = y.view(2, 2)
        y.relu_()
        return part.sum() + y

    with pytest.raises(CannotTransform, match="read later through views; use wrap"):
        insert_after(trace(compute), "relu_", torch.exp)
    with pytest.raises(CannotTransform, match="nothing reads 'neg'"):
        insert_after(trace(lambda x: (x.neg(), x)[1]), "neg", torch.exp, outputs=True)


def test_a_write_of_torchscript_stays() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.same = torch.jit.script(nn.ReLU(inplace=True)), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = x - 0.5
            self.same(self.act(y))
            return y

    x = torch.randn(50)
    assert torch.equal(remove(trace(Net().eval()))(x), F.relu(x - 0.5))
