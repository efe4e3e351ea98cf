"""Counting of floating-point operations."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from fxcore.tracing.dispatch_modes import LenientMode


class FlopCounter(LenientMode):
    """A context manager that counts the FLOPs of the calling thread; a multiply-add is two.

    ``torch.utils.flop_counter.FlopCounterMode`` counts the same, but hooks the modules of all threads meanwhile.

    Attributes:
        total: FLOPs so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(getattr(func, "_overloadpacket", None))  # higher-order operators have none
        decompose = getattr(func, "decompose", None)
        if count is None and decompose is not None:
            with self:  # under inference mode, composite operators arrive here whole
                out = decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=out)
        return out
