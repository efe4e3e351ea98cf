"""Batch norms folded into convolutions and linear layers: where they are, and where they must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.ops import Conv2dNormActivation, FrozenBatchNorm2d

from fxcore import create_extractor, trace
from fxcore.analysis.verify import verify
from fxcore.tracing.interpreter import Watcher
from fxcore.transforms import CannotTransform, applied, apply_transforms, fuse_conv_bn, fuse_linear_bn, split_at
from tests.fxcore.written import Of


def lived(model: nn.Module) -> nn.Module:
    """Statistics and scales as after some training."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if hasattr(module, "running_var") and module.running_var is not None:
            module.running_mean.uniform_(-1, 1, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            if module.weight is not None:
                module.weight.data.uniform_(-2, 2, generator=generator)
                module.bias.data.uniform_(-1, 1, generator=generator)
    return model.eval()


def traced(model: nn.Module) -> fx.GraphModule:
    return trace(lived(model))


def norms(module: fx.GraphModule) -> int:
    kinds = (nn.modules.batchnorm._BatchNorm, FrozenBatchNorm2d)
    calls = sum(n.target is F.batch_norm for n in module.graph.nodes)
    return calls + sum(isinstance(m, kinds) for m in module.modules())


def check(model: nn.Module, x: Tensor, changes: int, left: int = 0) -> fx.GraphModule:
    original = traced(model)
    fused = fuse_conv_bn(original)
    found = verify(original, fused, x)
    assert found.allclose
    assert found.relative < 1e-5
    assert applied(fused)[-1].changes == changes
    assert norms(fused) == left
    return fused


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_kind_of_convolution(dimensions: int, transposed: bool, groups: int, bias: bool) -> None:
    kind = getattr(nn, f"ConvTranspose{dimensions}d" if transposed else f"Conv{dimensions}d")
    norm = getattr(nn, f"BatchNorm{dimensions}d")
    model = nn.Sequential(kind(4, 6, 3, stride=2, padding=1, groups=groups, bias=bias), norm(6), nn.ReLU())
    fused = check(model, torch.randn(2, 4, *[8] * dimensions), changes=1)
    assert sorted(fused.state_dict()) == ["0.bias", "0.weight"]


@pytest.mark.parametrize(
    ("conv", "norm"),
    [
        (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)),
        (nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4)),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4)),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4)),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"), nn.BatchNorm2d(4)),
    ],
)
def test_other_settings(conv: nn.Module, norm: nn.Module) -> None:
    check(nn.Sequential(conv, norm), torch.randn(1, 3, 8, 8), changes=1)


def test_inside_a_leaf_module() -> None:
    leaf = Conv2dNormActivation(3, 4, inplace=False)
    fused = check(nn.Sequential(leaf, nn.Sequential(Conv2dNormActivation(4, 4))), torch.randn(1, 3, 8, 8), changes=2)
    assert isinstance(fused.get_submodule("0"), Conv2dNormActivation)
    assert [n for n, _ in leaf.named_children()] == ["0", "1", "2"]


def test_a_leaf_called_twice_is_made_once() -> None:
    twice = Of(lambda m, x: m.block(m.block(x)), block=Conv2dNormActivation(3, 3))
    fused = check(twice, torch.randn(1, 3, 8, 8), changes=1)
    assert sum(isinstance(m, nn.Conv2d) for m in fused.modules()) == 1


class Functional(nn.Module):
    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 3, 3) if transposed else torch.randn(6, 4, 3, 3))
        self.norm = nn.BatchNorm2d(6)
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv_transpose2d(x, self.weight) if self.transposed else F.conv2d(x, self.weight, padding=1)
        n = self.norm
        return F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, eps=n.eps)


@pytest.mark.parametrize("transposed", [False, True])
def test_functions(transposed: bool) -> None:
    fused = check(Functional(transposed), torch.randn(1, 4, 8, 8), changes=1)
    assert {n.op for n in fused.graph.nodes} == {"placeholder", "get_attr", "call_function", "output"}
    assert sum(n.op == "get_attr" for n in fused.graph.nodes) == 2


