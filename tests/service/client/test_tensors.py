"""The outputs of a call, from the responses to its requests."""

from __future__ import annotations

import json
from threading import Thread

import numpy as np
import pytest
import safetensors.numpy
import torch

from service.client.tensors import Assembly


def content(**arrays):
    return np.frombuffer(bytearray(safetensors.numpy.save(arrays)), np.uint8)


def test_a_single_response_is_not_copied():
    received = content(a=np.arange(6, dtype=np.float32).reshape(2, 3))
    assembly = Assembly(2)
    assembly.put(0, 2, received)
    array, tensor = assembly.arrays()["a"], assembly.tensors()["a"]
    assert np.array_equal(array, [[0, 1, 2], [3, 4, 5]])
    assert np.shares_memory(array, received)
    array[0, 0] = 7
    assert tensor[0, 0] == 7


def test_several_responses_arrive_in_any_order():
    assembly = Assembly(3)
    assembly.put(2, 3, content(a=np.array([[2.0]], np.float16)))
    assembly.put(0, 2, content(a=np.array([[0.0], [1.0]], np.float16)))
    assert assembly.arrays()["a"].tolist() == [[0], [1], [2]]


@pytest.mark.parametrize("first", ["all", "none"])
def test_a_response_without_rows_leaves_those_of_the_other(first):
    parts = {"all": np.array([[1.0], [2.0]]), "none": np.empty((0, 1))}
    assembly = Assembly(2)
    for name in (first, *parts.keys() - {first}):
        assembly.put(0, len(parts[name]), content(a=parts[name]))
    assert assembly.arrays()["a"].tolist() == [[1], [2]]


def test_a_response_without_rows_arrives_at_the_same_time_as_the_other(monkeypatch):
    """The other arrives while memory is allocated for the rows that this one lacks."""
    assembly, empty = Assembly(2), np.empty
    other = Thread(target=assembly.put, args=(0, 2, content(a=np.array([[1.0], [2.0]]))))

    def allocated(*shape):
        other.start()
        other.join(0.5)  # it has to wait
        return np.full_like(empty(*shape), -1)

    none = content(a=empty((0, 1)))
    monkeypatch.setattr(np, "empty", allocated)
    assembly.put(0, 0, none)
    other.join()
    assert assembly.arrays()["a"].tolist() == [[1], [2]]


def test_maps_of_different_sizes_become_a_list():
    assembly = Assembly(4)
    assembly.put(1, 2, content(a=np.array([[1.0, 2.0]])))
    assembly.put(2, 4, content(a=np.array([[3.0], [4.0]])))
    assembly.put(0, 1, content(a=np.array([[0.0, 0.0]])))
    arrays, tensors = assembly.arrays()["a"], assembly.tensors()["a"]
    assert [row.tolist() for row in arrays] == [[0, 0], [1, 2], [3], [4]]
    assert [row.tolist() for row in tensors] == [[0, 0], [1, 2], [3], [4]]


def test_bfloat16_is_widened_for_numpy():
    value = torch.tensor([1.5, -2.25]).bfloat16()
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode().ljust(72)
    bits = value.view(torch.int16).numpy().tobytes()
    assembly = Assembly(2)
    assembly.put(0, 2, np.frombuffer(bytearray(len(header).to_bytes(8, "little") + header + bits), np.uint8))
    assert assembly.arrays()["a"].tolist() == [1.5, -2.25]
    assert torch.equal(assembly.tensors()["a"], value)
