"""Models built for other sizes, against timm's and torchvision's own ways of making and loading them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import timm
import torch
from torch import nn
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import interpolate_embeddings

from fxcore import ModelEntry, ModelGraph, get_model, load_model, model_graph
from fxcore.errors import BadTensor
from fxcore.extractor import build_extractor, whole_module
from fxcore.graph.multiples import multiple_of
from fxcore.graph.tokens.token_grid import token_grid
from fxcore.models.sized_vit import resampled, sized
from fxcore.models.weights import sized_model


def three(multiple: int) -> list[tuple[int, int]]:
    """A square, 2:3 and 3:1."""
    return [(5 * multiple,) * 2, (4 * multiple, 6 * multiple), (6 * multiple, 2 * multiple)]


def timms(entry: ModelEntry, base: nn.Module, size: tuple[int, int]) -> nn.Module:
    """timm's model made for ``size``, with ``base``'s values as its checkpoint."""
    arguments = {"img_size": size} if entry.one_size else {}
    overlay = {"state_dict": dict(base.state_dict())}
    name = entry.name.removeprefix("timm.")
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments).eval()


def made(entry: ModelEntry, base: nn.Module, size: tuple[int, int]) -> tuple[ModelGraph, nn.Module]:
    """The graph at ``size`` and the model over the shared weights.

    Raises:
        BadTensor: the model cannot be made for that size.
    """
    graph = model_graph(entry).at(*size)
    return graph, sized_model(graph.entry, base, "random") if entry.one_size else base


def check(entry: ModelEntry, base: nn.Module, size: tuple[int, int], graph: ModelGraph, model: nn.Module) -> None:
    """The graph at ``size`` over the shared weights gives what timm's model made for it gives, with a checkpoint of
    the usual size; and its patches, levels and strides are of that size."""
    usual = model_graph(entry)
    assert graph.input_size == size
    reference = timms(entry, base, size)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = reference(images)
        torch.testing.assert_close(whole_module(graph, model)(images), expected, atol=1e-5, rtol=1e-4)
    assert graph.eval_nodes == usual.eval_nodes
    assert list(graph.levels) == list(usual.levels)
    layouts = [[n.meta.get("axes") for n in of.graph.nodes] for of in (graph, usual)]
    # A window of attention has a layout only where it is the whole map.
    assert [[axes for axes, known in zip(of, layouts[1], strict=True) if known] for of in layouts] == (
        2 * [[known for known in layouts[1] if known]]
    )
    tokens = [name for name, of in usual.by_name.items() if of.meta.get("axes") == "NLC" and of.meta.get("rows") == 1]
    for before, found in ((token_grid(of.by_name[name]) for of in (usual, graph)) for name in tokens[:1] + tokens[-1:]):
        if before is not None:
            assert found is not None
            strides = [-(-side // of) for side, of in zip(usual.input_size, (before.height, before.width), strict=True)]
            grid = [-(-side // stride) for side, stride in zip(size, strides, strict=True)]
            assert ([found.height, found.width], found.prefix) == (grid, before.prefix)
    for level in graph.levels.values():
        axes = graph.by_name[level.node].meta["axes"]
        shape = graph.shape_of(graph.by_name[level.node])
        if axes is not None and "H" in axes:
            found = shape[axes.index("H")], shape[axes.index("W")]
            assert found == tuple(-(-side // level.stride) for side in size)
    own = {tensor.data_ptr() for tensor in base.parameters()}
    changed = [key for key, tensor in model.named_parameters() if tensor.data_ptr() not in own]
    assert all(
        any(word in key for word in ("pos", "rel", "bias_table", "rope", "attention_biases")) for key in changed
    ), changed


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("timm.test_vit", 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("timm.test_vit", 0), ("timm.test_vit3", 2), ("timm.test_convnext", 2))
        ),
    ],
)
def test_as_timm_makes_it(name: str, shape: int) -> None:
    entry, size = get_model(name), three(multiple_of(model_graph(name)))[shape]
    base = load_model(entry, "random")
    check(entry, base, size, *made(entry, base, size))


# One for each kind of value that depends on the size: positions of tokens and of maps, relative ones in windows and in
# all of a map, rotary ones, biases of attention.
FAMILIES = [
    "vit_small_patch14_reg4_dinov2", "vitamin_small_224", "swin_tiny_patch4_window7_224", "test_vit_relpos",
    "eva02_tiny_patch14_224", "efficientvit_m0", "pvt_v2_b0",
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.no_cover
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_as_timm_makes_it(name: str) -> None:
    """At one of the three sizes."""
    entry = get_model(f"timm.{name}")
    multiple = multiple_of(model_graph(entry))
    base = load_model(entry, "random")
    size = three(max(multiple, 32 if multiple < 14 else multiple))[FAMILIES.index(name) % 3]
    check(entry, base, size, *made(entry, base, size))


@pytest.mark.exhaustive
@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("crossvit_9_240", (160, 160), "usual size is 240 x 240"),
        ("pit_ti_224", (160, 160), "no way to resample pos_embed"),
        ("mvitv2_tiny", (128, 192), "its usual size is 224 x 224, and it is built for squares only"),
    ],
)
def test_what_timm_itself_cannot_make_of_a_checkpoint(name: str, size: tuple[int, int], says: str) -> None:
    """timm cannot load a checkpoint of the usual size into its model made for ``size``, and we say what can be."""
    entry = get_model(f"timm.{name}")
    base = load_model(entry, "random")
    with pytest.raises(BadTensor) as refused:
        made(entry, base, size)
    assert says in refused.value.detail
    assert "usual size" in refused.value.detail
    with pytest.raises((RuntimeError, AssertionError)):
        timms(entry, base, size)(torch.zeros(1, 3, *size))


@pytest.mark.parametrize("side", [64, 320])
def test_squares_as_torchvision_interpolates(side: int) -> None:
    positions = torch.randn(1, 50, 768, generator=torch.Generator().manual_seed(0))
    state = OrderedDict({"encoder.pos_embedding": positions})
    expected = interpolate_embeddings(side, 32, state)["encoder.pos_embedding"]
    assert torch.equal(resampled(positions, side // 32, side // 32), expected)


def test_rectangles_are_resampled_side_by_side() -> None:
    """Bicubic resampling is separable: a rectangle is the rows of one square's and the columns of another's."""
    positions = torch.randn(1, 50, 8, generator=torch.Generator().manual_seed(0))
    grid = positions[:, 1:].permute(0, 2, 1).reshape(1, 8, 7, 7)
    rows = torch.nn.functional.interpolate(grid, (4, 7), mode="bicubic", align_corners=True)
    both = torch.nn.functional.interpolate(rows, (4, 9), mode="bicubic", align_corners=True)
    expected = torch.cat([positions[:, :1], both.flatten(2).permute(0, 2, 1)], 1)
    torch.testing.assert_close(resampled(positions, 4, 9), expected)


def tiny(side: int) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(side, 16, 2, 2, 32, 64)
    torch.nn.init.normal_(model.encoder.pos_embedding)
    return model.eval()


def test_a_sized_vit_is_torchvisions_on_squares() -> None:
    images = torch.randn(2, 3, 96, 96)
    other = tiny(64)
    sized(other, 96, 96).encoder.pos_embedding.data.copy_(tiny(96).encoder.pos_embedding.data)
    with torch.inference_mode():
        assert torch.equal(other._process_input(images), tiny(64).conv_proj(images).flatten(2).permute(0, 2, 1))
    with pytest.raises(AssertionError, match="Expected 64 but got 96"):
        sized(tiny(64), 64, 64)(images)


@pytest.mark.exhaustive
def test_torchvisions_vits_at_rectangles() -> None:
    """A wide image's patches under the positions of its grid, through torchvision's own encoder."""
    entry, size = get_model("vit_b_32"), (64, 160)
    base, graph = load_model(entry, "random"), model_graph("vit_b_32").at(64, 160)
    base.encoder.pos_embedding.data.normal_(generator=torch.Generator().manual_seed(0))
    model = sized_model(graph.entry, base, "random")
    nodes = {"tokens": "encoder.ln"}
    extractor = build_extractor(graph, model, nodes)
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        patches = base.conv_proj(images).flatten(2).permute(0, 2, 1)
        tokens = torch.cat([base.class_token.expand(2, -1, -1), patches], 1)
        tokens = tokens + resampled(base.encoder.pos_embedding, 2, 5)
        expected = base.encoder.ln(base.encoder.layers(tokens))
        torch.testing.assert_close(extractor.module(images)["tokens"], expected)
    grid = extractor.outputs[0].tokens
    assert grid is not None
    assert (grid.height, grid.width, grid.prefix) == (2, 5, 1)
    assert model.heads.head.weight is not base.heads.head.weight
    assert model.heads.head.weight.data_ptr() == base.heads.head.weight.data_ptr()


def test_sizes_that_a_model_cannot_take() -> None:
    with pytest.raises(BadTensor, match=r"vit_b_32 cannot take an input of 100 x 64: .* multiples of the patch, 32"):
        model_graph("vit_b_32").at(100, 64)
    with pytest.raises(BadTensor, match="divisible by partition size 7"):
        model_graph("maxvit_t").at(256, 256)
    assert multiple_of(model_graph("maxvit_t")) == 224
    entry = get_model("timm.levit_128s")  # timm has no way to resample its biases
    with pytest.raises(BadTensor, match="levit_128s cannot be adapted to 256 x 256"):
        sized_model(entry.at(256, 256), load_model(entry, "random"), "random")