class SharedTensors(nn.Module):
    """Two batch norms, or two convolutions, of the same tensors that differ in one argument."""

    def __init__(self, way: str, linear: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4) if linear else nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm1d(4) if linear else nn.BatchNorm2d(4)
        self.one, self.other = nn.Parameter(torch.randn(4, 3, 1, 1)), nn.Parameter(torch.randn(4, 3, 1, 1))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        if self.way == "eps":
            a, b = (F.batch_norm(self.layer(x), n.running_mean, n.running_var, eps=eps) for eps in (1e-5, 1.0))
        elif self.way == "names":
            a = F.batch_norm(self.layer(x), n.running_mean, n.running_var, weight=n.weight)
            b = F.batch_norm(self.layer(x), n.running_mean, n.running_var, bias=n.weight)
        elif self.way == "order":
            fixed = {"running_var": n.running_var, "running_mean": n.running_mean}
            a, b = (F.batch_norm(**fixed, input=self.layer(x), eps=eps) for eps in (1e-5, 1.0))
        else:
            a, b = (n(F.conv2d(weight=weight, input=x)) for weight in (self.one, self.other))
        out: Tensor = a - 2 * b
        return out


@pytest.mark.parametrize(
    ("way", "linear"),
    [*((way, linear) for way in ("eps", "names", "order") for linear in (False, True)), ("weights", False)],
)
def test_pairs_that_share_tensors_are_different_pairs(way: str, linear: bool) -> None:
    """Also where the input is not the first argument."""
    original = traced(SharedTensors(way, linear))
    fused = fuse_linear_bn(original, assume_2d=True) if linear else fuse_conv_bn(original)
    assert applied(fused)[-1].changes == 2
    assert verify(original, fused, torch.randn(2, 3) if linear else torch.randn(2, 3, 4, 4)).relative < 1e-5
    assert all(node.users for node in fused.graph.nodes if node.op == "get_attr")


def values(module: fx.GraphModule, x: Tensor) -> dict[str, Tensor]:
    """What every node of the graph makes, by both of its names."""
    found: dict[str, Tensor] = {}

    def note(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor) and node.op != "output":
            found.update({node.name: value, node.meta["path"]: value})

    with torch.no_grad():
        Watcher(module, note).run(x)
    return found


class Viewed(nn.Module):
    def __init__(self, view: Any, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.view = nn.Conv2d(3, 4, 3), norm, view

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.view(self.conv(x)))
        return out


KEEP = {
    "flatten": (lambda y: y.flatten(2), nn.BatchNorm1d(4)),
    "by name": (lambda y: torch.flatten(input=y, start_dim=2), nn.BatchNorm1d(4)),
    "view": (lambda y: y.view(y.shape[0], y.shape[1], -1), nn.BatchNorm1d(4)),
    "reshape": (lambda y: y.reshape(y.size(0), 4, -1), nn.BatchNorm1d(4)),
    "unsqueeze": (lambda y: y.unsqueeze(-1), nn.BatchNorm3d(4)),
    "dropout": (nn.Dropout(), nn.BatchNorm2d(4)),
}
# With these a batch norm sees other channels than the convolution made, though the numbers fit.
MIX = {
    "swap": (lambda y: y.transpose(1, 2), nn.BatchNorm2d(4)),
    "split": (lambda y: y.view(-1, 4, 4), nn.BatchNorm1d(4)),
    "merge": (lambda y: y.view(4, 4, -1), nn.BatchNorm1d(4)),
}


@pytest.mark.parametrize("name", KEEP)
def test_through_views_that_keep_channels(name: str) -> None:
    """On the way no name has another value than it had."""
    model, x = Viewed(*KEEP[name]), torch.randn(2, 3, 6, 6)
    fused = check(model, x, changes=1)
    before, after = values(traced(model), x), values(fused, x)
    assert "norm" in after
    for key in before.keys() & after.keys():
        assert torch.allclose(after[key], before[key], atol=1e-5), key


