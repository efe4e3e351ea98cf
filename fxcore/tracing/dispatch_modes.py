"""torch's dispatch modes, which see each operator that a thread calls.

They are documented in "Extending PyTorch", in a module with a private name. Only this file imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxcore.nesting import storage_ids, tensors_in
from fxcore.tensors import strided_parts
from fxcore.tracing.attributes import Attributes


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


class StateGuard(DispatchMode):
    """A dispatch mode that can restore, on exit, parameters and buffers of ``model`` that this thread writes to.

    Subclasses call :meth:`_save` before a write. Only what is written to is copied.
    """

    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self._state: dict[int, str] = {}
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        if isinstance(model, nn.Module):
            tensors = (*model.named_parameters(), *model.named_buffers())
            self._state = {place: name for name, tensor in tensors for place in storage_ids(tensor)}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for tensor, before in self._saved.values():
                tensor.copy_(before)

    def _overwritten(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the parameters and buffers, or views of them, that a call of the operator ``func`` writes to."""
        written = written_arguments(func, args, kwargs)
        parts = (part for tensor in written for part in strided_parts(tensor))
        return [part for part in parts if part.untyped_storage()._cdata in self._state]

    def _save(self, tensor: Tensor) -> None:
        place = tensor.untyped_storage()._cdata
        if place not in self._saved:
            whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
            self._saved[place] = whole, whole.clone()


class Unchanged(LenientMode, StateGuard):
    """A dispatch mode that undoes, on exit, this thread's writes to the parameters and buffers of ``model``, and any
    thread's to its plain attributes.

    Models write to them in eval mode too: an embedding with ``max_norm`` scales the rows that it looks up.

    >>> words = nn.Embedding(2, 3, max_norm=1.0, _weight=torch.ones(2, 3))
    >>> with Unchanged(words), torch.no_grad():
    ...     bool(words(torch.tensor(0)).norm() < 1.1)
    True
    >>> words.weight.unique().tolist()
    [1.0]
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._attributes = Attributes(model)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._attributes.restore()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in self._overwritten(func, args, kwargs or {}):
            self._save(tensor)
        return func(*args, **(kwargs or {}))
