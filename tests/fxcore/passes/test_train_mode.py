"""Functions in train mode are refused as modules in train mode are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import ops

from fxcore import trace
from fxcore.backends import BACKENDS, Options
from fxcore.passes.effects import is_pure, is_random
from fxcore.transforms import CannotTransform, fold_constants, fuse_conv_bn, remove, split_at
from tests.fxcore.capture import traced


class Then(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.norm(self.conv(x)))


def drop_path(x: Tensor, drop_prob: float = 0.0, training: bool = False) -> Tensor:
    return x if drop_prob == 0.0 or not training else x * (torch.rand(1) > drop_prob)


def query(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, x


IN_TRAIN_MODE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dropout": (lambda x: F.dropout(x), "training=True"),
    "by name": (lambda x: F.dropout(x, p=0.1, training=True), "training=True"),
    "1d": (lambda x: F.dropout1d(x.flatten(2)), "training=True"),
    "2d": (lambda x: F.dropout2d(x), "training=True"),
    "alpha": (lambda x: F.alpha_dropout(x, 0.1, True), "training=True"),
    "torch's": (lambda x: torch.dropout(x, 0.5, True), "train=True"),
    "rrelu": (lambda x: F.rrelu(x, training=True), "training=True"),
    "depth": (lambda x: ops.stochastic_depth(x, 0.5, "row"), "training=True"),
    "block": (lambda x: ops.drop_block2d(x, 0.5, 3), "training=True"),
    "norm": (lambda x: F.batch_norm(x, None, None, training=True), "training=True"),
    "attention": (lambda x: F.scaled_dot_product_attention(*query(x), dropout_p=0.1), "dropout_p=0.1"),
    "by place": (lambda x: F.scaled_dot_product_attention(*query(x), None, 0.1), "dropout_p=0.1"),
}
IN_EVAL_MODE: dict[str, Callable[[Tensor], Tensor]] = {
    "told": lambda x: F.dropout(x, training=False),
    "of nothing": lambda x: F.dropout(x, p=0.0),
    "depth": lambda x: ops.stochastic_depth(x, 0.5, "row", training=False),
    "rrelu": lambda x: F.rrelu(x),
    "attention": lambda x: F.scaled_dot_product_attention(*query(x)),
    "norm": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)),
    "noise": lambda x: x + torch.rand_like(x),
}


@pytest.mark.parametrize("name", IN_TRAIN_MODE)
def test_functions_in_train_mode_are_refused_by_name(name: str) -> None:
    function, says = IN_TRAIN_MODE[name]
    module = traced(Then(function))
    node = list(module.graph.nodes)[-2]
    assert not is_pure(module, node)
    for edit in (remove, fold_constants, fuse_conv_bn, lambda m: split_at(m, "conv")):
        with pytest.raises(CannotTransform, match="eval mode") as caught:
            edit(module)
        assert caught.value.extra["node"] == node.meta["path"]
        assert says in caught.value.detail


@pytest.mark.parametrize("name", IN_EVAL_MODE)
def test_functions_in_eval_mode_and_deliberate_noise_are_not(name: str) -> None:
    module = traced(Then(IN_EVAL_MODE[name]))
    x = torch.randn(2, 3, 4, 4)
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    torch.testing.assert_close(fuse_conv_bn(module)(x), expected)


@pytest.mark.parametrize(
    "function",
    [
        *(function for function, _ in IN_TRAIN_MODE.values()),
        *IN_EVAL_MODE.values(),
        lambda x: F.fractional_max_pool2d(x, 1, output_size=3),
        lambda x: F.fractional_max_pool2d(x, 1, output_size=3, _random_samples=x.sigmoid().mean(3)[..., :2]),
        nn.Sequential(nn.FractionalMaxPool2d(1, output_size=3)).eval(),
        nn.Sequential(nn.FractionalMaxPool2d(1, output_size=3, _random_samples=torch.rand(2, 3, 2))).eval(),
        lambda x: F.scaled_dot_product_attention(x, x, x, None, x.shape[0] / 4),
        lambda x: torch.native_dropout(x, 0.5, False)[0],
        lambda x: F.gumbel_softmax(x),
        lambda x: x.bernoulli(0.5),
    ],
)
def test_a_function_is_random_if_its_runs_differ(function: Callable[[Tensor], Tensor]) -> None:
    x, module = torch.randn(2, 3, 4, 4), trace(function)
    first = function(x)
    differ = any(not torch.equal(function(x), first) for _ in range(20))
    assert any(is_random(module, node) for node in module.graph.nodes) == differ


@pytest.mark.parametrize(("rate", "refused"), [(0.0, False), (0.1, True)])
def test_what_a_function_of_one_s_own_does_in_training_is_refused(rate: float, refused: bool) -> None:
    model = Then(lambda x: drop_path(x, rate, True)).eval()
    module = trace(model, leaf_functions=[drop_path])
    if refused:
        with pytest.raises(CannotTransform, match="drop_path is called with training=True"):
            remove(module)
    else:
        remove(module)


def test_eager_runs_a_model_that_drops_out_in_eval_mode_as_it_is() -> None:
    model = Then(lambda x: {"whole": x, "dropped": F.dropout(x)})  # type: ignore[arg-type,return-value]
    x = torch.randn(1, 3, 8, 8)
    lowered = BACKENDS["eager"].lower(traced(model), (x,), Options())
    with torch.no_grad():
        one, two = lowered(x), lowered(x)
    assert not torch.equal(one["dropped"], two["dropped"])
    kept = one["dropped"] != 0
    torch.testing.assert_close(one["dropped"][kept], 2 * one["whole"][kept])
