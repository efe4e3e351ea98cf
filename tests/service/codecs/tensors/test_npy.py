"""Against numpy's own reading and writing."""

import contextlib
import io
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.codecs.tensors import npy
from service.problems import Problem
from service.schemas.specs import key_fault

TENSORS = [
    torch.randn(2, 3, 4),
    torch.randn(2, 3).half(),
    torch.arange(6).reshape(1, 6),
    torch.tensor([True, False]),
    torch.zeros(2, 0),
]


def saved(array, **options):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), **options)
    return bytearray(buffer.getvalue())


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_numpy_reads_npy(tensor):
    loaded = np.load(io.BytesIO(b"".join(npy.write(tensor))))
    assert loaded.dtype == tensor.numpy().dtype
    np.testing.assert_array_equal(loaded, tensor.numpy())


def test_numpy_reads_npz_uncompressed():
    # "file" is the name of savez's own argument; the large one takes several steps.
    tensors = {"layer4": TENSORS[0], "file": TENSORS[1], "a.b/c": TENSORS[2], "large": torch.randn(3, 300_001)}
    file = b"".join(npy.write_npz(tensors))
    loaded = np.load(io.BytesIO(file))
    assert loaded.files == list(tensors)
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[key], tensor.numpy())
    archive = zipfile.ZipFile(io.BytesIO(file))
    assert archive.testzip() is None
    assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=4, unique=True))
@example(["a\0b", "a\0c"])
@example(["a", "a.npy", "a/", "/a", "../a"])
def test_npz_keeps_every_key_that_an_output_can_have(keys):
    keys = [key for key in keys if key_fault(key) is None]
    tensors = {key: torch.tensor([i]) for i, key in enumerate(keys)}
    loaded = np.load(io.BytesIO(b"".join(npy.write_npz(tensors))))
    assert loaded.files == keys
    # By the name in the zip: numpy takes "a.npy" for that of "a" first.
    assert [loaded[f"{key}.npy"].tolist() for key in keys] == [[i] for i in range(len(keys))]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.asfortranarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4)),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype=np.uint8),
        np.zeros((0, 3), np.float32),
        np.zeros((2**30, 0, 2**20), np.float64),
        np.zeros((1, 2, 1, 2, 1, 2, 1, 2), np.float32),
        np.float64(2.5),
    ],
    ids=["C", "Fortran", "big-endian", "uint8", "empty", "empty beside huge", "eight dimensions", "scalar"],
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_reads_what_numpy_writes(array, version):
    np.testing.assert_array_equal(npy.read(saved(array, version=version)).numpy(), array)


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_equal_heads_before_different_values(version):
    """Heads are remembered, and a head that differs in one place is another's."""
    for array in (np.zeros((2, 3), "f4"), np.ones((2, 3), "f4"), np.ones((3, 2), "f4"), np.asfortranarray(np.eye(3))):
        np.testing.assert_array_equal(npy.read(saved(array, version=version)).numpy(), array)


def test_reading_shares_the_bodys_memory():
    body = saved(np.zeros(4, np.float32))
    tensor = npy.read(body)
    body[-4:] = np.float32(7).tobytes()
    assert tensor[3] == 7


class _Pickled:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def _header(text):
    header = text.encode() + b"\n"
    return bytearray(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


def _shape(text):
    return _header("{'descr': '<f4', 'fortran_order': False, 'shape': " + text + ", }")


@pytest.mark.parametrize(
    "body",
    [
        bytearray(),
        bytearray(b"\x93NUMPY"),
        bytearray(b"not an array at all"),
        bytearray(b"\x93NUMPY\x03\x00\x10\x00\x00\x00"),
        saved(np.array([_Pickled()], dtype=object), allow_pickle=True),
        saved(np.array(["text"])),
        saved(np.zeros(2, [("a", "f4")])),
        saved(np.zeros(2, np.complex64)),
        saved(np.zeros(2, "M8[s]")),
        saved(np.zeros(2, np.float32))[:-1],
        saved(np.zeros(2, np.float32)) + b"x",
        _shape("(1000000000000, 1000000000000)"),
        _shape("(-1,)"),
        _shape("(True, 'x')"),
        _shape("(True,)") + bytes(4),
        _shape(f"(0, {2**62})"),
        _shape(f"({2**63}, 0, 3)"),
        _shape(f"(0, {10**30})"),
        _shape(f"({'1, ' * 70})") + bytes(4),
        _shape(f"(0x{'f' * 3900},)"),  # more digits than Python writes out
        _header("(" * 3000),
        _header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), " + " " * 9000 + "}"),
        _header("__import__('os').abort()"),
    ],
)
def test_refuses_what_is_no_plain_array(body):
    with pytest.raises(Problem) as refusal:
        npy.read(bytearray(body))
    assert refusal.value.slug == "bad-tensor"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 140))
def test_any_bytes_are_read_or_refused(noise, position):
    body = saved(np.zeros(2, np.float32))
    body[position : position + len(noise)] = noise
    with contextlib.suppress(Problem):
        npy.read(body)
