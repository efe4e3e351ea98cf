"""Poolings, against torch and torchvision."""

import pytest
import torch
from torch.nn.functional import grid_sample
from torch.testing import assert_close
from torchvision.ops import roi_align

from fxcore.errors import BadTensor
from fxcore.graph.head_pooling import DISTILLED
from fxcore.graph.tokens.prefix_tokens import PrefixTokens
from fxcore.pooling import METHODS, MapGrid, channel_dim, pool, pool_masks, pool_points, pool_regions, pooled_shape

SHAPES = {
    "NCHW": (2, 5, 3, 4),
    "NHWC": (2, 3, 4, 5),
    "NCTHW": (2, 5, 2, 3, 4),
    "NTHWC": (2, 2, 3, 4, 5),
    "NCL": (2, 5, 12),
    "tokens": (2, 12, 5),
    "NWLC": (2, 3, 4, 5),
}


@pytest.mark.parametrize("method", [m for m in METHODS if m != "cls"])
@pytest.mark.parametrize("layout", SHAPES)
def test_pools_everything_but_channels(layout: str, method: str) -> None:
    values = torch.rand(SHAPES[layout], generator=torch.Generator().manual_seed(0)) + 0.1
    channels = channel_dim(layout, values.ndim)
    rows = values.movedim(channels, 1).flatten(2)
    expected = {
        "avg": rows.mean(2),
        "max": rows.max(2).values,
        "gem": rows.pow(3).mean(2).pow(1 / 3),
    }[method]
    pooled = pool(values, layout, method)
    assert pooled.shape == (2, 5) == tuple(pooled_shape(list(values.shape), layout, method))
    assert_close(pooled, expected)


def test_prefix_tokens_are_left_out_and_the_first_may_be_a_class_token() -> None:
    tokens = torch.rand(2, 12, 5)
    with_class, registers = PrefixTokens(3, class_token=True), PrefixTokens(3)
    assert torch.equal(pool(tokens, "tokens", "cls", with_class), tokens[:, 0])
    assert pooled_shape([2, 12, 5], "tokens", "cls") == [2, 5]
    for prefix in (with_class, registers):
        assert_close(pool(tokens, "tokens", "avg", prefix), tokens[:, 3:].mean(1))
        assert_close(pool(tokens, "tokens", "max", prefix), tokens[:, 3:].amax(1))
    with pytest.raises(BadTensor, match="3 before those of the patches, none of them a class token; use pool=avg"):
        pool(tokens, "tokens", "cls", registers)
    with pytest.raises(BadTensor, match="the tokens of this node have none; use pool=avg"):
        pool(tokens, "tokens", "cls")
    with pytest.raises(BadTensor, match="use pool=avg"):
        pool(torch.rand(2, 5, 3, 4), "NCHW", "cls")
    with pytest.raises(BadTensor):
        pool(torch.rand(2, 5), "NC", "cls")


def test_the_mean_of_both_class_tokens() -> None:
    tokens, prefix = torch.rand(2, 12, 5), PrefixTokens(2, class_token=True)
    assert_close(pool(tokens, "tokens", DISTILLED, prefix), (tokens[:, 0] + tokens[:, 1]) / 2)
    assert pooled_shape([2, 12, 5], "tokens", DISTILLED) == [2, 5]


def test_joined_poolings_are_concatenated_in_their_order() -> None:
    tokens, prefix = torch.rand(2, 12, 5), PrefixTokens(3, class_token=True)
    both = pool(tokens, "tokens", "cls+avg", prefix)
    assert both.shape == (2, 10) == tuple(pooled_shape([2, 12, 5], "tokens", "cls+avg"))
    assert_close(both, torch.cat([tokens[:, 0], tokens[:, 3:].mean(1)], dim=1))
    maps = torch.rand(2, 3, 4, 5)
    three = pool(maps, "NHWC", "max+gem+avg")
    assert three.shape == (2, 15) == tuple(pooled_shape([2, 3, 4, 5], "NHWC", "max+gem+avg"))
    assert_close(three, torch.cat([pool(maps, "NHWC", one) for one in ("max", "gem", "avg")], dim=1))
    for shape in ((2, 5), (2,)):
        values = torch.rand(shape)
        twice = pool(values, None, "avg+max")
        assert twice.shape == tuple(pooled_shape(list(shape), None, "avg+max"))
        assert_close(twice, values.reshape(2, -1).repeat(1, 2))
    with pytest.raises(BadTensor, match=r"pool=avg\+cls takes the class token and the tokens of this node have none"):
        pool(tokens, "tokens", "avg+cls")


