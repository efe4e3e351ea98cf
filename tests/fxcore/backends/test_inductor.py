"""Inductor: the same values, and a clear word where there is no compiler. CUDA graphs: what needs no GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from fxcore import create_extractor
from fxcore.analysis.verify import verify
from fxcore.backends import BACKENDS, Options, faster_than_eager
from fxcore.backends.cudagraphs import Memory, captured_size
from fxcore.errors import BadTensor

CPU = torch.device("cpu")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
@pytest.mark.exhaustive
def test_values(batch: torch.Tensor, tmp_path: Path) -> None:
    """Also of what was kept, and nothing is kept beside it. Other sizes, for which inductor would not round up as the
    pooling does, are rejected."""
    model = nn.Sequential(nn.Conv2d(3, 4, 7, 4), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)).eval()
    module = create_extractor(model, ["2"], batch[:2])
    made: set[int] = set()
    for _ in range(2):
        lowered = BACKENDS["inductor"].lower(module, (batch[:2],), Options(threads=2, cache=tmp_path))
        for inputs in (batch, batch[:1], batch[:3], batch[:2].contiguous(memory_format=torch.channels_last)):
            assert verify(module, lowered, inputs).relative < 1e-4
        with pytest.raises(BadTensor, match=r"for rows of .* lower it for that size"):
            lowered(batch[:2, :, 1:, 5:])
        (kept,) = tmp_path.iterdir()
        assert {file.name for file in kept.iterdir()} == {"model.pt2", "log"}
        made.add((kept / "model.pt2").stat().st_mtime_ns)
    assert len(made) == 1


def test_where_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor = BACKENDS["inductor"]
    assert "for CPUs" in str(inductor.unavailable(torch.device("cuda"), "float32"))
    assert "float precisions" in str(inductor.unavailable(CPU, "int8"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "needs a C++ compiler and there is no 'no-such-compiler'" in str(inductor.unavailable(CPU, "float32"))


def test_what_is_tried_on_cpu() -> None:
    names = [backend.name for backend in faster_than_eager(CPU, "float32")]
    assert names == (["openvino"] if BACKENDS["openvino"].unavailable(CPU, "float32") is None else [])
    assert "CUDA device" in str(BACKENDS["cudagraphs"].unavailable(CPU, "float32"))


def test_memory_that_graphs_share() -> None:
    """Each asks for tensors of its own shapes; what is captured stays where it is when the memory grows."""
    memory = Memory()
    small, bits = memory.tensors([((2, 3), torch.float32), ((5,), torch.bool)], CPU)
    small.fill_(1.5)
    bits.fill_(True)
    (again,) = memory.tensors([((2, 3), torch.float32)], CPU)
    assert again.data_ptr() == small.data_ptr()
    assert torch.equal(small, torch.full((2, 3), 1.5))
    (large,) = memory.tensors([((1000,), torch.float64)], CPU)
    large.zero_()
    assert torch.equal(small, torch.full((2, 3), 1.5))
    assert memory.tensors([((2, 3), torch.float32)], CPU)[0].data_ptr() == large.data_ptr()


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 12), (13, 16)])
def test_sizes_that_cuda_graphs_are_recorded_for(rows: int, size: int) -> None:
    assert captured_size(rows) == size
