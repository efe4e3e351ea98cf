"""int8 against float32 for calls that torch's graph mode fuses, packs or observes wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxcore import trace
from fxcore.analysis.verify import verify
from fxcore.errors import UnknownNode
from fxcore.int8.quantize import Quantized, quantize

Forward = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.one, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.reflected = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.same = nn.Conv2d(8, 8, (1, 3), padding="same")
        self.prelu = nn.PReLU(8)
        self.linear = nn.Linear(8, 8)
        self.tracked = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.wide = nn.Linear(8, 5)
        self.tokens, self.untracked = nn.BatchNorm1d(8), nn.BatchNorm2d(8, track_running_stats=False)
        self.plain = nn.BatchNorm2d(8, affine=False)
        for norm in (self.one, self.other, self.tracked, self.tokens):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
        self.how = forward

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


CALLS: dict[str, Forward] = {
    "ReLU after one of two calls": lambda m, x: (m.a(x), F.relu(m.a(2 * x))),
    "ReLU after one of two linear calls": lambda m, x: (m.linear(x), F.relu(m.linear(2 * x))),
    "batch norm after one of two calls": lambda m, x: (m.a(x), m.one(m.a(x / 2))),
    "a batch norm for each of two calls": lambda m, x: (m.one(m.a(x)), m.other(m.a(x / 2))),
    "one batch norm after two layers": lambda m, x: m.one(m.a(x)) + m.one(m.b(x)),
    "the weight of a module that is called": lambda m, x: F.conv2d(F.relu(m.a(x)), m.a.weight, padding=1),
    "alpha": lambda m, x: torch.add(m.a(x), m.b(x), alpha=-2),
    "alpha before ReLU": lambda m, x: m.a(F.relu(torch.add(m.a(x), m.b(x), alpha=3))),
    "alpha of a number": lambda m, x: m.b(torch.add(m.a(x), 1.0, alpha=3)),
    "a product with a large number": lambda m, x: m.b(m.a(x) * 1000),
    "a sum with a large number": lambda m, x: (
        m.a(F.relu(m.a(x)) + 100) - 100 * m.a.weight.sum((1, 2, 3))[:, None, None]
    ),
    "running statistics of instance norm": lambda m, x: m.b(m.tracked(m.a(x))),
    "defaults of a functional": lambda m, x: F.conv2d(F.conv2d(x, m.a.weight), weight=m.b.weight, stride=2),
    "padding by name": lambda m, x: m.b(m.same(m.a(x))),
    "padding by reflection": lambda m, x: m.b(m.reflected(m.a(x))),
    "computed weights": lambda m, x: m.b(F.conv2d(x, m.a.weight / m.a.weight.norm())),
    "computed weights of a linear layer": lambda m, x: m.b(F.linear(x, m.linear.weight / m.linear.weight.norm())),
    "sums of sizes": lambda m, x: m.b(m.a(x).reshape(x.shape[:2] + (-1, x.shape[2] * 2 - 8))),  # noqa: RUF005
    "PReLU between two layers": lambda m, x: m.b(m.prelu(m.a(x))),
    "batch norm of tokens": lambda m, x: m.wide(F.relu(m.tokens(m.linear(x[:, :, 0])))),
    "batch norm of tokens of another width": lambda m, x: m.tokens(m.wide(x[:, :, 0])),
    "batch norm without running statistics": lambda m, x: m.b(F.relu(m.untracked(m.a(x)))),
    "batch norm without running statistics alone": lambda m, x: m.b(m.untracked(F.max_pool2d(m.a(x), 2))),
    "batch norm without weights": lambda m, x: m.b(m.plain(m.a(x))),
    "batch norm without weights alone": lambda m, x: m.b(m.plain(F.max_pool2d(m.a(x), 2))),
    "joined with a view of what is made from numbers": lambda m, x: m.b(
        torch.cat([m.a(x)[:, :4], torch.linspace(-1, 1, x.shape[2]).view(1, 1, -1, 1).expand(x.shape[0], 4, -1, 8)], 1)
    ),
    "a linear function by names": lambda m, x: F.linear(input=x, weight=m.wide.weight, bias=m.wide.bias),
}


@pytest.mark.parametrize("name", CALLS)
def test_int8_is_near_float32(name: str) -> None:
    torch.manual_seed(0)
    model, x = Model(CALLS[name]).eval(), torch.randn(4, 8, 8, 8)
    made = quantize(trace(model), [torch.randn(4, 8, 8, 8) for _ in range(4)]).module
    with torch.no_grad():
        expected, found = model(x), made(x)
    for one, other in zip(*(got if isinstance(got, tuple) else (got,) for got in (expected, found)), strict=True):
        assert (other - one).norm() < 0.05 * one.norm()


RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.relu": torch.relu,
    "torch.relu by name": lambda x: torch.relu(input=x),
    "functional by name": lambda x: F.relu(input=x),
    "method": lambda x: x.relu(),
    "method in place": lambda x: x.relu_(),
}


@pytest.mark.parametrize("name", RELUS)
@pytest.mark.parametrize(("layer", "fused"), [("a", "ConvReLU2d"), ("linear", "LinearReLU")])
def test_each_relu_is_fused_into_the_layer_before_it(name: str, layer: str, fused: str) -> None:
    x = torch.randn(4, 8, 8, 8)

    def quantized(relu: Callable[[Tensor], Tensor]) -> Quantized:
        torch.manual_seed(0)
        return quantize(trace(Model(lambda m, x: m.b(relu(getattr(m, layer)(x)))).eval()), x)

    found = quantized(RELUS[name])
    assert {one.name for one in found.layers} == {layer, "b"}
    assert type(found.module.get_submodule(layer)).__name__ == fused
    assert torch.equal(found.module(x), quantized(F.relu).module(x))


def test_what_is_kept_in_float_may_compute_sizes() -> None:
    class Shuffles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            one, other = self.a(x).chunk(2, 1)
            n, c = one.size(0), one.size(1)
            return self.b(torch.cat([other, one * c], 1).view(n, 2 * c, x.size(2), x.size(3)))

    class Net(nn.Sequential):
        pass

    model, x = Net(Shuffles(), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval(), torch.randn(4, 8, 8, 8)
    found = quantize(trace(model), x, keep=["0"])
    assert [layer.name for layer in found.layers] == ["2"]
    assert verify(model, found.module, x).relative < 0.02


def test_a_batch_norm_alone_is_kept_in_float() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)).eval()
    found = quantize(trace(model), torch.randn(4, 8, 8, 8), keep=["1"])
    assert type(found.module.get_submodule("1")) is nn.BatchNorm2d
    assert {layer.name for layer in found.layers} == {"0", "2"}


def test_what_is_inserted_for_torch_is_not_shown() -> None:
    model = trace(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Linear(8, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)).eval())
    assert {layer.name for layer in quantize(model, torch.randn(4, 8, 8, 8)).layers} == {"0", "1", "2", "3"}
    with pytest.raises(UnknownNode, match="no node 'positive'"):
        quantize(model, torch.randn(4, 8, 8, 8), keep=["positive"])


def test_copies_of_a_shared_layer_share_their_weights() -> None:
    shared = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    made = quantize(trace(nn.Sequential(*[shared] * 3).eval()), torch.randn(4, 8, 8, 8)).module
    packed = [part._packed_params for part in made.modules() if hasattr(part, "_packed_params")]
    assert len(packed) == 3
    assert len({id(one) for one in packed}) == 1
