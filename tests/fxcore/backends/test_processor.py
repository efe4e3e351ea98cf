"""What the processor computes in: as OpenVINO and Linux say it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxcore.backends import BACKENDS, why_bfloat16_is_slow
from fxcore.backends.processor import adds_int8_products_exactly, computes_bfloat16

CPU = torch.device("cpu")


def test_openvino_has_bfloat16_too() -> None:
    """OpenVINO emulates bfloat16 on some other processors, where it is slow."""
    openvino = pytest.importorskip("openvino")
    has = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert has or BACKENDS["openvino"].unavailable(CPU, "bfloat16") is not None


def test_number_formats_with_a_torch_that_does_not_know_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linux does: on Zen 3, Zen 4, a Xeon with AMX, Graviton 3, and where nothing is known."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr("fxcore.backends.processor.CPUINFO", cpuinfo := tmp_path / "cpuinfo")
    for text, bfloat16, int8 in (
        ("flags\t\t: fpu avx2 fma\n", False, False),
        ("flags\t\t: fpu avx2 avx512_vnni avx512_bf16\n", True, True),
        ("flags\t\t: fpu avx512_vnni amx_bf16 amx_tile\n", True, True),
        ("BogoMIPS\t: 2100.00\nFeatures\t: fp asimd asimddp bf16\n", True, True),
        ("", False, False),
    ):
        cpuinfo.write_text(text)
        computes_bfloat16.cache_clear()
        adds_int8_products_exactly.cache_clear()
        assert (computes_bfloat16(), adds_int8_products_exactly()) == (bfloat16, int8), text
        assert (why_bfloat16_is_slow(CPU) is None) == bfloat16
    computes_bfloat16.cache_clear()
    adds_int8_products_exactly.cache_clear()
    assert why_bfloat16_is_slow(torch.device("cuda")) is None
