"""Statistics of outputs: held to NumPy, however the images are split, ordered and merged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fxcore.errors import FxError
from fxcore.statistics.output_statistics import OutputStatistics, by_channel

PATHS = [f"photos/{number:02d}.jpg" for number in (3, 11, 0, 7, 5, 2, 9, 10, 1, 4, 8, 6)]


def statistics(values: Tensor, paths: list[str], sizes: list[int]) -> OutputStatistics:
    """Statistics of batches of ``sizes``."""
    made = OutputStatistics.empty(values, moments=True, covariance=True, top=4)
    start = 0
    for size in sizes:
        made.add(paths[start : start + size], values[start : start + size])
        start += size
    assert start == len(paths)
    return made


def ranked(paths: list[str], values: Tensor, count: int) -> list[tuple[int, int, str, float, list[int]]]:
    """What the largest are, found by sorting them all."""
    expected = []
    for channel in range(values.shape[1]):
        images = []
        for path, one in zip(paths, values[:, channel].numpy(), strict=True):
            place = np.unravel_index(np.argmax(one), one.shape) if one.ndim else ()
            images.append((-one[place], path, list(map(int, place))))
        images.sort()
        for rank, (value, path, place) in enumerate(images[:count]):
            expected.append((channel, rank + 1, path, -value, place))
    return expected


@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 7), (6,)])
def test_any_split_and_order_gives_the_statistics_of_all(shape: tuple[int, ...]) -> None:
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 9, (12, *shape)).astype(float))  # many are equal
    whole = values.numpy().reshape(12, 6, -1).swapaxes(1, 2).reshape(-1, 6)
    for seed, sizes in enumerate(([12], [5, 1, 6], [1] * 12)):
        order = np.random.default_rng(seed).permutation(12).tolist()
        made = statistics(values[order], [PATHS[image] for image in order], sizes)
        assert made.moments is not None
        assert made.largest is not None
        assert made.moments.count == len(whole)
        np.testing.assert_allclose(made.moments.mean, whole.mean(0), rtol=1e-13)
        np.testing.assert_allclose(made.moments.std(), whole.std(0, ddof=1), rtol=1e-13)
        np.testing.assert_allclose(made.moments.cov(), np.cov(whole, rowvar=False), rtol=1e-12, atol=1e-13)
        assert [tuple(entry) for entry in made.largest] == ranked(PATHS, values, 4)
        assert made.largest.paths == sorted({entry.path for entry in made.largest})


def test_parts_are_merged_after_they_were_stored() -> None:
    values = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    whole = statistics(values, PATHS, [12])
    merged = statistics(values[:0], [], [0])  # nothing, as of a machine that had no images
    for start, stop in ((7, 12), (0, 2), (2, 7)):
        tensors, paths = statistics(values[start:stop], PATHS[start:stop], [stop - start]).state()
        merged.merge(OutputStatistics.from_state({name: one.clone() for name, one in tensors.items()}, list(paths)))
    assert whole.moments is not None
    assert merged.moments is not None
    assert whole.largest is not None
    assert merged.largest is not None
    assert merged.moments.count == whole.moments.count
    torch.testing.assert_close(merged.moments.mean, whole.moments.mean, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(merged.moments.cov(), whole.moments.cov(), rtol=1e-12, atol=1e-14)
    assert list(merged.largest) == list(whole.largest)
    with pytest.raises(FxError, match="3 and of 2 channels"):
        merged.merge(statistics(values[:, :2], PATHS, [12]))


def test_a_large_mean_costs_no_digits_of_the_variance() -> None:
    """A sum of squares minus the square of the sum has none left here."""
    deviations = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)).double() * 1e-3
    made = OutputStatistics.empty(deviations, moments=True, covariance=True, top=0)
    for part in (deviations + 1e6).split(37):
        made.add([""] * len(part), part)
    assert made.moments is not None
    right = np.cov((deviations + 1e6).numpy() - 1e6, rowvar=False)
    np.testing.assert_allclose(made.moments.cov(), right, rtol=1e-6, atol=1e-12)


def test_one_value_has_a_mean_and_no_deviation() -> None:
    made = OutputStatistics.empty(torch.ones(1, 2), moments=True, covariance=False, top=3)
    made.add(["a"], torch.tensor([[1.0, -2.0]]).double())
    assert made.moments is not None
    assert made.largest is not None
    assert made.moments.mean.tolist() == [1, -2]
    assert made.moments.std().isnan().all()
    assert [tuple(entry) for entry in made.largest] == [(0, 1, "a", 1.0, []), (1, 1, "a", -2.0, [])]


@pytest.mark.parametrize(
    ("shape", "layout", "prefix", "expected"),
    [
        ((2,), None, 0, (2, 1)),
        ((2, 3), "NC", 0, (2, 3)),
        ((2, 3, 5, 7), "NCHW", 0, (2, 3, 5, 7)),
        ((2, 5, 7, 3), "NHWC", 0, (2, 3, 5, 7)),
        ((2, 50, 3), "tokens", 1, (2, 3, 49)),
        ((2, 50, 3), None, 0, (2, 3, 50)),
        ((2, 9, 50, 3), "NWLC", 0, (2, 3, 9, 50)),
    ],
)
def test_channels_are_found_by_the_layout(
    shape: tuple[int, ...], layout: str | None, prefix: int, expected: tuple[int, ...]
) -> None:
    values = torch.arange(float(np.prod(shape))).reshape(shape).half()
    found = by_channel(values, layout, prefix)
    assert (found.shape, found.dtype) == (expected, torch.float64)
    if layout == "tokens":
        assert found[1, 2, 0] == values[1, 1, 2]
