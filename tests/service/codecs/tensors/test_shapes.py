"""Against numpy and torch, which make every shape that is taken."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from service.codecs.tensors import shapes
from service.problems import Problem

SIZES = [1, 2, 3, 2**20, 2**31, 2**53, 2**56 - 1, 2**56, 2**57, 2**62, 2**63 - 1, 2**63, 2**64, 10**30]


@given(st.lists(st.sampled_from(SIZES), max_size=7), st.integers(0, 7))
@example([2**56], 0)
@example([2**53, 2, 2, 2], 4)
def test_a_shape_without_elements_is_taken_only_if_it_can_be_made(others, place):
    shape = [*others[:place], 0, *others[place:]]
    try:
        shapes.check(shape, "it")
    except Problem:
        return
    for order in "CF":
        assert np.empty(0, np.longdouble).reshape(shape, order=order).shape == tuple(shape)
    array = np.empty(0, np.float64).reshape(shape)
    assert list(torch.from_numpy(array).shape) == list(torch.empty(shape, dtype=torch.float64).shape) == shape


@pytest.mark.parametrize("shape", [[], [0], [1, 3, 224, 224], [1] * 8, [0, 2**56], [2**28, 2**28]])
def test_shapes_that_are_taken(shape):
    shapes.check(shape, "it")


@pytest.mark.parametrize(
    "shape",
    [[1] * 9, [0] * 9, [True], [1.0], ["1"], [None], [-1], [0, -1], [0, 2**56 + 1], [0, 2**40, 2**40], [10**30]],
)
def test_shapes_that_are_refused(shape):
    with pytest.raises(Problem, match="it has") as refusal:
        shapes.check(shape, "it")
    assert refusal.value.slug == "bad-tensor"
