"""Against the safetensors library itself."""

import contextlib
import json

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.codecs.tensors import safetensors as codec
from service.problems import Problem

ALL = {
    "bool": torch.tensor([True, False, True]),
    "u8": torch.arange(3, dtype=torch.uint8),
    "i8": torch.arange(5, dtype=torch.int8),
    "i16": torch.arange(3, dtype=torch.int16),
    "i32": torch.arange(3, dtype=torch.int32),
    "i64": torch.arange(3),
    "f16": torch.randn(3, 5).half(),
    "bf16": torch.randn(3, 5).bfloat16(),
    "f32": torch.randn(2, 3, 4),
    "f64": torch.randn(2, 0, 4).double(),
    "scalar": torch.tensor(1.5),
}


def _file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + data)


def _one(**changed):
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changed}}


def test_the_library_reads_what_is_written(tmp_path):
    file = b"".join(codec.write(ALL, {"model": "m", "nodes": "{}"}))
    loaded = safetensors.torch.load(file)
    assert loaded.keys() == ALL.keys()
    for key, tensor in ALL.items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor)
    (tmp_path / "a.safetensors").write_bytes(file)
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as opened:  # by memory map, which needs alignment
        assert opened.metadata() == {"model": "m", "nodes": "{}"}
        assert torch.equal(opened.get_tensor("f32"), ALL["f32"])


def test_tensors_are_written_from_their_own_memory():
    tensor = torch.zeros(4)
    parts = codec.write({"a": tensor}, {})
    tensor += 1.0
    assert torch.equal(safetensors.torch.load(b"".join(parts))["a"], tensor)


def test_every_tensor_is_aligned():
    file = b"".join(codec.write({"odd": torch.zeros(3, dtype=torch.uint8), "wide": torch.zeros(2)}, {"k": "é"}))
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    assert length % 8 == 0
    assert header["wide"]["data_offsets"][0] % 4 == 0


def test_reads_what_the_library_writes():
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.uint8),
        "c": np.zeros((0, 3)),
    }
    read = codec.read(bytearray(safetensors.numpy.save(arrays, {"some": "metadata"})))
    assert read.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(read[key].numpy(), array)


def test_reads_misaligned_data():
    header = json.dumps(_one()).encode()
    for padding in (b"", b" "):  # one of the two has an odd length
        assert codec.read(_file(header + padding, np.float32(2.5).tobytes()))["a"].item() == 2.5


@pytest.mark.parametrize(
    "body",
    [
        bytearray(),
        bytearray(b"\xff" * 7),
        bytearray(b"\xff" * 100),
        _file(b"{"),
        _file(b"[]"),
        _file({}),
        _file({"__metadata__": {}}),
        _file({"a": 1}),
        _file(_one(), b"123"),
        _file(_one(), b"12345"),
        _file(_one(dtype="F33"), b"1234"),
        _file(_one(shape=[-1, -1]), b"1234"),
        _file(_one(shape=[True]), b"1234"),
        _file(_one(shape=[2**62, 4]), b"1234"),
        _file(_one(shape=[0, 2**62], data_offsets=[0, 0])),
        _file(_one(shape=[0, 2**63], data_offsets=[0, 0])),
        _file(_one(shape=[0, 2**62, 2**62], data_offsets=[0, 0])),
        _file(_one(shape=[1, 3, 2**62, 0], data_offsets=[0, 0])),
        _file(_one(shape=[1] * 9), b"1234"),
        _file(_one(shape=[1] * 300_000), b"1234"),
        _file(_one(data_offsets=[-4, 0]), b"1234"),
        _file(_one(data_offsets=[0.0, 4.0]), b"1234"),
        _file(_one(dtype="U8", data_offsets=[False, True]), b"1"),
        _file(_one(data_offsets=[4, 0]), b"1234"),
        _file(_one(data_offsets=[4, 8]), b"12345678"),
        _file({**_one(), "b": _one()["a"]}, b"1234"),
        _file({**_one(), "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}, b"1" * 12),
        _file({str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(300)}),
        _file(b"[" * 100_000),
        (2**63).to_bytes(8, "little") + b"{}",
    ],
)
def test_refuses_what_is_no_safetensors_file(body):
    with pytest.raises(Problem) as refusal:
        codec.read(bytearray(body))
    assert refusal.value.slug == "bad-tensor"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 120))
def test_any_bytes_are_read_or_refused(noise, position):
    body = _file(_one(), b"1234")
    body[position : position + len(noise)] = noise
    with contextlib.suppress(Problem):
        codec.read(body)
