"""The clock waits for the current stream of a GPU, and for no other, on which another thread may capture a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxcore.analysis.clock import now

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CUDA = torch.device("cuda", 0)
CYCLES = 1_000_000_000
"""At least a third of a second on any GPU."""
torch_cuda: Any = torch.cuda  # parts of it have no types


def test_it_waits_for_work_on_the_current_stream() -> None:
    now(CUDA)
    torch_cuda._sleep(CYCLES)
    done = torch.cuda.current_stream(CUDA).record_event()
    assert not done.query()
    now(CUDA)
    assert done.query()


def test_it_leaves_other_streams_alone() -> None:
    other = torch_cuda.Stream(CUDA)
    with torch.cuda.stream(other):
        torch_cuda._sleep(CYCLES)
        done = other.record_event()
    now(CUDA)
    assert not done.query()
    other.synchronize()
