"""What a function needs of its inputs beside shapes, dtypes and devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxcore.tracing.failures.fake_tensors import fake_failure, needs_values


@pytest.mark.parametrize(
    "reads",
    [lambda x: x * x.amax().item(), lambda x: x[x > 0], lambda x: x if x.sum() > 0 else -x, lambda x: x.tolist()],
)
def test_functions_that_read_values_need_them(reads: Callable[[Tensor], object]) -> None:
    failure = fake_failure(reads, (torch.rand(2, 3),))
    assert failure is not None
    assert needs_values(failure)


def test_shapes_that_do_not_match() -> None:
    failure = fake_failure(torch.matmul, (torch.rand(2, 3), torch.rand(2, 3)))
    assert failure is not None
    assert not needs_values(failure)


def test_functions_that_only_compute_do_not_fail() -> None:
    weight = torch.rand(3, 4)  # a real one
    assert fake_failure(lambda x: x.relu() @ weight, (torch.rand(2, 3),)) is None
