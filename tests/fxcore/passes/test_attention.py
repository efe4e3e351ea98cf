"""Attention weights: nodes that can be asked for, and the very weights that the modules use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models import VisionTransformer
from torchvision.models.swin_transformer import shifted_window_attention

from fxcore import trace
from fxcore.graph.annotate import observe
from fxcore.passes.attention import scaled_dot_product_weights
from fxcore.tracing.interpreter import Watcher
from fxcore.tracing.names import public_name
from fxcore.transforms import applied, attention_maps
from tests.fxcore.model_list import each, filled, small_input


def opened(model: nn.Module) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A traced model, and the same with its attention weights among its outputs."""
    original = trace(model, leaf_functions=(shifted_window_attention,))
    module = attention_maps(original)
    output = module.graph.find_nodes(op="output")[0]
    maps = {
        n.meta["path"]: n for n in module.graph.nodes if n.meta.get("path", "").split(".")[-1].startswith("attention")
    }
    output.args = ({"out": output.args[0], **maps},)
    module.recompile()
    return original, module


SHAPES = {
    "vit_b_32": (12, (1, 12, 17, 17)),
    "swin_t": (12, (1, 4, 3, 49, 49)),
    "swin_v2_t": (12, (1, 64, 3, 64, 64)),
    "mvit_v2_s": (3, (1, 1, None, None)),
}


@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize("name", each(SHAPES, frozenset(("vit_b_32", "swin_t"))))
def test_weights_of_each_family(name: str) -> None:
    original, module = opened(filled(name, shrink=True))
    x = small_input(name)
    with torch.no_grad():
        found = module(x)
        # Nothing else changed, not by a bit.
        assert torch.equal(found.pop("out"), original(x))
    count, shape = SHAPES[name]
    assert applied(module)[-1].changes == count == len(found)
    first = next(iter(found.values()))
    assert len(first.shape) == len(shape)
    assert all(want in (None, got) for want, got in zip(shape, first.shape, strict=True))
    for path, weights in found.items():
        assert weights.shape[0] == 1, path
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-4), path
        assert bool((weights >= 0).all()), path


def test_multi_head_attention_made_of_its_weights() -> None:
    """Weights times values, projected, is what the module returns."""
    torch.manual_seed(0)
    vit = VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8).eval()
    module = attention_maps(trace(vit))
    attention = vit.encoder.layers[0].self_attention
    seen: dict[str, Any] = {}
    with torch.no_grad():
        Watcher(module, lambda node, value: seen.update({public_name(node): value})).run(torch.randn(3, 3, 32, 32))
        x = seen["encoder.layers.encoder_layer_0.ln"]
        weights = seen["encoder.layers.encoder_layer_0.self_attention.attention"]
        values = (x @ attention.in_proj_weight[16:].T + attention.in_proj_bias[16:]).view(3, 5, 2, 4).transpose(1, 2)
        mixed = attention.out_proj((weights @ values).transpose(1, 2).reshape(3, 5, 8))
    assert torch.allclose(mixed, seen["encoder.layers.encoder_layer_0.self_attention"][0], atol=1e-6)


def test_options_given_by_position() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.attention(x, x, x, None, False, mask)[0]

    _, module = opened(Net().eval())
    x, mask = torch.randn(2, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    out, weights = attention(x, x, x, attn_mask=mask, average_attn_weights=False)
    found = module(x, mask)
    assert torch.allclose(found["out"], out, atol=1e-6)
    assert torch.equal(found["attention.attention"], weights)


@pytest.mark.parametrize("batch", [1, 2])
def test_window_attention_made_of_its_weights(batch: int) -> None:
    """Without a shift a window's weights times its values, projected, is what Swin's attention returns."""
    torch.manual_seed(0)
    x, bias = torch.randn(batch, 4, 4, 6), torch.randn(1, 2, 4, 4)
    qkv, proj = torch.randn(18, 6), torch.randn(6, 6)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return shifted_window_attention(x, qkv, proj, bias, [2, 2], 2, [0, 0], training=False)

    _, module = opened(Net().eval())
    found = module(x)
    weights = found["attention"]
    assert weights.shape == (batch, 4, 2, 4, 4)
    windows = x.view(batch, 2, 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(batch, 4, 4, 6)
    values = (windows @ qkv[12:].T).view(batch, 4, 4, 2, 3).transpose(2, 3)
    mixed = (weights @ values).transpose(2, 3).reshape(batch, 4, 4, 6) @ proj.T
    image = mixed.view(batch, 2, 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(batch, 4, 4, 6)
    assert torch.allclose(image, found["out"], atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_queries_that_may_attend_to_no_key_attend_to_none(kind: torch.dtype) -> None:
    query, key, value = torch.randn(3, 2, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    allowed = torch.ones(5, 5, dtype=torch.bool).tril(-1)
    mask = allowed if kind == torch.bool else torch.zeros(5, 5).masked_fill(~allowed, -torch.inf)
    weights = scaled_dot_product_weights(query, key, value, attn_mask=mask)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert not expected[:, :, 0].any()
    torch.testing.assert_close(weights @ value, expected)


@pytest.mark.parametrize(("dim", "annotated", "found"), [(-1, False, 1), (2, True, 1), (1, True, 0), (1, False, 0)])
@pytest.mark.parametrize("way", ["layer", "function", "method"])
def test_weights_sum_to_one_over_the_last_dimension(way: str, dim: int, annotated: bool, found: int) -> None:
    """Efficient Attention has a softmax of its queries over their channels."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Softmax(dim)

        def forward(self, x: Tensor) -> Tensor:
            ways = {"layer": self.layer, "function": lambda x: F.softmax(x, dim), "method": lambda x: x.softmax(dim)}
            return ways[way](x) @ x

    module = trace(Net().eval())
    if annotated:
        observe(module, [torch.rand(2, 4, 4)])
    assert applied(attention_maps(module))[-1].changes == found
