"""torch's dispatch modes, which see each operator that a thread calls.

They are documented in "Extending PyTorch", in a module with a private name. Only this file imports it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxcore.nesting import tensors_in


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among the arguments of a call that the operator ``func`` writes to.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> [tensor is x for tensor in written_arguments(torch.ops.aten.add_.Tensor, (x, 1), {})]
    [True]
    """
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    if schema is None or not schema.is_mutable:
        return []
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **(kwargs or {})}
    return tensors_in([given.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write])


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
