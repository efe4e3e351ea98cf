"""Passes that rewrite: fold, remove, replace, insert, wrap, decompose."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models import mobilenet_v3_small, resnet18
from torchvision.ops import StochasticDepth, stochastic_depth

from fxcore import trace
from fxcore.analysis.verify import verify
from fxcore.toolbox.decompose import RULES
from fxcore.toolbox.replace import ACTIVATIONS
from fxcore.tracing.names import names
from fxcore.transforms import (
    BadParameter,
    CannotTransform,
    applied,
    decompose,
    fold_normalization,
    fuse_conv_bn,
    insert_after,
    op,
    remove,
    replace_activation,
    replace_module,
    replace_op,
    replace_pattern,
    split_at,
    wrap,
)
from tests.fxcore.capture import traced
from tests.fxcore.written import Of

# normalisation


@pytest.mark.parametrize("padding", [0, 2, "same", (1, 0)])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_normalisation_folds_exactly(padding: int | str | tuple[int, int], groups: int, mode: str) -> None:
    conv = nn.Conv2d(3, 6, 4, padding=padding, groups=groups, padding_mode=mode, dilation=1)
    module = traced(nn.Sequential(conv, nn.ReLU()))
    mean, std = [0.1, 0.5, 0.7], [0.2, 0.3, 0.9]
    folded = fold_normalization(module, mean=mean, std=std)
    image = torch.rand(2, 3, 9, 9)
    shape = (1, 3, 1, 1)
    want = module((image - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape))
    assert torch.allclose(folded(image), want, atol=1e-5)
    pads = padding != 0 and mode == "zeros"
    assert any("padded" in str(n.target) for n in folded.graph.nodes) == pads
    assert not any("normalized" in str(n.target) for n in folded.graph.nodes)
    with pytest.raises(CannotTransform):
        fold_normalization(folded, mean=mean, std=std)


def test_returned_images_stay_normalised() -> None:
    module = traced(Of(lambda m, x: (m.conv(x), x), conv=nn.Conv2d(3, 4, 3)))
    folded = fold_normalization(module, mean=[0.5] * 3, std=[0.25] * 3)
    image = torch.rand(1, 3, 8, 8)
    found = verify(lambda v: module((v - 0.5) / 0.25), folded, image)
    assert found.relative < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normalised_images_stay_in_half_precision(dtype: torch.dtype) -> None:
    """GoogLeNet's own transform of its input reads the images before any convolution does."""
    model = Of(lambda m, x: m.conv(torch.cat([x[:, 1:], x[:, :1] * 0.5], 1)), conv=nn.Conv2d(3, 4, 3)).to(dtype)
    image = torch.rand(2, 3, 8, 8, dtype=dtype)
    folded = fold_normalization(traced(model), mean=[0.5] * 3, std=[0.25] * 3)
    # Both round once: dividing by a power of two rounds nothing.
    assert torch.equal(folded(image), model((image - 0.5) / 0.25))


# removal and replacement


def test_removal() -> None:
    layers = {"drop": nn.Dropout(), "same": nn.Identity(), "depth": StochasticDepth(0.5, "row")}
    model = traced(Of(lambda m, x: F.dropout(m.depth(m.same(m.drop(x))), training=m.training), **layers))
    removed = remove(model)
    assert applied(removed)[-1].changes == 4
    assert [n.op for n in removed.graph.nodes] == ["placeholder", "output"]
    assert applied(remove(model, dropout=False))[-1].changes == 1


def test_dropout_of_nothing_is_removed_in_any_mode() -> None:
    module = trace(lambda x: stochastic_depth(F.dropout(x, 0.0), 0.0, "row"))
    assert [n.op for n in remove(module.eval()).graph.nodes] == ["placeholder", "output"]
    x = torch.randn(4, 3)
    assert torch.equal(module(x), x)


def test_a_write_before_a_removed_call_stays() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x - 0.5
        m.same(m.act(y).flatten())  # nothing reads it, but y is overwritten
        return y

    x = torch.randn(50)
    removed = remove(traced(Of(forward, act=nn.ReLU(inplace=True), same=nn.Identity())))
    assert applied(removed)[-1].changes == 1
    assert torch.equal(removed(x), F.relu(x - 0.5))


def test_a_dropout_of_another_kind_stays() -> None:
    class Always(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, self.p, training=True)

    model = nn.Sequential(nn.Dropout(), Always(), nn.AlphaDropout())
    module = trace(model, leaf_modules=[Always])
    assert [n.target for n in remove(module).graph.nodes if n.op == "call_module"] == ["1"]


@pytest.mark.parametrize("kind", [nn.Identity, nn.Dropout, nn.ReLU])
def test_what_a_hook_does_stays(kind: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), kind(), nn.BatchNorm2d(3)).eval()
    model[1].register_forward_hook(lambda m, given, made: made.square())
    x = torch.randn(1, 3, 4, 4)
    for edit in (remove, decompose, fuse_conv_bn):
        assert verify(model, edit(traced(model)), x).allclose


