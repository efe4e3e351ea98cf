"""The arithmetic that this machine's processor has."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instructions that multiply in bfloat16, of Intel and AMD, of Intel, and of ARM, by the names of Linux and torch."""

_INT8 = frozenset({"avx512_vnni", "avx_vnni", "dot", "asimddp"})
"""Instructions that multiply in int8 and add in 32 bits, of Intel and AMD, and of ARM."""

CPUINFO = Path("/proc/cpuinfo")


@cache
def computes_bfloat16() -> bool:
    """Return whether the processor computes in bfloat16, as Intel's since Sapphire Rapids and AMD's since Zen 4 do."""
    return not _BFLOAT16.isdisjoint(_instructions())


@cache
def adds_int8_products_exactly() -> bool:
    """Return whether the processor adds products of int8 in 32 bits (VNNI). Others of x86 add pairs in 16, which
    overflow."""
    return not _INT8.isdisjoint(_instructions())


def _instructions() -> set[str]:
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.11 has none
    if capabilities is not None:
        return {name for name, has in capabilities().items() if has}
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
