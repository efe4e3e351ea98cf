"""Find what a model refers to outside its registered parameters, buffers and submodules.

Hooks and functions set on a module often close over the model itself. A deep copy does not copy functions, so those of
the copy refer to the original. Tensors that are held apart, such as views of a buffer, are not replaced with it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxcore.wrappers import unwrapped

_LEFT_OUT = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")
"""Attributes whose values torch copies, or which :func:`fxcore.wrappers.unwrap_parts` removes."""

_SIMPLE = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, BuiltinFunctionType)


def uncopied_reference(model: nn.Module) -> str | None:
    """Describe the first function in ``model`` that refers to a part of it, which a deep copy would not follow.

    Returns None if there is none.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> _ = model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    >>> uncopied_reference(model) is None
    True
    >>> _ = model[1].register_forward_hook(lambda module, inputs, output: output * model[0].bias)
    >>> uncopied_reference(model)
    "a hook of '1'"
    """
    modules = set(model.modules())
    storages = {_storage(t) for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
    for path, key, value in _attributes(model):
        for found, copied in _reached(value, modules):
            own = _storage(found) in storages if isinstance(found, Tensor) else found in modules
            if own and not copied:
                where = repr(path) if path else "the model"
                return f"a hook of {where}" if key.endswith("_hooks") else f"{key} of {where}"
    return None


def holds_tensors(model: nn.Module) -> bool:
    """Return whether attributes or hooks of ``model`` refer to tensors other than as parameters and buffers of a part.

    >>> model = nn.Linear(2, 2)
    >>> holds_tensors(model)
    False
    >>> model.last = model.weight[-1]
    >>> holds_tensors(model)
    True
    """
    modules = set(model.modules())
    reached = (found for _, _, value in _attributes(model) for found, _ in _reached(value, modules))
    return any(isinstance(found, Tensor) for found in reached)


def _attributes(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of each attribute that is not registered; those of wrappers are left out, since they
    are removed."""
    for path, part in model.named_modules():
        if unwrapped(part) is part:
            yield from ((path, key, value) for key, value in vars(part).items() if key not in _LEFT_OUT)


def _reached(start: Any, modules: set[nn.Module]) -> Iterator[tuple[nn.Module | Tensor, bool]]:
    """Yield the modules and tensors that ``start`` refers to, and whether a deep copy of it would copy them.

    What ``modules`` refer to is left out.
    """
    waiting, seen = [(start, True)], {(id(start), True)}
    while waiting:
        value, copied = waiting.pop()
        if isinstance(value, (nn.Module, Tensor)):
            yield value, copied
        if isinstance(value, Tensor) or (isinstance(value, nn.Module) and value in modules):
            continue
        copied = copied and not isinstance(value, (FunctionType, weakref.ref))
        for inner in _inside(value):
            # Two values may be equal, so they are compared by identity. All of them live as long as the model.
            if not isinstance(inner, _SIMPLE) and (id(inner), copied) not in seen:
                seen.add((id(inner), copied))
                waiting.append((inner, copied))


def _inside(value: Any) -> Iterable[Any]:
    """Return the values that ``value`` refers to directly."""
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if f"{type(value).__module__}.{type(value).__name__}" == "torch.nn.modules.module._WrappedHook":
        return (value.hook,)  # it refers to its module weakly, but copies it
    if isinstance(value, weakref.ref):
        return (value(),)
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    return list(getattr(value, "__dict__", {}).values())


def _of_function(function: FunctionType) -> list[Any]:
    if function.__module__ is not None and function.__module__.split(".")[0] == "torch":
        return []  # its globals are torch's own
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a variable without a value yet
            continue
    return found + [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in ``code``, and in the functions that it defines."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _storage(tensor: Tensor) -> int:
    # Sparse tensors have no storage; user_entry refuses them.
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