@pytest.mark.parametrize(
    "reads",
    [
        lambda h, y: y.to(h.dtype).to(h.device),
        lambda h, y: y / h.nelement() + h.ndimension(),
        lambda h, y: y / torch.numel(h),
    ],
)
def test_reading_what_values_do_not_change_is_no_branch(reads: Callable[[Tensor, Tensor], Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.conv(x)
        return reads(h, m.norm(h))

    check(Of(forward, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4)), torch.randn(2, 3, 6, 6), changes=1)


def test_names_of_what_is_gone_are_refused() -> None:
    """Neither by its path nor by its name in the graph: what is there has the batch norm's value."""
    convolution = traced(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    dense = linear(nn.Flatten())
    for original, step, gone, norm, x in (
        (convolution, "fuse_conv_bn", ("0", "_0"), ("1", "_1"), torch.randn(1, 3, 8, 8)),
        (dense, "fuse_linear_bn", ("1", "_1"), ("2", "_2"), torch.randn(4, 2, 3)),
    ):
        seen: dict[str, Tensor] = {}
        model = original.get_submodule(norm[0])
        hook = model.register_forward_hook(lambda m, given, made, seen=seen: seen.update(norm=made))  # type: ignore[misc]
        original(x)
        hook.remove()
        for name in gone:
            with pytest.raises(CannotTransform, match="no node"):
                apply_transforms(original, [step, {"name": "insert_after", "node": name, "function": "tanh"}])
        fused = apply_transforms(original, [step])
        for name in norm:
            assert torch.allclose(split_at(fused, name).front(x)[-1], seen["norm"], atol=1e-5)


def branch(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(y) + y


@pytest.mark.parametrize(
    "model",
    [
        *(Viewed(view, norm) for view, norm in MIX.values()),
        Of(branch, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        # Its weight is made anew in each call.
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)),
    ],
    ids=[*MIX, "branch", "statistics of the batch", "weight norm"],
)
def test_what_cannot_be_folded_stays(model: nn.Module) -> None:
    check(model, torch.randn(4, 3, 6, 6), changes=0, left=1)


def test_not_where_channels_come_first() -> None:
    """Without a batch dimension the batch norm's channels are positions, here as many as there are channels."""
    torch.manual_seed(0)
    long, wide = nn.BatchNorm1d(8), nn.BatchNorm2d(8)
    for norm in (long, wide):
        norm.running_mean.normal_()
    cases = [
        (nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), long).eval(), torch.randn(4, 8)),
        (nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), wide).eval(), torch.randn(4, 8, 5, 6)),
    ]
    for model, x in cases:
        for graph in (create_extractor(model, ["1"], x), *([trace(model)] if x.ndim == 4 else [])):
            assert applied(fuse_conv_bn(graph))[-1].changes == 0
    batched, x = create_extractor(cases[0][0], ["1"], torch.randn(2, 4, 8)), torch.randn(2, 4, 8)
    fused = fuse_conv_bn(batched)
    assert applied(fused)[-1].changes == 1
    assert torch.allclose(fused(x)["1"], cases[0][0](x), atol=1e-5)


