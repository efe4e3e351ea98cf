"""Proxies that also record in-place operators, and writes to items and attributes.

``h += y`` writes to the memory of ``h``. torch.fx's proxies have no in-place operators, so Python falls back to
``h = h + y``, and aliases of the same memory miss the change (pytorch#198077).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.fx.proxy import Attribute

from fxcore.tracing.writes import IN_PLACE_OPERATORS, is_number

_OWN = frozenset(("tracer", "node", "root", "attr", "_node"))
# Attributes of tensors that have no effect on values.
_HARMLESS = frozenset(("requires_grad", "grad", "names"))

# ``Tensor.__iadd__`` and so on, which torch calls on proxies for ``tensor += proxy``, mapped to ``operator.iadd``.
TENSOR_METHODS: dict[str, Callable[..., Any]] = {f"__{o.__name__}__": o for o in IN_PLACE_OPERATORS}
TENSOR_METHODS["__setitem__"] = operator.setitem


class TracedWrite(TypeError):
    """The model sets an attribute of a traced value, which a graph cannot record."""


class TracedKey(TypeError):
    """The model looks a traced value up in a dictionary or set, which would need to compare its value."""


class TracedAutocast(RuntimeError):
    """The model turns autocast on, which a graph cannot record."""


class RecordingProxy(fx.Proxy):
    """A proxy that records in-place operators as ``operator.iadd`` and so on, and ``x[i] = y`` as ``setitem``."""

    def __getattr__(self, name: str) -> RecordingAttribute:
        return RecordingAttribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a plain Python attribute of a proxy; reject attributes that determine a tensor's values.

        ``x.data += 1`` sets ``x.data`` to the result of an operation that already wrote to it, so there is nothing to
        record.

        Raises:
            TracedWrite: ``name`` is an attribute of tensors.
        """
        if name in _OWN or name in _HARMLESS or not hasattr(Tensor, name):
            object.__setattr__(self, name, value)
            return
        made = value.node if isinstance(value, fx.Proxy) else None
        if made is None or made.target not in IN_PLACE_OPERATORS or made.all_input_nodes[0].target is not getattr:
            raise TracedWrite(f"sets the attribute {name} of a traced value")

    def __hash__(self) -> int:
        """Hash a proxy by identity, as torch hashes tensors; reject values that Python hashes by value.

        Raises:
            TracedKey: the proxy is a size, a number computed from sizes, a dtype or a device.
        """
        if is_number(self.node):
            raise TracedKey("uses a traced value as a key")
        return id(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


class RecordingAttribute(RecordingProxy, Attribute):
    """An attribute of a proxy that records in the same way."""


def _recorder(in_place: Callable[..., Any], pure: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        # Use the node name that torch.fx and torchvision's extractor would give.
        name = self.tracer.graph._target_to_str(pure)
        return self.tracer.create_proxy("call_function", in_place, (self, other), {}, name=name)

    record.__name__ = f"__{in_place.__name__}__"
    return record


for _in_place, _pure in IN_PLACE_OPERATORS.items():
    setattr(RecordingProxy, f"__{_in_place.__name__}__", _recorder(_in_place, _pure))
