"""Batches are what ``torch.cat`` makes of their parts, in memory that is taken once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from service.engine.staging import Staging, copied

CPU = torch.device("cpu")


def parts(rows: list[int], shape: tuple[int, ...], channels_last: bool) -> list[Tensor]:
    made = [torch.randn(n, *shape) for n in rows]
    return [x.contiguous(memory_format=torch.channels_last) for x in made] if channels_last else made


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("rows", [[1, 1], [2, 1, 3]])
def test_a_batch_is_its_parts_one_after_another(rows: list[int], channels_last: bool) -> None:
    given = parts(rows, (3, 5, 4), channels_last)
    (batch,) = Staging(CPU).joined([(part,) for part in given])
    expected = torch.cat(given)
    assert torch.equal(batch, expected)
    assert batch.stride() == expected.stride()
    assert batch.data_ptr() not in {part.data_ptr() for part in given}


def test_a_part_of_another_memory_format_gives_the_same_values() -> None:
    given = [*parts([1], (3, 5, 4), True), *parts([2], (3, 5, 4), False)]
    (batch,) = Staging(CPU).joined([(part,) for part in given])
    assert torch.equal(batch, torch.cat(given))


def test_models_of_several_inputs() -> None:
    left, right = parts([1, 2], (3, 2, 2), False), parts([1, 2], (7,), False)
    batches = Staging(CPU).joined(list(zip(left, right, strict=True)))
    assert [torch.equal(b, torch.cat(g)) for b, g in zip(batches, (left, right), strict=True)] == [True, True]


def test_memory_is_taken_once() -> None:
    staging = Staging(CPU)
    places = set()
    for rows in ([2, 2], [1, 1], [1, 3]):
        (batch,) = staging.joined([(part,) for part in parts(rows, (3, 8, 8), True)])
        places.add(batch.data_ptr())
    assert len(places) == 1


def test_a_single_part_is_handed_on() -> None:
    (part,) = parts([3], (3, 2, 2), False)
    assert Staging(CPU).joined([(part,)])[0] is part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_copy_has_memory_of_its_own(dtype: torch.dtype) -> None:
    whole = torch.arange(24).reshape(4, 3, 2).to(dtype)
    copy = copied(whole[1:3])
    assert copy.dtype == dtype
    expected = whole[1:3].clone()
    whole.zero_()
    assert torch.equal(copy, expected)
    assert copied(whole[:0]).shape == (0, 3, 2)
