"""Small modules made at random and models of torchvision's, transformed: whatever comes out gives the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fxcore import trace
from fxcore.analysis.verify import verify
from fxcore.transforms import (
    applied,
    apply_transforms,
    decompose,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    fold_constants,
    fold_normalization,
    fuse_conv_bn,
    fuse_linear_bn,
    normalize_arguments,
    out_of_place,
    remove,
    split_at,
)
from tests.fxcore.model_list import each, filled, small_input

PASSES = [
    fuse_conv_bn,
    fuse_linear_bn,
    fold_constants,
    out_of_place,
    remove,
    decompose,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    normalize_arguments,
]
Pass = Callable[[fx.GraphModule], fx.GraphModule]
STEPS = ("conv", "grouped", "transposed", "norm", "relu", "relu_", "silu", "drop", "same", "add", "scale", "tap")


class Random(nn.Module):
    """A chain of steps with skips between them; some steps share their module with an earlier one."""

    def __init__(self, steps: list[tuple[str, int]], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.steps = steps
        self.parts = nn.ModuleList()
        for kind, choice in steps:
            earlier = [m for m, (k, _) in zip(self.parts, steps, strict=False) if k == kind]
            # One time in three a module of the same kind is used again.
            self.parts.append(earlier[choice % len(earlier)] if earlier and choice % 3 == 0 else self._make(kind))
        self.scale = nn.Parameter(torch.rand(4, 1, 1, generator=generator) + 0.5)
        for parameter in self.parts.parameters():
            parameter.data.uniform_(-0.6, 0.6, generator=generator)
        for module in self.parts:
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-1, 1, generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3))

    @staticmethod
    def _make(kind: str) -> nn.Module:
        made: dict[str, nn.Module] = {
            "conv": nn.Conv2d(4, 4, 3, padding=1),
            "grouped": nn.Conv2d(4, 4, 1, groups=2, bias=False),
            "transposed": nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2),
            "norm": nn.BatchNorm2d(4),
            "relu": nn.ReLU(),
            "relu_": nn.ReLU(inplace=True),
            "silu": nn.SiLU(),
            "drop": nn.Dropout(),
        }
        return made.get(kind, nn.Identity())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        values, taps = [x], {}
        for index, ((kind, choice), part) in enumerate(zip(self.steps, self.parts, strict=True)):
            last = values[-1]
            if kind == "add":
                # Not by in-place steps' inputs: what those hold depends on the order of execution.
                last = last + values[choice % len(values)]
            elif kind == "scale":
                last = last * self.scale.exp().view(1, 4, 1, 1)
            elif kind == "tap":
                taps[f"tap{index}"] = last
            elif kind == "relu_":
                last = part(last + 0)
            else:
                last = part(last)
            values.append(last)
        return {**taps, "map": values[-1], "head": self.head(values[-1])}


CHAINS = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 30)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHAINS, st.lists(st.sampled_from(PASSES), min_size=1, max_size=4), st.integers(0, 1000), st.integers(0, 100))
def test_passes_keep_values(steps: list[tuple[str, int]], passes: list[Pass], seed: int, cut: int) -> None:
    torch.manual_seed(seed)
    model = Random(steps, seed).eval()
    original = trace(model)
    code, state = original.code, {k: v.clone() for k, v in original.state_dict().items()}
    x = torch.randn(2, 4, 5, 5)
    module = original
    for one in passes:
        module = one(module)
    found = verify(original, module, x)
    assert found.allclose, (found.outputs, module.code)
    assert original.code == code
    assert all(torch.equal(v, state[k]) for k, v in original.state_dict().items())
    names = [n.name for n in module.graph.nodes if n.op not in ("output", "get_attr")]
    halves = split_at(module, names[cut % len(names)])
    assert verify(module, halves, x).max_abs == 0
    # In-place operations may write to the images, so they are normalised only once nothing does.
    folded = fold_normalization(out_of_place(module), mean=[0.5] * 4, std=[0.2] * 4)
    assert verify(lambda v: module((v - 0.5) / 0.2), folded, torch.rand(2, 4, 5, 5)).allclose


@settings(max_examples=6, deadline=None)
@given(st.permutations(["fuse_conv_bn", "fuse_linear_bn", "fold_constants", "out_of_place", "remove", "decompose"]))
def test_named_passes_in_any_order(order: list[str]) -> None:
    steps = [("conv", 1), ("norm", 1), ("relu", 1), ("tap", 0), ("conv", 0), ("norm", 2), ("drop", 0), ("add", 3)]
    model = Random(steps, 0).eval()
    original = trace(model)
    module = apply_transforms(original, order)
    assert verify(original, module, torch.randn(2, 4, 5, 5)).allclose
    assert not any(isinstance(m, (nn.BatchNorm2d, nn.BatchNorm1d)) for m in module.modules())


MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
TOLERANCE = 1e-4
QUICK = frozenset(("mobilenet_v3_small", "resnet18", "swin_t", "vit_b_32"))
NAMES = [
    *sorted(QUICK),
    *("convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "lraspp_mobilenet_v3_large", "mnasnet0_5"),
    *("mvit_v2_s", "quantized_mobilenet_v2", "regnet_y_400mf", "shufflenet_v2_x0_5", "swin3d_t", "vgg11"),
]


def batch_norms(module: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def tapped(module: fx.GraphModule) -> fx.GraphModule:
    """The module with some inner values beside its own output: one every twentieth convolution, norm or addition."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    own = graph.graph_copy(module.graph, copies)
    kinds = ("conv", "bn", "norm", "add", "linear", "attn")
    chosen = [n for n in module.graph.nodes if n.op.startswith("call_") and any(k in n.name for k in kinds)][10::20]
    graph.output({"out": own, **{n.name: copies[n] for n in chosen if n.name != "out"}})
    return fx.GraphModule(module, graph).eval()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize("name", each(NAMES, QUICK))
def test_passes_keep_the_values_of_torchvisions_models(name: str) -> None:
    model = filled(name, shrink=True)
    traced = trace(model)
    x = small_input(name)
    state = {k: v._version for k, v in model.state_dict().items()}
    code = traced.code

    pure = out_of_place(traced)
    original = tapped(pure)
    # Each model runs as seldom as can be: half of these are billions of operations.
    with torch.no_grad():
        expected = original(x.clone())
    found = verify(traced, lambda v: expected["out"], x)
    assert found.max_abs == 0.0
    assert not any(getattr(m, "inplace", None) is True for m in pure.modules())

    fused, folded = fuse_conv_bn(original), fold_constants(original)
    for transformed in (fused, folded):
        if applied(transformed)[-1].changes == 0:
            assert transformed.code == original.code
            continue
        found = verify(lambda v: expected, transformed, x, rtol=TOLERANCE, atol=TOLERANCE)
        assert found.allclose, (applied(transformed), found.outputs)
        assert found.relative < TOLERANCE, applied(transformed)
    assert batch_norms(fused) + applied(fused)[-1].changes >= batch_norms(original)
    assert batch_norms(fused) < max(1, batch_norms(original))

    normalized = fold_normalization(original, mean=MEAN.tolist(), std=STD.tolist())
    shape = (1, 3, *[1] * (x.ndim - 2))
    found = verify(lambda v: expected, lambda v: normalized(v * STD.view(shape) + MEAN.view(shape)), x)
    assert found.relative < TOLERANCE
    assert found.allclose

    assert traced.code == code
    assert {k: v._version for k, v in model.state_dict().items()} == state
    assert not any(m.training for m in (*fused.modules(), *normalized.modules()))
