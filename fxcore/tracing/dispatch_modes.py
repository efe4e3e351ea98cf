"""torch's dispatch modes, which see each operator that a thread calls.

They are documented in "Extending PyTorch", in a module with a private name. Only this file imports it.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A typed dispatch mode under which higher-order operators raise, so that ``func`` always has tags and a schema."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]


class LenientMode(DispatchMode):
    """A dispatch mode that runs higher-order operators too, and under which torch.compile compiles.

    flex_attention is such an operator, and calls torch.compile.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
