"""Layouts: which axis of a value is what."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import timm
import torch
from torch import Tensor, fx, nn

from fxcore import UserModel, build_extractor, load_model, model_graph
from fxcore.graph.model_graph import trace_graph
from fxcore.models.catalog import get_model
from fxcore.models.entry import ModelEntry
from fxcore.models.user_models import user_entry
from fxcore.pooling import pool
from tests.fxcore.conftest import OwnEntry
from tests.fxcore.hooks import hooked
from tests.fxcore.written import Of


def test_a_batch_norm_of_rows_has_their_layout(own_entry: OwnEntry) -> None:
    entry = own_entry(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.BatchNorm1d(8)))
    info = {node.name: node for node in model_graph(entry).nodes}["2"]
    assert (info.layout, info.channels, info.shape) == ("NC", 8, [None, 8])


def test_maps_keep_their_layout_between_the_stages_of_swin() -> None:
    """timm's merges neighbouring patches by a reshape to six dimensions."""
    options: dict[str, Any] = {"depths": (1, 1, 1), "num_heads": (1, 2, 4), "embed_dim": 16, "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, num_classes=0, **options)
    graph = model_graph(user_entry("swin_layout", UserModel(lambda: model, preprocessing={"crop_size": 64})))
    for index, stride in enumerate((4, 8, 16)):
        value = hooked(model, f"layers.{index}", torch.rand(1, 3, 64, 64))
        name = graph.resolve([f"layers.{index}"])[f"layers.{index}"]
        (info,) = (node for node in graph.nodes if node.name == name)
        assert info.shape == [None, *value.shape[1:]]
        assert (info.layout, info.channels, info.stride) == ("NHWC", value.shape[3], stride)


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_weights_of_attention_are_no_map_after_their_heads_are_mixed() -> None:
    """EfficientFormer v2 mixes them by convolutions, before and after the softmax."""
    entry = get_model("timm.efficientformerv2_s0")
    found = {node.name: node for node in model_graph(entry, entry.structure()).nodes}
    attention = "stages.2.blocks.4.token_mixer"
    for name in ("talking_head1", "softmax", "talking_head2"):
        info = found[f"{attention}.{name}"]
        assert info.shape == [None, 8, 49, 49]  # heads, queries, keys
        assert (info.layout, info.stride) == (None, None), name
    assert (found[f"{attention}.proj.conv"].layout, found[f"{attention}.proj.conv"].stride) == ("NCHW", 16)


class Turned(nn.Module):
    """A convolution whose result is turned by a function, usually to channels last, before a norm."""

    def __init__(self, turn: Callable[[Tensor], Tensor], last: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 8, 8)
        self.turn = turn
        self.norm = nn.LayerNorm(last)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm(self.turn(self.conv(x))))


def turned(turn: Callable[[Tensor], Tensor], last: int = 6) -> ModelEntry:
    torch.manual_seed(0)
    model = Turned(turn, last).eval()
    return user_entry("turned", UserModel(lambda: copy.deepcopy(model), preprocessing={"crop_size": 32}))


def _with_one_new_letter(h: Tensor) -> Tensor:
    return torch.einsum("nchw,cd->nhwd", h, torch.eye(6))


@pytest.mark.parametrize(
    ("turn", "layout"),
    [
        (lambda h: h.flatten(2).mT, "tokens"),
        (lambda h: h.flatten(2).adjoint(), "tokens"),
        (lambda h: torch.einsum("ncl->nlc", h.flatten(2)), "tokens"),
        (lambda h: torch.einsum("nchw->nhwc", h), "NHWC"),
        (_with_one_new_letter, "NHWC"),
        (lambda h: torch.moveaxis(h, 1, -1), "NHWC"),
        (lambda h: h.movedim(source=-3, destination=-1), "NHWC"),
        (lambda h: torch.swapaxes(h.flatten(2), axis0=-1, axis1=-2), "tokens"),
        (lambda h: h.flatten(2).swapdims(1, 2), "tokens"),
        (lambda h: torch.transpose(input=h.flatten(2), dim0=1, dim1=-1), "tokens"),
        pytest.param(
            *(lambda h: h.T.permute(3, 1, 0, 2), "NHWC"), marks=pytest.mark.filterwarnings("ignore:The use of `x.T`")
        ),
        (lambda h: h.permute(dims=(0, 2, -1, 1)), "NHWC"),
    ],
)
def test_operations_that_permute_axes_permute_the_layout(turn: Callable[[Tensor], Tensor], layout: str) -> None:
    """Each channel of the pooled value is the mean of the same channel of the value that a hook sees."""
    entry = turned(turn)
    graph, model = trace_graph(entry), load_model(entry, "DEFAULT").eval()
    (info,) = (node for node in graph.nodes if node.name == "norm")
    assert (info.layout, info.channels) == (layout, 6)
    image = torch.rand(2, 3, 32, 32)
    seen = hooked(model, "norm", image)
    with torch.no_grad():
        value = build_extractor(graph, load_model(entry, "DEFAULT"), {"norm": "norm"}).module(image)["norm"]
    pooled = pool(value, info.layout, "avg")
    by_hand = torch.stack([seen.reshape(2, 16, 6)[:, :, channel].mean(1) for channel in range(6)], 1)
    assert torch.allclose(pooled, by_hand, atol=1e-6)