@pytest.mark.parametrize(
    ("shape", "pooled"), [((2, 5, 3, 4), (2, 5)), ((2, 12, 5), (2, 5)), ((2, 5), (2, 5)), ((2,), (2,))]
)
def test_layouts_that_are_not_known(shape: tuple[int, ...], pooled: tuple[int, ...]) -> None:
    assert pool(torch.rand(shape), None, "avg").shape == pooled == tuple(pooled_shape(list(shape), None, "avg"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["avg", "gem"])
def test_half_precision_does_not_overflow(dtype: torch.dtype, method: str) -> None:
    values = torch.full((1, 1, 64, 64), 30_000.0, dtype=dtype)
    pooled = pool(values, "NCHW", method)
    assert pooled.dtype == dtype
    assert_close(pooled.float(), torch.full((1, 1), 30_000.0), rtol=1e-2, atol=0)


def test_gem_of_negative_values_is_finite() -> None:
    assert torch.isfinite(pool(-torch.rand(1, 2, 3, 3), "NCHW", "gem")).all()


def test_each_row_depends_on_itself_alone() -> None:
    values = torch.rand(4, 5, 3, 4)
    for method in ("avg", "max", "gem"):
        whole = pool(values, "NCHW", method)
        # The last elements of a tensor are rounded by other instructions than those of whole vectors.
        torch.testing.assert_close(whole[2:3], pool(values[2:3], "NCHW", method), rtol=1e-6, atol=0)


def test_refusals() -> None:
    with pytest.raises(BadTensor, match="there are avg, max, gem, cls"):
        pool(torch.rand(1, 2, 3, 3), "NCHW", "sum")
    with pytest.raises(BadTensor, match="floating"):
        pool(torch.ones(1, 2, 3, 3, dtype=torch.int64), "NCHW", "avg")


def laid_out(maps, layout):
    return {
        "NCHW": maps,
        "NHWC": maps.permute(0, 2, 3, 1),
        "tokens": torch.cat([torch.randn(len(maps), 3, maps.shape[1]), maps.flatten(2).transpose(1, 2)], dim=1),
    }[layout]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "tokens"])
def test_points_are_grid_sample_of_the_whole_map(layout):
    maps = torch.randn(3, 5, 6, 8)
    points = [torch.tensor([[3.0, 5.0], [64.0, 33.5], [128.0, 96.0]]), torch.empty(0, 2), torch.tensor([[17.0, 90.0]])]
    grid = MapGrid(6, 8, 16, 16, 3 if layout == "tokens" else 0)
    sampled = [
        grid_sample(maps[i : i + 1], (at / torch.tensor([64.0, 48.0]) - 1)[None, None], align_corners=False)[0, :, 0].T
        for i, at in enumerate(points)
    ]
    assert_close(pool_points(laid_out(maps, layout), layout, grid, points), torch.cat(sampled))
    half = pool_points(laid_out(maps, layout).half(), layout, grid, points)
    assert half.dtype == torch.float16
    assert_close(half.float(), torch.cat(sampled), rtol=1e-2, atol=1e-2)


def test_points_of_maps_with_two_strides_and_beyond_the_input():
    """A map of 3 x 3 positions of 16 and 8 pixels over 40 x 24 pixels."""
    maps = torch.arange(9.0).reshape(1, 1, 3, 3)
    at = [torch.tensor([[4.0, 8.0], [12.0, 8.0], [8.0, 24.0], [20.0, 40.0]])]
    assert_close(pool_points(maps, "NCHW", MapGrid(3, 3, 16, 8), at).flatten(), torch.tensor([0.0, 1.0, 3.5, 8.0]))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "tokens"])
def test_masks_are_averages_by_their_weights(layout):
    maps, weights = torch.randn(2, 5, 6, 8), [torch.rand(2, 48), torch.rand(1, 48)]
    grid = MapGrid(6, 8, 16, 16, 3 if layout == "tokens" else 0)
    expected = [(maps[i] * one.reshape(6, 8)).sum((1, 2)) for i in (0, 1) for one in weights[i]]
    assert_close(pool_masks(laid_out(maps, layout), layout, grid, weights), torch.stack(expected))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_regions_are_roi_align_of_the_whole_map(layout, dtype):
    maps = torch.randn(2, 5, 6, 8).to(dtype)
    given = {
        "NCHW": maps,
        "NHWC": maps.permute(0, 2, 3, 1),
        "tokens": torch.cat([torch.randn(2, 3, 5).to(dtype), maps.flatten(2).transpose(1, 2)], dim=1),
    }[layout]
    grid = MapGrid(6, 8, 16, 16, 3 if layout == "tokens" else 0)
    boxes = [torch.tensor([[3.0, 5.0, 80.0, 60.0], [0.0, 0.0, 16.0, 16.0]]), torch.tensor([[20.0, 1.0, 128.0, 96.0]])]
    expected = roi_align(maps.float(), boxes, 3, spatial_scale=1 / 16, aligned=True)
    assert torch.equal(pool_regions(given, layout, grid, boxes, 3), expected.to(dtype))
    assert grid.samples(boxes[1], 3) == 9 * 3 * 2
    vectors = roi_align(maps.float(), boxes, 1, spatial_scale=1 / 16, aligned=True)[:, :, 0, 0]
    assert torch.equal(pool_regions(given, layout, grid, boxes, 1), vectors.to(dtype))


def test_regions_of_maps_with_two_strides():
    maps = torch.randn(1, 2, 4, 4)
    pooled = pool_regions(maps, "NCHW", MapGrid(4, 4, 8, 16), [torch.tensor([[16.0, 8.0, 48.0, 24.0]])], 2)
    assert torch.allclose(pooled, roi_align(maps, [torch.tensor([[1.0, 1.0, 3.0, 3.0]])], 2, aligned=True))