def test_replacement_of_modules_by_class_and_pattern() -> None:
    module = traced(resnet18())
    swapped = replace_module(module, nn.ReLU, lambda old: nn.SiLU())
    assert applied(swapped)[-1].changes == 17
    assert sum(isinstance(m, nn.SiLU) for m in swapped.modules()) == 9
    assert not any(isinstance(m, nn.SiLU) for m in module.modules())
    some = replace_module(module, "layer4.*.relu", lambda old: nn.SiLU())
    assert applied(some)[-1].changes == 4
    assert names(some.graph) == names(module.graph)
    named = replace_module(module, "layer4.*.relu", "silu")
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(named(x), some(x))
    with pytest.raises(CannotTransform, match="no module 'layer5"):
        replace_module(module, "layer5.*", "silu")


def test_a_class_in_place_of_a_name_takes_no_settings_from_the_old_module() -> None:
    module, x = traced(nn.Sequential(nn.ReLU6(), nn.Hardtanh())), torch.randn(20) * 9
    assert torch.equal(replace_module(module, nn.ReLU6, nn.ReLU)(x), F.hardtanh(F.relu(x)))
    assert torch.equal(replace_module(module, nn.ReLU6, nn.GELU)(x), F.hardtanh(F.gelu(x)))
    assert torch.equal(replace_module(module, nn.ReLU6, nn.Sequential)(x), module(x))
    with pytest.raises(BadParameter, match="must return a module, not 3"):
        replace_module(module, nn.ReLU6, lambda old: 3)  # type: ignore[arg-type,return-value]


def test_replacement_of_functions_and_methods() -> None:
    module = trace(lambda x: torch.relu(x) + x.exp())
    x = torch.randn(5)
    assert torch.equal(replace_op(module, torch.relu, torch.sigmoid)(x), x.sigmoid() + x.exp())
    assert torch.equal(replace_op(module, "exp", torch.cos)(x), x.relu() + x.cos())


@pytest.mark.parametrize("new", sorted(ACTIVATIONS))
def test_activations(new: str) -> None:
    model = Of(lambda m, x: m.act(x) + torch.relu(x) + F.relu(x) + x.relu(), act=nn.ReLU())
    changed = replace_activation(traced(model), old="relu", new=new)
    assert applied(changed)[-1].changes == 4
    x = torch.randn(7)
    assert torch.allclose(changed(x), 4 * ACTIVATIONS[new](x), atol=1e-6)


# insertion


def test_insertion_and_the_outputs() -> None:
    module = traced(resnet18())
    changed = insert_after(module, "layer4.1.relu_1", "tanh")
    x = torch.randn(1, 3, 64, 64)
    back = split_at(module, "layer4.1.relu_1")
    assert torch.allclose(changed(x), back.back(*(v.tanh() for v in back.front(x))), atol=1e-6)
    with pytest.raises(CannotTransform, match="outputs"):
        insert_after(module, "fc", "sigmoid")
    assert torch.allclose(insert_after(module, "fc", "sigmoid", outputs=True)(x), module(x).sigmoid())
    assert "fc.probability" in names(insert_after(module, "fc", "sigmoid", outputs=True, name="probability").graph)
    with pytest.raises(CannotTransform):
        insert_after(module, "nothing", "tanh")
    with pytest.raises(BadParameter):
        insert_after(module, "fc", "eval", outputs=True)


