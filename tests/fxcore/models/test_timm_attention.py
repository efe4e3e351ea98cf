"""Attention weights of timm's models, against what timm itself computes where it does not use a fused kernel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.models._features_fx import get_notrace_functions, get_notrace_modules
from timm.models.cait import TalkingHeadAttn
from torch import Tensor, nn
from torch.fx import GraphModule

from fxcore import UserModel, build_extractor, load_model, model_graph, trace
from fxcore.models.user_models import user_entry
from fxcore.transforms import attention_maps
from tests.fxcore.model_list import SWEPT
from tests.seeded import seeded

# What timm keeps whole when it traces.
KEPT: dict[str, Any] = {"leaf_modules": tuple(get_notrace_modules()), "leaf_functions": get_notrace_functions()}


def softmaxes(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The weights that each attention of timm's hands to its dropout, by the attention's path."""
    seen: dict[str, Tensor] = {}
    for path, part in model.named_modules():
        if isinstance(getattr(part, "attn_drop", None), nn.Module):
            part.fused_attn = False
            part.attn_drop.register_forward_pre_hook(lambda m, args, path=path: seen.update({path: args[0].clone()}))
    with torch.no_grad():
        model(x)
    return seen


@pytest.mark.parametrize(
    ("architecture", "arguments", "prefix"),
    [
        ("test_vit", {}, 1),
        *(
            pytest.param(*case, marks=SWEPT)
            for case in [
                ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (2, 2), "num_heads": (3, 6)}, None),
                ("vit_small_patch16_dinov3", {"depth": 2}, 5),
                ("swinv2_tiny_window8_256", {"img_size": 64, "depths": (2, 2), "num_heads": (3, 6)}, None),
            ]
        ),
    ],
)
def test_weights_are_timms(architecture: str, arguments: dict[str, Any], prefix: int | None) -> None:
    made = seeded(timm.create_model, architecture, **arguments).eval()
    side = arguments.get("img_size", made.pretrained_cfg["input_size"][-1])
    own = UserModel(lambda: copy.deepcopy(made), preprocessing={"resize_size": side, "crop_size": side}, **KEPT)
    entry = user_entry("own", own)
    graph = model_graph(entry).with_nodes_of("attention_maps")
    # SigLIP's pooling attends without a dropout, so timm cannot be watched there.
    names = [name for name in graph.eval_nodes if name.endswith(".attn.attention")]
    extractor = build_extractor(graph, load_model(entry, "DEFAULT"), {"first": names[0], "last": names[-1]})
    first = extractor.outputs[0]
    assert (first.tokens.prefix if first.tokens is not None else None) == prefix
    x = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = extractor.module(x)
    expected = softmaxes(made, x)
    for key, name in (("first", names[0]), ("last", names[-1])):
        weights = expected[name.removesuffix(".attention")]
        assert found[key].shape == weights.shape
        assert torch.allclose(found[key], weights, atol=1e-5), name
    assert found["first"].shape[0] == 2 * first.rows_per_image


def attention_of(traced: GraphModule, path: str | None = None) -> GraphModule:
    """A module that returns its only attention's weights, or those of the attention at ``path``."""
    module = attention_maps(traced)
    [node] = [n for n in module.graph.nodes if n.meta.get("attention") and path in (None, n.meta.get("path"))]
    module.graph.output_node().args = (node,)
    module.recompile()
    return module


@pytest.mark.parametrize("fused", [True, False])
def test_weights_by_hand(fused: bool) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", reg_tokens=3, img_size=64).eval()
    attention = model.blocks[1].attn
    for block in model.blocks:
        block.attn.fused_attn = fused
    traced = trace(model, **KEPT, concrete_args={"attn_mask": None, "is_causal": False})
    module = attention_of(traced, "blocks.1.attn.attention")
    seen: list[Tensor] = []
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad(), attention.register_forward_pre_hook(lambda m, args: seen.append(args[0])):
        model(x)
        q, k, _ = attention.qkv(seen[0]).view(2, 20, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        by_hand = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        assert torch.allclose(module(x), by_hand, atol=1e-6)


def test_talking_heads_are_returned_before_they_are_mixed() -> None:
    torch.manual_seed(0)
    attention = TalkingHeadAttn(dim=24, num_heads=4).eval()
    module = attention_of(trace(attention))
    seen: list[Tensor] = []
    x = torch.rand(2, 7, 24)
    with torch.no_grad(), attention.proj_w.register_forward_pre_hook(lambda m, args: seen.append(args[0])):
        attention(x)
        found = module(x)
    assert torch.equal(found, seen[0].permute(0, 3, 1, 2))
    assert torch.allclose(found.sum(-1), torch.ones(2, 4, 7))


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_fused_attention_of_any_kind(mask: str) -> None:
    """Weights times values are what torch's function returns, keys shared by heads and masks included."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    bias = torch.randn(5, 5, generator=generator)
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": bias.relu().bool() | torch.eye(5).bool()},
        "float": {"attn_mask": bias, "scale": 0.5},
    }[mask]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    module = attention_of(trace(attend))
    assert torch.allclose(module(q, k, v) @ v.repeat_interleave(2, 1), attend(q, k, v), atol=1e-6)
