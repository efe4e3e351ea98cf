"""Which values are attention weights, and of tokens or of channels: as the models' own code makes them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import MaxVit, SwinTransformer, shufflenet_v2_x0_5

from fxcore import UserModel, build_extractor, model_graph, trace
from fxcore.graph.annotate import annotate
from fxcore.graph.attention_weights import is_attention, is_attention_of_tokens
from fxcore.models.user_models import user_entry
from fxcore.passes.attention import attention_maps

HEADS, SIZE = 2, 8


class Attention(nn.Module):
    """Attention of 8 tokens with heads of 8 channels, so that sizes do not tell tokens from channels."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(-1, SIZE, 3, HEADS, SIZE)
        if self.way == "XCiT":
            q, k, v = qkv.permute(2, 0, 3, 4, 1).unbind(0)
            return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1) @ v
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "fused":
            return F.scaled_dot_product_attention(q, k, v)
        if self.way == "fused channels":
            return F.scaled_dot_product_attention(q.mT, k.mT, v.transpose(-1, -2))
        if self.way == "DaViT":
            return (q.transpose(-1, -2) @ k).softmax(dim=-1) @ v.transpose(-1, -2)
        scores = q * SIZE**-0.5 @ k.transpose(-2, -1)
        if self.way == "einsum":
            return torch.einsum("bhij,bhjc->bihc", F.softmax(scores, dim=3), v)
        if self.way == "over heads":
            return scores.softmax(1) @ v
        if self.way == "values first":
            return v.transpose(-2, -1) @ scores.softmax(-1).transpose(-2, -1)
        return scores.softmax(-1) @ (v + 1)


@pytest.mark.parametrize(
    ("way", "of"),
    [
        *((way, "tokens") for way in ("ViT", "fused", "einsum", "values first")),
        *((way, "channels") for way in ("XCiT", "DaViT", "fused channels")),
        ("over heads", None),
    ],
)
def test_weights_of_tokens_and_of_channels(way: str, of: str | None) -> None:
    opened = attention_maps(trace(Attention(way).eval()))
    annotate(opened, [(SIZE, HEADS * SIZE)], torch.device("cpu"))
    found = [node for node in opened.graph.nodes if is_attention(node)]
    assert bool(found) == (of is not None)
    assert {is_attention_of_tokens(node) for node in found} <= {of == "tokens"}
    assert {tuple(node.meta["value"].shape) for node in found} <= {(1, HEADS, SIZE, SIZE)}


def timms(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, **arguments)


class Returned(nn.Module):
    """Attention of eight tokens with eight channels that returns its weights."""

    def __init__(self, average: bool) -> None:
        super().__init__()
        self.proj, self.average = nn.Conv2d(3, SIZE, 16), average
        self.attention = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.proj(x).flatten(2).mT
        tokens, weights = self.attention(tokens, tokens, tokens, average_attn_weights=self.average)
        return tokens * weights.sum()


@pytest.mark.parametrize("average", [False, True])
def test_weights_that_multi_head_attention_returns(average: bool) -> None:
    """They have no channels, and their rows are queries."""
    traced = trace(Returned(average).eval())
    annotate(traced, [(3, 16, 16 + SIZE - 1)], torch.device("cpu"))
    values, weights = traced.graph.find_nodes(op="call_function", target=operator.getitem)
    assert weights.meta["value"].shape == ((1, SIZE, SIZE) if average else (1, HEADS, SIZE, SIZE))
    assert [(node.meta["axes"], is_attention_of_tokens(node)) for node in (values, weights)] == [
        ("NLC", False),
        (None, True),
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("build", "nodes"),
    [
        (
            timms("vit_tiny_patch16_224", depth=1),
            {"blocks.0.attn.attention": True, "blocks.0.attn.reshape": False, "blocks.0.add": False},
        ),
        (shufflenet_v2_x0_5, {"stage2.0.view": False}),
        (
            timms("xcit_nano_12_p16_224", depth=1),
            {"blocks.0.attn.attention": False, "cls_attn_blocks.0.attn.attention": True},
        ),
        (timms("cait_xxs24_224", depth=1), {"blocks.0.attn.softmax": True, "blocks.0.attn.permute_1": False}),
        (timms("skresnet18"), {"layer1.0.conv1.attn.softmax": False}),
        (
            lambda: MaxVit((224, 224), 8, 7, [8], [1], 8, 0.0),
            {"blocks.0.layers.0.layers.window_attention.attn_layer.1.attention": True},
        ),
        (lambda: SwinTransformer([4, 4], 8, [2], [2], [7, 7]), {"features.1.1.attn.attention": True}),
    ],
)
def test_of_many_architectures(build: Callable[[], nn.Module], nodes: dict[str, bool]) -> None:
    graph = model_graph(user_entry("built", UserModel(build))).with_nodes_of("attention_maps")
    found = build_extractor(graph, build().eval(), {node: node for node in nodes}).outputs
    assert {output.key: output.queries for output in found} == nodes
