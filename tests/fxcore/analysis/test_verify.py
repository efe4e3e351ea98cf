"""verify: errors of each output, the verdict, and the speed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxcore import trace
from fxcore.analysis.verify import Incomparable, verify
from fxcore.errors import BadArgument
from fxcore.transforms import fuse_conv_bn, insert_after, out_of_place, replace_activation, wrap
from tests.fxcore.model_list import filled


def test_errors_are_what_they_say() -> None:
    a = torch.tensor([3.0, 4.0, 0.0])
    b = torch.tensor([3.0, 4.0, 0.5])
    errors = verify(lambda x: a, lambda x: b, torch.zeros(1)).outputs["0"]
    assert errors.max_abs == pytest.approx(0.5)
    assert errors.relative == pytest.approx(0.1)
    assert errors.cosine == pytest.approx(25 / (5 * math.sqrt(25.25)))
    assert not errors.allclose


def test_equal_values_have_a_cosine_of_one() -> None:
    """Not of one less what squares and roots lose."""
    x = torch.rand(50_000, generator=torch.Generator().manual_seed(0))
    assert verify(lambda v: v, lambda v: v, x).cosine == 1


def test_nested_outputs_have_dotted_keys() -> None:
    def outputs(x: Tensor) -> dict[str, object]:
        return {"a": x, "b": (x, {"c": x, "n": 3})}

    found = verify(outputs, outputs, torch.ones(2))
    assert list(found.outputs) == ["a", "b.0", "b.1.c", "b.1.n"]
    assert found.allclose


@dataclass
class Output:
    logits: Tensor
    more: list[Tensor]


def test_dataclasses_are_compared_by_field() -> None:
    x = torch.ones(2)
    found = verify(lambda x: Output(x, [x, 2 * x]), lambda x: Output(x, [x, 3 * x]), x)
    assert found.outputs.keys() == {"logits", "more.0", "more.1"}
    assert [key for key, errors in found.outputs.items() if not errors.allclose] == ["more.1"]


@pytest.mark.parametrize("make", [lambda x: SimpleNamespace(x=x), lambda x: x.numpy(), lambda x: object()])
def test_what_cannot_be_compared_is_reported(make: Callable[[Tensor], object]) -> None:
    """A SimpleNamespace of tensors has an equality that raises, an array one for each element, an object none."""
    with pytest.raises(Incomparable, match=r"made is a \w+, whose values cannot be compared") as raised:
        verify(lambda x: {"x": x, "made": make(x)}, lambda x: {"x": x, "made": make(x)}, torch.ones(2))
    assert raised.value.extra["output"] == "made"


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_tolerance_follows_the_output_s_own_scale(scale: float) -> None:
    x = torch.linspace(-1, 1, 101) * scale
    assert verify(lambda v: v, lambda v: v + 5e-5 * scale, x).allclose
    assert not verify(lambda v: v, lambda v: v + 5e-4 * scale, x).allclose


def test_one_output_that_is_off_spoils_the_verdict() -> None:
    found = verify(lambda x: (x, x), lambda x: (x, x * 1.01), torch.ones(3))
    assert not found.allclose
    assert found.outputs["0"].allclose
    assert found.relative == pytest.approx(0.01, rel=1e-4)


def test_equal_nans_and_infinities_agree() -> None:
    special = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    found = verify(lambda x: special, lambda x: special.clone(), torch.zeros(1))
    assert found.allclose
    assert found.max_abs == 0
    assert not verify(lambda x: special, lambda x: torch.ones(4), torch.zeros(1)).allclose
    assert not verify(lambda x: torch.ones(4), lambda x: special, torch.zeros(1)).allclose


@pytest.mark.parametrize(
    ("a", "b"), [(math.inf, 5.0), (5.0, math.inf), (math.inf, -math.inf), (math.nan, 5.0), (5.0, math.nan)]
)
def test_nothing_is_near_an_infinity_or_nan(a: float, b: float) -> None:
    """Whatever else agrees, itself infinite or not."""
    x, y = torch.tensor([a, 2.0, math.inf]), torch.tensor([b, 2.0, math.inf])
    found = verify(lambda v: (v, x), lambda v: (v, y), torch.ones(3))
    assert (found.max_abs, found.relative, found.cosine, found.allclose) == (math.inf, math.inf, 0, False)


def test_zeros_and_nothing() -> None:
    found = verify(lambda x: x, lambda x: x, torch.zeros(3)).outputs["0"]
    assert (found.max_abs, found.relative, found.cosine, found.allclose) == (0, 0, 1, True)
    assert verify(lambda x: x, lambda x: x, torch.zeros(0, 3)).allclose
    off = verify(lambda x: x, lambda x: x + 1, torch.zeros(3))
    assert not off.allclose
    assert json.loads(json.dumps(off.as_dict(), allow_nan=False))["outputs"]["0"]["relative"] is None


def test_both_parts_of_complex_numbers_count() -> None:
    a, b = torch.tensor([3 + 4j, 1 - 2j]), torch.tensor([3 + 3j, 1 - 2j])
    errors = verify(lambda x: a, lambda x: b, torch.zeros(1)).outputs["0"]
    assert errors.max_abs == 1
    assert errors.relative == pytest.approx(abs(1j) / math.sqrt(25 + 5))
    assert errors.cosine == pytest.approx((9 + 12 + 5) / math.sqrt((25 + 5) * (18 + 5)))
    assert not errors.allclose
    # Also where one side lost them, or has them yet to be conjugated.
    assert verify(lambda x: a, lambda x: a.real, torch.zeros(1)).max_abs == 4
    assert verify(lambda x: a, lambda x: a.conj().resolve_conj().conj(), torch.zeros(1)).allclose
    assert verify(lambda x: a, lambda x: a.conj(), torch.zeros(1)).max_abs == 8


def test_sparse_values_are_compared() -> None:
    x = torch.eye(3)
    assert verify(lambda v: v.to_sparse(), lambda v: v.to_sparse(), x).max_abs == 0
    assert verify(lambda v: v.to_sparse(), lambda v: 3 * v, x).max_abs == 2


def test_other_outputs_are_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(Incomparable, match="shape"):
        verify(lambda v: v, lambda v: v[:2], x)
    with pytest.raises(Incomparable) as caught:
        verify(lambda v: {"a": v}, lambda v: {"b": v}, x)
    assert caught.value.extra["output"] == "a"


def test_in_place_work_reaches_neither_the_input_nor_the_other() -> None:
    x = -torch.ones(3)
    assert verify(nn.ReLU(inplace=True), nn.ReLU(), x).max_abs == 0
    assert torch.equal(x, -torch.ones(3))


def test_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the modules move: the medians of 4, 9 and 4 seconds and of 1, 1 and 7."""
    now = 0.0

    def lasting(*seconds: float) -> Callable[[Tensor], Tensor]:
        left = iter((100.0, *seconds))  # the first pass is for the values, and counts for nothing

        def module(x: Tensor) -> Tensor:
            nonlocal now
            now += next(left)
            return x

        return module

    monkeypatch.setattr(import_module("fxcore.analysis.verify"), "now", lambda device: now)
    assert verify(lasting(4, 9, 4), lasting(1, 1, 7), torch.ones(1), runs=3).speedup == 4.0
    assert verify(lasting(), lasting(), torch.ones(1)).speedup is None
    assert verify(lasting(4), lasting(2), torch.ones(1), runs=np.int64(1)).speedup == 2.0
    with pytest.raises(BadArgument, match="runs must be at least 0, not -1"):
        verify(lasting(), lasting(), torch.ones(1), runs=-1)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.act(self.first(x))
        return {"out": self.second(y), "sum": y.sum()}


