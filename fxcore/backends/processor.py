"""The arithmetic that this machine's processor has."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instructions that multiply in bfloat16, of Intel and AMD, of Intel, and of ARM, by the names of Linux and torch."""


@cache
def computes_bfloat16() -> bool:
    """Return whether the processor computes in bfloat16, as Intel's since Sapphire Rapids and AMD's since Zen 4 do."""
    return not _BFLOAT16.isdisjoint(_instructions())


def _instructions() -> set[str]:
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # torch 2.11 has none
    if capabilities is not None:
        return {name for name, has in capabilities().items() if has}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
