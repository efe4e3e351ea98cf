"""What the processor computes in: as OpenVINO and Linux say it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxcore.backends import why_slower_than_float32
from fxcore.backends.processor import computes_bfloat16

CPU = torch.device("cpu")


def test_openvino_has_it_too() -> None:
    """OpenVINO emulates bfloat16 on some other processors, where it is slow."""
    openvino = pytest.importorskip("openvino")
    has = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert has or not computes_bfloat16()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_with_a_torch_that_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    known = computes_bfloat16()
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    computes_bfloat16.cache_clear()
    assert computes_bfloat16() == known


def test_what_is_slow_is_said() -> None:
    assert (why_slower_than_float32(CPU, "bfloat16") is None) == computes_bfloat16()
    assert why_slower_than_float32(CPU, "float32") is None
    assert why_slower_than_float32(torch.device("cuda"), "bfloat16") is None