@pytest.mark.parametrize(("node", "changes"), [("0", 0), ("1", 1), ("2", 1)])
def test_not_across_a_tapped_node(node: str, changes: int) -> None:
    model = lived(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    graph = trace(model).graph
    by_path = {n.meta.get("path"): n for n in graph.nodes}
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = ({"out": output.args[0], "tap": by_path[node]},)
    original = fx.GraphModule(model, graph).eval()
    fused = fuse_conv_bn(original)
    assert applied(fused)[-1].changes == changes
    found = verify(original, fused, torch.randn(2, 3, 8, 8))
    assert list(found.outputs) == ["out", "tap"]
    assert found.relative < 1e-5


class Doubled(nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("whole", [Doubled, nn.Sequential])
def test_not_through_an_identity_that_is_none(whole: type[nn.Module]) -> None:
    model = lived(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), Doubled(), nn.BatchNorm2d(4))))
    original = trace(model, leaf_modules=[whole])
    kept = fuse_conv_bn(original)
    assert applied(kept)[-1].changes == 0
    x = torch.randn(1, 3, 8, 8)
    assert verify(model, kept, x).max_abs == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    model = lived(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    half = fuse_conv_bn(fx.symbolic_trace(model).to(dtype))
    exact = fuse_conv_bn(fx.symbolic_trace(model.double()))
    weight = half.get_submodule("0").weight
    assert weight.dtype == dtype
    assert torch.equal(weight, exact.get_submodule("0").weight.to(dtype))


def test_memory_format_stays() -> None:
    model = lived(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16))).to(memory_format=torch.channels_last)
    assert (
        fuse_conv_bn(fx.symbolic_trace(model))
        .get_submodule("0")
        .weight.is_contiguous(memory_format=torch.channels_last)
    )


def linear(*before: nn.Module) -> fx.GraphModule:
    return traced(nn.Sequential(*before, nn.Linear(6, 5), nn.BatchNorm1d(5)))


def test_linear() -> None:
    original = linear(nn.Flatten())
    fused = fuse_linear_bn(original)
    assert applied(fused)[-1].changes == 1
    assert verify(original, fused, torch.randn(4, 2, 3)).relative < 1e-5


def test_linear_of_unknown_rank_stays() -> None:
    original = linear()
    kept = fuse_linear_bn(original)
    assert applied(kept)[-1].changes == 0
    # As many positions as channels: what torch's own fusion gets wrong.
    assert verify(original, kept, torch.randn(2, 5, 6)).max_abs == 0
    assert applied(fuse_linear_bn(original, assume_2d=True))[-1].changes == 1


class SharedPair(nn.Module):
    """A convolution and a batch norm that are called several times, in the ways that ``calls`` writes."""

    def __init__(self, calls):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        for norm in (self.bn, self.other):
            nn.init.uniform_(norm.running_var, 0.5, 3)
            nn.init.normal_(norm.running_mean)
            nn.init.normal_(norm.weight)
        self.calls = calls

    def forward(self, x, y):
        return eval(self.calls, {"conv": self.conv, "bn": self.bn, "other": self.other, "x": x, "y": y})


@pytest.mark.parametrize(
    ("calls", "changes", "convolutions"),
    [
        ("bn(conv(x)) + bn(bn(conv(y)))", 3, 2),
        ("bn(bn(conv(x))) + bn(conv(y))", 3, 2),
        ("bn(bn(bn(conv(x)))) + bn(bn(conv(y)))", 5, 2),
        ("bn(bn(conv(x)))", 2, 1),
        ("bn(conv(bn(conv(x)))) + conv(y)", 2, 2),
        ("other(bn(conv(x))) + bn(other(conv(y)))", 4, 2),
        ("other(bn(conv(x))) + bn(conv(y)) + conv(x + y)", 3, 3),
        ("bn(conv(x)) + other(conv(y)) + bn(bn(x))", 2, 2),
        ("bn(conv(x)) + other(conv(x)) + bn(conv(y))", 3, 2),
    ],
)
def test_shared_modules_called_in_different_ways(calls, changes, convolutions):
    model = SharedPair(calls).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    fused = fuse_conv_bn(trace(model))
    with torch.no_grad():
        torch.testing.assert_close(fused(x, y), model(x, y), rtol=1e-4, atol=1e-4)
    assert applied(fused)[-1].changes == changes
    assert sum(isinstance(m, nn.Conv2d) for m in fused.modules()) == convolutions
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_two_norms_in_a_row_keep_the_name_of_the_convolution():
    fused = fuse_conv_bn(trace(SharedPair("bn(other(conv(x)))").eval()))
    assert {name for name, _ in fused.named_parameters()} == {"conv.weight", "conv.bias"}