def test_the_first_node_that_diverges_is_named() -> None:
    """By torchvision's name, and though what works in place overwrites what was right."""
    module = trace(InPlace().eval())
    x = torch.randn(3, 4)
    assert verify(module, out_of_place(module), x).first_divergence is None
    other = replace_activation(module, old="relu", new="silu")
    assert verify(module, other, x).first_divergence == "act"
    assert verify(module, other, x).as_dict()["first_divergence"] == "act"
    # Far from the output, and of a value that only one output reads.
    assert verify(module, insert_after(module, "second", torch.exp, outputs=True), x).first_divergence is None
    changed = copy.deepcopy(module)
    changed.second.weight.data += 1
    assert verify(module, changed, x).first_divergence == "second"
    # Functions have no nodes.
    assert verify(module, lambda v: other(v), x).first_divergence is None


def test_nodes_of_fused_models_diverge_only_where_something_was_changed() -> None:
    module = trace(filled("resnet18"))
    fused = fuse_conv_bn(module)
    x = torch.randn(1, 3, 32, 32)
    assert verify(module, fused, x).first_divergence is None
    fused.get_submodule("layer2.0.conv2").weight.data.mul_(2)
    assert verify(module, fused, x).first_divergence == "layer2.0.bn2"


def test_where_shapes_differ_the_node_is_named_too() -> None:
    module = trace(lambda x: torch.exp(torch.neg(x)))
    other = wrap(module, "neg", lambda f, v: f(v)[:1])
    with pytest.raises(Incomparable, match="the first node that differs is neg") as caught:
        verify(module, other, torch.ones(3))
    assert caught.value.extra == {"output": "0", "node": "neg"}


def test_inputs_in_containers_are_the_same_for_both() -> None:
    def add(maps: list[Tensor], more: dict[str, Tensor]) -> Tensor:
        return maps[0].add_(1) * more["y"].mul_(2)

    x, y = torch.ones(3), torch.ones(3)
    assert verify(add, add, ([x], {"y": y}), runs=1).max_abs == 0
    assert torch.equal(torch.stack([x, y]), torch.ones(2, 3))
