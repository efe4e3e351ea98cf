"""Layouts: which axis of a value is what."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from fxcore import UserModel, model_graph
from fxcore.models.user_models import user_entry
from tests.fxcore.conftest import OwnEntry


def test_a_batch_norm_of_rows_has_their_layout(own_entry: OwnEntry) -> None:
    entry = own_entry(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.BatchNorm1d(8)))
    info = {node.name: node for node in model_graph(entry).nodes}["2"]
    assert (info.layout, info.channels, info.shape) == ("NC", 8, [None, 8])


def test_maps_keep_their_layout_between_the_stages_of_swin() -> None:
    """timm's merges neighbouring patches by a reshape to six dimensions."""
    options: dict[str, Any] = {"depths": (1, 1, 1), "num_heads": (1, 2, 4), "embed_dim": 16, "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, num_classes=0, **options)
    graph = model_graph(user_entry("swin_layout", UserModel(lambda: model, preprocessing={"crop_size": 64})))
    seen: list[Tensor] = []
    for stage in model.layers:
        stage.register_forward_hook(lambda module, given, output: seen.append(output))
    with torch.no_grad():
        model(torch.rand(1, 3, 64, 64))
    for index, (value, stride) in enumerate(zip(seen, (4, 8, 16), strict=True)):
        name = graph.resolve([f"layers.{index}"])[f"layers.{index}"]
        (info,) = (node for node in graph.nodes if node.name == name)
        assert info.shape == [None, *value.shape[1:]]
        assert (info.layout, info.channels, info.stride) == ("NHWC", value.shape[3], stride)


@pytest.mark.parametrize("side", [64, 128])
def test_maps_keep_their_layout_around_attention_in_windows(side: int) -> None:
    """DaViT's turns tokens to maps, pads these to whole windows, and at the smaller size some are a single window."""
    options: dict[str, Any] = {"depths": (1, 1, 1), "embed_dims": (8, 16, 32), "num_heads": (1, 2, 4)}
    model = timm.create_model("davit_tiny", **options, num_classes=0).eval()
    graph = model_graph(user_entry(f"davit_{side}", UserModel(lambda: model, preprocessing={"crop_size": side})))
    found = {node.name: node for node in graph.nodes}
    for stage, (channels, stride) in enumerate(((8, 4), (16, 8), (32, 16))):
        before, padded = side // stride, -(-side // stride // 7) * 7
        block = f"stages.{stage}.blocks.0.0"
        for name, size in (("view", before), ("pad", padded)):
            info = found[f"{block}.{name}"]
            assert (info.layout, info.channels, info.shape) == ("NHWC", channels, [None, size, size, channels])
        windows = found[f"{block}.view_2"]
        assert windows.shape is not None
        assert windows.shape[1:] == [7, 7, channels]
        assert (windows.layout, windows.channels) == (("NHWC", channels) if padded == 7 else (None, None))


def test_what_attention_writes_is_tokens_again() -> None:
    """timm's splits queries, keys and values into a tuple."""
    found = {node.name: node for node in model_graph("timm.test_vit").nodes}
    for name in ("reshape_1", "norm", "proj", "proj_drop"):
        info = found[f"blocks.2.attn.{name}"]
        assert (info.layout, info.channels, info.tokens) == ("tokens", 64, found["blocks.2.add"].tokens)
    assert found["blocks.2.attn.transpose"].layout is None
