"""Batches are what ``torch.cat`` makes of their parts, in memory that is taken once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from fxcore import get_model
from fxcore.images.decoding import Decoder
from service.engine.device.staging import Staging, copied, copy_rows
from service.engine.threads import compute_with

CPU = torch.device("cpu")
DECODER = Decoder(get_model("resnet18").preprocessing())


def parts(rows: list[int], shape: tuple[int, ...], channels_last: bool) -> list[Tensor]:
    made = [torch.randn(n, *shape) for n in rows]
    return [x.contiguous(memory_format=torch.channels_last) for x in made] if channels_last else made


def batch_of(given: list[Tensor], staging: Staging | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Put the parts of a model's only input together."""
    (batch,) = (staging or Staging(CPU)).inputs([(part,) for part in given], DECODER, dtype)
    return batch


def test_a_part_of_another_memory_format_gives_the_same_values() -> None:
    given = [*parts([1], (3, 5, 4), True), *parts([2], (3, 5, 4), False)]
    assert torch.equal(batch_of(given), torch.cat(given))


def test_models_of_several_inputs() -> None:
    left, right = parts([1, 2], (3, 2, 2), False), parts([1, 2], (7,), False)
    batches = Staging(CPU).inputs(list(zip(left, right, strict=True)), DECODER, torch.float32)
    assert [torch.equal(b, torch.cat(g)) for b, g in zip(batches, (left, right), strict=True)] == [True, True]


def test_memory_is_taken_once() -> None:
    staging = Staging(CPU)
    places = set()
    for rows in ([2, 2], [1, 1], [1, 3]):
        places.add(batch_of(parts(rows, (3, 8, 8), True), staging).data_ptr())
    assert len(places) == 1


def test_outputs_in_reused_memory_are_copied() -> None:
    staging = Staging(CPU)
    given = parts([2, 2], (3, 8, 8), True)
    batch = batch_of(given, staging)
    reused = [batch, batch[1:], batch.permute(0, 2, 3, 1)]
    others = [given[0], batch + 1]
    expected = [value.clone() for value in reused]
    copies, borrowed = staging.on_host([*reused, *others])
    assert not borrowed
    assert [copy is other for copy, other in zip(copies[3:], others, strict=True)] == [True, True]
    batch.zero_()
    for copy, values in zip(copies, expected, strict=False):
        assert torch.equal(copy, values)


def test_batches_of_all_kinds_in_turn() -> None:
    """One staging's memory: larger ones and smaller, in both formats, several dtypes, and images that become floats."""
    staging = Staging(CPU)
    kinds = [((3, 8, 8), True), ((3, 8, 8), False), ((8, 8, 3), False), ((3, 16, 16), True), ((3, 4, 4), True)]
    for _ in range(2):
        for shape, channels_last in kinds:
            for rows in ([1, 1], [2, 1, 3], [1, 1]):
                given = parts(rows, shape, channels_last)
                batch, expected = batch_of(given, staging), torch.cat(given)
                assert torch.equal(batch, expected), (shape, channels_last, rows)
                assert batch.stride() == expected.stride()
                assert batch.data_ptr() not in {part.data_ptr() for part in given}
            images = [torch.randint(256, (1, *shape[1:], 3), dtype=torch.uint8) for _ in range(3)]
            assert torch.equal(batch_of(images, staging), DECODER.batch(torch.cat(images)))


def test_a_single_part_is_handed_on() -> None:
    (part,) = parts([3], (3, 2, 2), False)
    assert batch_of([part]) is part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_copy_has_memory_of_its_own(dtype: torch.dtype) -> None:
    whole = torch.arange(24).reshape(4, 3, 2).to(dtype)
    copy = copied(whole[1:3])
    assert copy.dtype == dtype
    expected = whole[1:3].clone()
    whole.zero_()
    assert torch.equal(copy, expected)
    assert copied(whole[:0]).shape == (0, 3, 2)


def test_rows_are_copied_where_they_belong() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.zeros(5, 3, 400, 300, dtype=dtype)  # over what is copied without giving the lock away
        values = torch.randn(2, 3, 400, 300).to(dtype)
        copy_rows(whole, 2, values)
        copy_rows(whole, 4, values[:1].to(memory_format=torch.channels_last))
        assert torch.equal(whole, torch.cat([torch.zeros_like(values), values, values[:1]]))


@pytest.mark.parametrize("rows", [[1], [3], [2, 1, 3]])
def test_pixels_become_the_model_s_input(rows: list[int]) -> None:
    staging = Staging(CPU)
    places = set()
    for _ in range(2):
        given = [torch.randint(0, 256, (n, 224, 224, 3), dtype=torch.uint8) for n in rows]
        batch = batch_of(given, staging)
        mean, std = (torch.tensor(value)[:, None, None] for value in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        expected = (torch.cat(given).permute(0, 3, 1, 2) / 255 - mean) / std
        assert (batch - expected).abs().max() < 1e-5
        assert batch.is_contiguous(memory_format=torch.channels_last)
        places.add(batch.data_ptr())
    assert len(places) == 1
    assert torch.equal(batch_of(given, dtype=torch.bfloat16), batch.to(torch.bfloat16))


def test_threads_stay_as_they_were() -> None:
    def after() -> int:
        batch_of([torch.zeros(1, 224, 224, 3, dtype=torch.uint8)])
        return torch.get_num_threads()

    with ThreadPoolExecutor(1, initializer=compute_with, initargs=(3,)) as pool:
        assert pool.submit(after).result() == 3
