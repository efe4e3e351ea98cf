"""Detect the arithmetic that this machine's processor supports."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names that Linux and torch use for bfloat16 multiplication: Intel and AMD, Intel, and ARM."""

_INT8 = frozenset({"avx512_vnni", "avx_vnni", "dot", "asimddp"})
"""Names for int8 multiplication with 32-bit accumulation: Intel and AMD (first two), and ARM."""

CPUINFO = Path("/proc/cpuinfo")


@cache
def computes_bfloat16() -> bool:
    """Return whether the processor computes in bfloat16, as Intel does since Sapphire Rapids and AMD since Zen 4."""
    return not _BFLOAT16.isdisjoint(instructions())


@cache
def adds_int8_products_exactly() -> bool:
    """Return whether the processor accumulates int8 products in 32 bits (VNNI).

    Other x86 processors add pairs of products in 16 bits, which overflows.
    """
    return not _INT8.isdisjoint(instructions())


def instructions() -> set[str]:
    """Return the names of the processor's instruction sets, as Linux or torch spell them."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.11
    if capabilities is not None:
        return {name for name, has in capabilities().items() if has}
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
