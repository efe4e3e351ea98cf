"""The arithmetic of the report per layer, against torch's own rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxcore import trace
from fxcore.int8.quantize import quantize
from fxcore.int8.report import Rounding, rounded_weight, simulated
from fxcore.transforms import keep_float
from tests.fxcore.int8.test_quantize import make


@pytest.mark.parametrize(("low", "high"), [(0, 255), (0, 127), (-128, 127)])
def test_values_are_rounded_as_torch_does(low: int, high: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1000) * 3
    made = Rounding(0.03, low + 40, low, high)(x)
    torch.testing.assert_close(made, torch.fake_quantize_per_tensor_affine(x, 0.03, low + 40, low, high))


def test_ranges_hold_zero_and_both_ends() -> None:
    for least, most in ((-1.0, 3.0), (2.0, 5.0), (-5.0, -2.0), (0.0, 0.0)):
        rounding = Rounding.between(least, most)
        ends = torch.tensor([least, 0.0, most])
        assert float((rounding(ends) - ends).abs().max()) <= rounding.scale / 2 + 1e-6
        assert float(rounding(torch.zeros(1))) == 0.0


@pytest.mark.parametrize("shape", [(8, 3, 3, 3), (8, 5)])
def test_weights_are_rounded_as_torch_does(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    scales = weight.flatten(1).abs().amax(1) / 127.5
    expected = torch.fake_quantize_per_channel_affine(weight, scales, torch.zeros(8, dtype=torch.int32), 0, -128, 127)
    steps = weight / scales.view(-1, *[1] * (weight.ndim - 1))
    clear = (steps.frac().abs() - 0.5).abs() > 1e-3  # the largest of a channel lies between two steps
    torch.testing.assert_close(rounded_weight(weight)[clear], expected[clear])
    whole = torch.fake_quantize_per_tensor_affine(weight, float(weight.abs().max() / 127.5), 0, -128, 127)
    clear = weight.abs() < weight.abs().max()
    torch.testing.assert_close(rounded_weight(weight, per_channel=False)[clear], whole[clear])


def test_what_other_nodes_read_too_is_a_layer_of_its_own() -> None:
    """Each value of which an extractor returns both before and after a batch norm or ReLU has the error that it has."""

    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            conv = self.conv(x)
            norm = self.norm(conv)
            return {"conv": conv, "norm": norm, "relu": self.relu(norm)}

    torch.manual_seed(0)
    model = Tapped().eval()
    nn.init.normal_(model.norm.running_mean)
    nn.init.uniform_(model.norm.running_var, 0.01, 9)
    x = torch.randn(2, 3, 8, 8)
    found = quantize(trace(model), x)
    with torch.no_grad():
        expected, values = model(x), found.module(x)
    layers = {layer.name: layer for layer in found.layers}
    assert layers.keys() == expected.keys()
    for key, value in expected.items():
        measured = float((values[key] - value).norm() / value.norm())
        assert layers[key].accumulated == pytest.approx(measured, rel=0.1)


@pytest.mark.exhaustive
def test_layers_kept_in_float_are_not_simulated() -> None:
    extractor, rows = make("resnet18", ["C2"], 4)
    found = simulated(extractor.module, rows)
    layers = [layer.name for layer in found]
    assert [layer.sqnr for layer in found] == sorted(layer.sqnr for layer in found)
    assert {"conv1", "layer1.0.conv1", "layer1.0.add", "layer1.1.conv2"} <= set(layers)
    kept = simulated(keep_float(extractor.module, nodes=["layer1.0", "conv1"]), rows)
    assert {layer.name for layer in kept} == {n for n in layers if n != "conv1" and "layer1.0" not in n}


def test_what_other_threads_run_meanwhile_is_never_rounded() -> None:
    """A layer's own module keeps its weights: one that looks at them in the middle of a report sees no others."""
    torch.manual_seed(0)
    model = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval())
    layer = model.get_submodule("0")
    before, seen = layer.weight.detach().clone(), []
    layer.register_forward_hook(lambda *_: seen.append(torch.equal(layer.weight, before)))
    found = simulated(model, [(torch.rand(1, 3, 8, 8),) for _ in range(4)])
    assert found[0].relative > 0
    assert seen
    assert all(seen)


def test_weights_given_by_name_are_rounded_too() -> None:
    class Named(nn.Module):
        def __init__(self, named: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.named = nn.Parameter(torch.randn(8, 4)), named

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(input=x, weight=self.weight) if self.named else F.linear(x, self.weight)

    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    named, positional = (simulated(trace(Named(by)), [(x,)]) for by in (True, False))
    assert [layer.sqnr for layer in named] == [layer.sqnr for layer in positional]
