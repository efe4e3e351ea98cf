"""Four passes over a model of each family of torchvision's: each leaves the values what they were."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxcore import trace
from fxcore.analysis.verify import verify
from fxcore.models.catalog import get_model
from fxcore.transforms import applied, fold_constants, fold_normalization, fuse_conv_bn, out_of_place
from tests.fxcore.model_list import FAMILIES, TRACEABLE, each, filled, small_input

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
TOLERANCE = 1e-4
QUICK = frozenset(("mobilenet_v3_small", "resnet18", "swin_t", "vit_b_32"))


pytestmark = pytest.mark.usefixtures("memory_given_back")


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
@pytest.mark.parametrize("name", each((name for name in TRACEABLE if name in FAMILIES), QUICK))
def test_values_stay(name: str) -> None:
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


def test_there_are_107() -> None:
    assert len(TRACEABLE) >= 107
    assert get_model("resnet18").name in TRACEABLE