def test_layers_of_turned_maps_leave_them_turned(own_entry: OwnEntry) -> None:
    """Only turned back does a map show a bright left half of the image on the left."""

    class TurnedTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.pool, self.mix = nn.Conv2d(3, 4, 4, 4), nn.AvgPool2d(2), nn.Conv2d(4, 5, 1)
            nn.init.ones_(self.stem.weight)
            nn.init.ones_(self.mix.weight)

        def forward(self, x: Tensor) -> Tensor:
            turned = self.mix(self.pool(self.stem(x).transpose(2, 3)))
            return nn.functional.interpolate(turned, scale_factor=2).transpose(2, 3)

    entry = own_entry(TurnedTwice)
    graph = model_graph(entry)
    image = torch.zeros(1, 3, 32, 32)
    image[..., :16] = 1
    nodes = {"transpose": "NCWH", "pool": "NCWH", "mix": "NCWH", "interpolate": "NCWH", "transpose_1": "NCHW"}
    with torch.no_grad():
        values = build_extractor(graph, load_model(entry, "random"), graph.resolve([*nodes])).module(image)
    for name, layout in nodes.items():
        (info,) = (node for node in graph.nodes if node.name == name)
        assert info.layout == layout
        left = values[name].movedim(layout.index("W"), 3)[..., :2]
        assert left.mean() > values[name].mean() + 1


@pytest.mark.parametrize(
    ("left", "layout"),
    [
        (lambda h: h.mean(1), None),
        (lambda h: h.mean(-3), None),
        (lambda h: h[:, 7], None),
        (lambda h: h.select(1, 7), None),
        (lambda h: torch.argmax(h, dim=1), None),
        (lambda h: h[:, :1].squeeze(1), None),
        (lambda h: h.mean(2), "NCL"),
        (lambda h: h[..., 0], "NCL"),
        (lambda h: h.select(3, 7), "NCL"),
        (lambda h: h.flatten(2).amax(1), None),
        (lambda h: h.flatten(2).amax(2), "NC"),
        (lambda h: h.mean((2, 3), keepdim=True).squeeze(3).squeeze(2), "NC"),
        (lambda h: h.permute(0, 2, 3, 1).norm(dim=-1), None),
    ],
)
def test_what_has_no_channels_left_has_no_layout(left: Callable[[Tensor], Tensor], layout: str | None) -> None:
    """Of a map of as many rows as channels."""
    model = Of(lambda m, x: left(m.conv(x)).sin(), conv=nn.Conv2d(3, 8, 4, 4))
    graph = trace_graph(user_entry("net", UserModel(lambda: model, preprocessing={"crop_size": 32})))
    assert {node.name: node for node in graph.nodes}["sin"].layout == layout


def test_an_index_leaves_the_axes_that_it_does_not_take() -> None:
    for turn, last, axes in ((lambda h: h[:, :, 0, 0], 6, "NC"), (lambda h: h[:, 1, 2], 4, "NW")):
        graph = trace_graph(turned(turn, last))
        assert graph.by_name["getitem"].meta["axes"] == axes
        [norm] = (node for node in graph.nodes if node.name == "norm")
        assert (norm.layout, norm.channels) == (axes, 6 if axes == "NC" else None)


@fx.wrap
def turned_leaf(h: Tensor) -> Tensor:
    return h.transpose(1, 2)[:, ::2]


@fx.wrap
def halved_leaf(h: Tensor) -> Tensor:
    return h[:, :, ::2]


@pytest.mark.parametrize(
    ("turn", "last", "layout"),
    [
        # Distances and products between positions.
        (lambda h: torch.cdist(h.flatten(2).mT, h.flatten(2).mT), 16, None),
        (lambda h: h.flatten(2).mT @ h.flatten(2), 16, None),
        (lambda h: torch.einsum("nlc,nmc->nlm", h.flatten(2).mT, h.flatten(2).mT), 16, None),
        (lambda h: torch.einsum("nlc,nmc->nlm", h.flatten(2).mT, h.flatten(2).mT[:, ::2]), 8, None),
        # An index that inserts an axis and takes another.
        (lambda h: h[:, None, :, 0], 4, None),
        # A number for each position.
        (lambda h: h.flatten(2).mT.mean(-1), 16, None),
        (lambda h: h.flatten(2).mT[..., :1].squeeze(-1), 16, None),
        (lambda h: h.flatten(2).mT[..., 0], 16, None),
        (lambda h: h[:, :, ::2].rot90(1, (1, 3)), 6, None),
        # Leaves, of which one seems to permute.
        (lambda h: turned_leaf(h.flatten(2)), 6, None),
        (lambda h: halved_leaf(h.flatten(2)), 8, "NCL"),
    ],
)
def test_operations_have_the_axes_that_are_known(
    turn: Callable[[Tensor], Tensor], last: int, layout: str | None
) -> None:
    (info,) = (node for node in trace_graph(turned(turn, last)).nodes if node.name == "norm")
    assert info.layout == layout


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


def test_paths_of_modules_are_not_names_of_functions() -> None:
    model = Of(lambda m, x: m.interpolate(x), interpolate=ChannelsLast())
    own = UserModel(lambda: model, preprocessing={"crop_size": 32}, leaf_modules=(ChannelsLast,))
    entry = user_entry("resized", own)
    (info,) = (node for node in model_graph(entry).nodes if node.name == "interpolate")
    assert info.shape == [None, 32, 32, 3]
    assert info.layout is None
