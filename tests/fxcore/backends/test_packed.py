"""Packed convolutions: torch's own values, one copy of the weights, and nothing fused across what is read elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxcore.backends.eager import EagerModule
from fxcore.backends.packed import ACTIVATIONS, PackedConv2d, can_be_packed
from tests.fxcore.backends.conftest import Build
from tests.fxcore.written import Of

pytestmark = pytest.mark.skipif(not can_be_packed(nn.Conv2d(1, 1, 1)), reason="torch has no oneDNN convolutions here")

_CONVOLUTIONS: list[Callable[[], nn.Conv2d]] = [
    lambda: nn.Conv2d(8, 16, 3, padding=1),
    lambda: nn.Conv2d(3, 17, (5, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=False),
    lambda: nn.Conv2d(12, 24, 1, groups=4),
    lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16),
]


def layouts(x: Tensor) -> list[Tensor]:
    """``x`` in four kinds of memory."""
    return [x, x.contiguous(memory_format=torch.channels_last), F.pad(x, (1, 2))[..., 1:-2], x.mT.contiguous().mT]


@pytest.mark.parametrize("make", _CONVOLUTIONS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_are_those_of_torch(make: Callable[[], nn.Conv2d], activation: str) -> None:
    torch.manual_seed(0)
    conv = make()
    packed = PackedConv2d(conv)
    after = ACTIVATIONS[activation]
    with torch.inference_mode():
        for rows, size in ((1, 9), (3, 9), (2, 12)):
            for x in layouts(9 * torch.randn(rows, conv.in_channels, size, size)):
                torch.testing.assert_close(packed(x, activation=activation), after(conv(x)), rtol=1e-5, atol=1e-5)
                if activation == "none":
                    for other in layouts(torch.randn_like(conv(x))):
                        want = conv(x) + other
                        before = other.clone()
                        got = packed(x, other)
                        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
                        assert torch.equal(other, before)
                        overwritten = packed(x, other, overwrite=True)
                        torch.testing.assert_close(overwritten, want, rtol=1e-5, atol=1e-5)


def test_what_onednn_does_not_do_is_done_by_torch() -> None:
    conv = nn.Conv2d(4, 6, 3)
    packed = PackedConv2d(conv)
    with torch.inference_mode():
        x = torch.randn(2, 4, 8, 8)
        packed(x)  # from here on the weight is held packed only
        assert packed(x[:0]).shape == (0, 6, 6, 6)
        torch.testing.assert_close(packed(x[0]), conv(x[0]))
        bias = torch.randn(6, 1, 1)
        torch.testing.assert_close(packed(x, bias, overwrite=True), conv(x) + bias)
        for wrong in (x[:, :3], x[..., :2]):
            with pytest.raises(RuntimeError) as theirs:
                conv(wrong)
            with pytest.raises(RuntimeError) as ours:
                packed(wrong)
            assert str(ours.value) == str(theirs.value)
    assert not can_be_packed(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"))
    assert not can_be_packed(nn.Conv2d(1, 1, 3, padding="same"))
    assert not can_be_packed(nn.Conv2d(1, 1, 3).bfloat16())


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU])
def test_nan_stays(activation: Callable[[], nn.Module]) -> None:
    """oneDNN's ReLU would turn it into zero, and a broken input or checkpoint would give plausible values."""

    model = Of(
        lambda m, x: {"one": m.act(m.first(x)), "sum": m.act(m.first(x) + m.second(x))},
        first=nn.Conv2d(3, 8, 3),
        second=nn.Conv2d(3, 8, 3),
        act=activation(),
    ).eval()
    x = torch.randn(1, 3, 9, 9)
    x[0, 0, 4, 4] = torch.nan
    with torch.no_grad():
        torch.testing.assert_close(EagerModule(fx.symbolic_trace(model))(x), model(x), equal_nan=True)


class Residual(nn.Module):
    """What may and may not be fused or overwritten, by the keys it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        start = self.first(x)
        total = F.relu(self.second(start) + start)  # ``start`` is what is convolved: it must not be overwritten
        once_more = self.third(total) + total
        return {"total": total, "once_more": once_more}


def test_nothing_is_overwritten_that_is_read_or_returned() -> None:
    torch.manual_seed(0)
    model = Residual().eval()
    lowered = EagerModule(fx.symbolic_trace(model))
    calls = [node for node in lowered.module.graph.nodes if node.op == "call_module"]
    assert len(calls) == 3
    assert [len(node.args) for node in calls] == [1, 2, 2]
    assert not any("overwrite" in node.kwargs for node in calls)
    x = torch.randn(2, 4, 6, 6)
    got = lowered(x)
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)


class Hooked(nn.Module):
    """Modules whose hooks decide what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.spectral_norm(nn.Conv2d(4, 4, 3, padding=1))
        self.doubled, self.plain, self.other = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.shifted = nn.ReLU()
        self.given = nn.Linear(6, 6)
        self.constant = torch.randn(2, 4, 6, 6)
        self.doubled.register_forward_hook(lambda module, inputs, output: 2 * output)
        self.shifted.register_forward_hook(lambda module, inputs, output: output - inputs[0])
        self.given.register_forward_hook(lambda module, inputs, output: self.constant)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "weight": F.relu(self.normed(x)),
            "output": F.relu(self.doubled(x)),
            "activation": self.shifted(self.plain(x)),
            "in place": self.shifted(self.plain(x) * 3),
            "overwritten": F.relu(self.given(x)),
            "sum": self.other(x) + self.given(x),
        }


def test_hooks_are_run() -> None:
    torch.manual_seed(0)
    model = Hooked().eval()
    lowered = EagerModule(fx.symbolic_trace(model))
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(lowered(x), model(x), rtol=1e-5, atol=1e-5)


def test_sums_overwrite_only_unread_values(extractor: Build, batch: Tensor) -> None:
    def overwriting(*nodes: str) -> int:
        lowered = EagerModule(extractor("resnet18", *nodes).module)
        return sum("overwrite" in node.kwargs for node in lowered.module.graph.nodes)

    assert overwriting("layer4") == 7  # all of its sums but the first, whose memory is the max pooling's
    assert overwriting("layer3.1.relu_1", "layer4") == 7
    assert overwriting("layer3.0.relu_1", "layer4") == 6