def test_wrapping() -> None:
    module = traced(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    wrapped = wrap(module, "0", lambda call, x: call(x) - call(torch.zeros_like(x)))
    x = torch.randn(2, 3)
    assert torch.allclose(wrapped(x), (x @ module.get_submodule("0").weight.T).relu(), atol=1e-6)
    assert names(wrapped.graph)[-2:] == ["0", "1"]


def test_tensors_that_are_no_part_of_the_model_become_buffers() -> None:
    """In a wrapper, a rule and a replacement; one tensor is one buffer, and a parameter of the model's stays that."""
    model = Of(lambda m, x: torch.exp(x * m.scale) + torch.exp(-x), scale=nn.Parameter(torch.tensor([2.0, 3.0])))
    module = traced(model)
    table = torch.tensor([5.0, 7.0])
    x = torch.randn(4, 2)
    a, b = torch.exp(x * model.scale), torch.exp(-x)
    wrapped = wrap(module, "exp", lambda f, v: f(v) * table + model.scale)
    assert torch.equal(wrapped(x), a * table + model.scale + b)
    assert wrapped.state_dict().keys() == {"scale", "constant"}
    assert names(wrapped.graph) == ["x", "scale", "mul", "exp.exp_2", "exp.mul_1", "exp", "neg", "exp_1", "add"]
    ruled = decompose(module, [], rules={torch.exp: lambda v: torch.pow(table, v)})
    assert torch.equal(ruled(x), torch.pow(table, x * model.scale) + torch.pow(table, -x))
    assert ruled.state_dict().keys() == {"scale", "constant"}
    replaced = replace_pattern(module, lambda v: op(torch.exp, name="f")(v), lambda v, f: f(v).where(v > table, table))
    assert torch.equal(replaced(x), a.where(x * model.scale > table, table) + b.where(-x > table, table))
    # One more beside those that are there already.
    again = wrap(wrapped, "exp_1", lambda f, v: f(v) - torch.tensor(1.0))
    assert torch.equal(again(x), a * table + model.scale + (b - 1))


# decomposition


@pytest.mark.parametrize("name", sorted(RULES))
def test_rules_say_what_torch_says(name: str) -> None:
    function: Callable[[Tensor], Tensor] = ACTIVATIONS[name]

    module = trace(lambda x: function(x))
    simple = decompose(module, [name])
    assert applied(simple)[-1].changes == 1
    assert not any(n.target is function for n in simple.graph.nodes)
    assert verify(module, simple, torch.linspace(-8, 8, 401), atol=1e-6, rtol=1e-6).allclose
    assert simple.graph.find_nodes(op="output")[0].args[0].meta["path"] == names(module.graph)[-1]


def test_own_rules_and_other_settings() -> None:
    module = trace(lambda x: F.gelu(torch.square(x), approximate="tanh").neg())
    simple = decompose(module, ["gelu"], rules={torch.square: lambda x: x * x, "neg": lambda x: 0 - x})
    assert applied(simple)[-1].changes == 2
    assert any(n.target is F.gelu for n in simple.graph.nodes)
    x = torch.randn(9)
    assert torch.equal(simple(x), module(x))
    with pytest.raises(BadParameter):
        decompose(module, ["softmax"])


def test_decomposing_a_model() -> None:
    model = mobilenet_v3_small().eval()
    # Opened: by default torchvision's blocks of convolution, norm and activation are kept whole.
    module = trace(model, leaf_modules=(StochasticDepth,))
    simple = decompose(module)
    assert applied(simple)[-1].changes > 20
    assert verify(module, simple, torch.randn(1, 3, 64, 64)).relative < 1e-5


# what can change nothing


def test_several_operations_are_replaced_at_once() -> None:
    """As torch.fx's own documentation does: https://pytorch.org/docs/stable/fx.html#graph-manipulation"""
    module = fx.symbolic_trace(lambda x: torch.add(x, x) + x.add(x)).eval()
    changed = replace_op(module, {operator.add, torch.add, "add"}, torch.bitwise_and)
    assert applied(changed)[-1].changes == 3
    assert int(changed(torch.tensor(6))) == 6


class Activated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        (lambda m: replace_op(m, set(), torch.mul), "old"),
        (lambda m: replace_op(m, nn.ReLU, torch.mul), "old"),
        (lambda m: replace_op(m, [torch.relu, nn.ReLU()], torch.mul), "old"),
        (lambda m: replace_op(m, "torch.relu", torch.mul), "old"),
        (lambda m: replace_op(m, 7, torch.mul), "old"),
        (lambda m: replace_op(m, torch.relu, "mul"), "new"),
        (lambda m: replace_module(m, torch.relu, "gelu"), "old"),
        (lambda m: replace_module(m, nn.ReLU(), "gelu"), "old"),
        (lambda m: replace_module(m, nn.ReLU, nn.GELU()), "new"),
        (lambda m: replace_module(m, nn.ReLU, torch.nn), "new"),
        (lambda m: decompose(m, [], rules={nn.ReLU: lambda x: x}), "rules"),
        (lambda m: decompose(m, [], rules={nn.Conv2d: lambda x: x}), "rules"),
        (lambda m: decompose(m, [], rules={"relu_six": lambda x: x}), "rules"),
        (lambda m: decompose(m, [], rules={torch.relu: "gelu"}), "rules"),
        (lambda m: decompose(m, []), "operations"),
        (lambda m: decompose(m, rules=3), "rules"),
        (lambda m: decompose(m, 3), "operations"),
        (lambda m: decompose(m, [["relu"]]), "operations"),
        (lambda m: fold_normalization(m, mean="abc", std=3), "mean"),
        (lambda m: fold_normalization(m, mean=[0, 0, 0], std=None), "std"),
        (lambda m: remove(m, dropout=False, identity=False), "dropout"),
    ],
)
def test_what_can_change_nothing_is_refused(change: Callable[[fx.GraphModule], Any], parameter: str) -> None:
    with pytest.raises(BadParameter) as caught:
        change(traced(Activated()))
    assert caught.value.extra["parameter"] == parameter


def test_one_operation_to_decompose_may_be_a_word() -> None:
    assert applied(decompose(traced(Activated()), "relu"))[-1].changes == 1
